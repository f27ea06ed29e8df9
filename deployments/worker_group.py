"""The worker actors of one replica: started, loaded, watched and ended together."""

from __future__ import annotations

import asyncio
import logging
from typing import Any

import ray
from ray.actor import ActorClass, ActorHandle
from ray.util.placement_group import get_current_placement_group
from ray.util.scheduling_strategies import PlacementGroupSchedulingStrategy

from deployments.specs import ModelSpec
from dflash_core.gguf import cache_root
from dflash_core.neuron.claims import claim_group
from dflash_core.neuron.environment import group_environment, rank_environment
from dflash_core.neuron.installation import check_node
from dflash_core.nxd.installation import check_node as check_nxd_node
from dflash_core.runtime import open_store

logger = logging.getLogger("ray.serve")

# Not Serve's own: its controller, when it recovers, takes the actors there for its replicas.
NAMESPACE = "dflash"
PING_TIMEOUT_S = 10.0
GROUP_TIMEOUT_S = 30.0  # for the NeuronCores of a replica that is being replaced


class WorkerGroup:
    """One actor per rank (with `parallel: nxd` one for all), in the bundles 1.. of the replica's
    placement group.

    Attributes:
        names: actor names in rank order; `ray.get_actor(name, namespace=NAMESPACE)` finds them.
        pids: process ids in rank order.
        lost: done, with the RayActorError as its exception, as soon as a worker has died.
    """

    def __init__(
        self, names: list[str], workers: list[ActorHandle], pids: list[int], held: list[Any]
    ) -> None:
        self.names = names
        self.pids = pids
        self._workers = workers
        self._held = held  # what must live as long as the workers do
        self.lost = asyncio.ensure_future(self._first_death())
        self.lost.add_done_callback(self._report_death)
        self._killed = False

    @classmethod
    async def start(cls, worker_class: ActorClass, spec: ModelSpec, owner: str) -> WorkerGroup:
        """Start, load and warm up all ranks.

        Args:
            owner: prefix of the actor names, unique per replica.

        Raises:
            ray.exceptions.RayTaskError: what loading raised in a worker.
            NeuronError: no group of NeuronCores is free on this node, or it is not fit for them.
        """
        names = [f"{owner}-rank{rank}" for rank in range(spec.num_processes)]
        store = open_store()
        held: list[Any] = [store]
        cores: list[int | None] = [None] * spec.num_processes
        if spec.neuron is not None:
            first, claim = await asyncio.to_thread(claim_group, spec.neuron.cores, GROUP_TIMEOUT_S)
            held.append(claim)
            group = spec.neuron.cores.group(first)
            cores = list(group[:: spec.ranks_per_process])  # the first one of each process
            # The workers look, too; but here it takes no eight processes to find out.
            check = check_nxd_node if spec.nxd else check_node
            await asyncio.to_thread(check, group, spec.neuron.logical_nc_config)
        placement_group = get_current_placement_group()
        workers = []
        for rank, (name, core) in enumerate(zip(names, cores, strict=True)):
            options = {
                "name": name,
                "namespace": NAMESPACE,
                "num_cpus": spec.cpus_per_rank * spec.ranks_per_process,
                "resources": {
                    name: amount * spec.ranks_per_process
                    for name, amount in spec.resources_per_rank.items()
                },
                "runtime_env": {"env_vars": worker_environment(spec, rank, core, store.port)},
            }
            if placement_group is not None:
                options["scheduling_strategy"] = PlacementGroupSchedulingStrategy(
                    placement_group, placement_group_bundle_index=1 + rank
                )
            workers.append(worker_class.options(**options).remote(spec, rank, core))
        pids = await asyncio.gather(*(worker.load.remote(store.port) for worker in workers))
        return cls(names, workers, list(pids), held)

    async def check(self) -> None:
        """Raises RayActorError when a worker is dead, TimeoutError when one does not answer, and
        RayTaskError (StuckStep) when one does, but does not get through its step."""
        if self.lost.done():
            self.lost.result()
        async with asyncio.timeout(PING_TIMEOUT_S):
            await asyncio.gather(*(worker.ping.remote() for worker in self._workers))

    async def _first_death(self) -> None:
        await asyncio.gather(*(worker.live.remote() for worker in self._workers))

    def _report_death(self, lost: asyncio.Future) -> None:
        if not lost.cancelled() and not self._killed:
            logger.error("a worker has died: %s", lost.exception())

    def kill(self) -> None:
        """End all workers at once."""
        self._killed = True
        for worker in self._workers:
            ray.kill(worker)


def worker_environment(
    spec: ModelSpec, rank: int, core: int | None, store_port: int
) -> dict[str, str]:
    """Variables that must be set before the worker imports torch."""
    variables = {
        "OMP_NUM_THREADS": str(spec.num_threads),
        # Between two operations of a step the compute threads spin, longer they sleep: the other
        # model's process may need their cores. Sleeping at once would cost all that a second
        # thread brings (a step of 8 rows: 30.5 ms so, 41 ms with OMP_WAIT_POLICY=passive).
        "GOMP_SPINCOUNT": "20000",
        # All ranks of a group are on one node; the host's own name need not resolve.
        "GLOO_SOCKET_IFNAME": "lo",
    }
    if spec.neuron is None or core is None:
        return variables
    if spec.nxd:
        return variables | group_environment(
            cores=spec.neuron.cores.group(core), logical_nc_config=spec.neuron.logical_nc_config
        )
    return variables | rank_environment(
        rank=rank,
        size=spec.tensor_parallel_size,
        core=core,
        store_port=store_port,
        logical_nc_config=spec.neuron.logical_nc_config,
        cache=cache_root() / "neuron",
    )
