"""The worker actors of one replica: started, loaded, watched and ended together."""

from __future__ import annotations

import asyncio

import ray
from ray.actor import ActorClass, ActorHandle
from ray.util.placement_group import get_current_placement_group
from ray.util.scheduling_strategies import PlacementGroupSchedulingStrategy

from deployments.specs import ModelSpec

NAMESPACE = "serve"


class WorkerGroup:
    """One actor per rank, in the bundles 1.. of the replica's placement group.

    Attributes:
        names: actor names in rank order; `ray.get_actor(name, namespace=NAMESPACE)` finds them.
        pids: process ids in rank order.
    """

    def __init__(self, names: list[str], workers: list[ActorHandle], pids: list[int]) -> None:
        self.names = names
        self.pids = pids
        self._workers = workers

    @classmethod
    async def start(cls, worker_class: ActorClass, spec: ModelSpec, owner: str) -> WorkerGroup:
        """Start, load and warm up all ranks.

        Args:
            owner: prefix of the actor names, unique per replica.

        Raises:
            ray.exceptions.RayTaskError: what loading raised in a worker.
        """
        names = [f"{owner}-rank{rank}" for rank in range(spec.tensor_parallel_size)]
        placement_group = get_current_placement_group()
        workers = []
        for rank, name in enumerate(names):
            options = {
                "name": name,
                "namespace": NAMESPACE,
                "num_cpus": spec.cpus_per_rank,
                "resources": spec.resources_per_rank,
                "runtime_env": {"env_vars": worker_environment(spec)},
            }
            if placement_group is not None:
                options["scheduling_strategy"] = PlacementGroupSchedulingStrategy(
                    placement_group, placement_group_bundle_index=1 + rank
                )
            workers.append(worker_class.options(**options).remote(spec, rank))
        port = await workers[0].store_port.remote()
        pids = await asyncio.gather(*(worker.load.remote(port) for worker in workers))
        return cls(names, workers, list(pids))

    async def check(self) -> None:
        """Raises RayActorError when a worker is dead, TimeoutError when one does not answer."""
        async with asyncio.timeout(10):
            await asyncio.gather(*(worker.ping.remote() for worker in self._workers))

    def kill(self) -> None:
        """End all workers at once."""
        for worker in self._workers:
            ray.kill(worker)


def worker_environment(spec: ModelSpec) -> dict[str, str]:
    """Variables that must be set before the worker imports torch."""
    return {
        "OMP_NUM_THREADS": str(spec.num_threads),
        # All ranks of a group are on one node; the host's own name need not resolve.
        "GLOO_SOCKET_IFNAME": "lo",
    }
