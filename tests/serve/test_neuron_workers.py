"""Workers on Trainium, as far as a machine without one can show: processes, cores, environment.

The Ray cluster of the tests claims to have 64 `neuron_cores`. Workers are real actors in real
placement groups, made by the WorkerGroup that the deployments use; what runs in them is a probe in
place of a model. The errors at the end are those of the real deployments on this machine.
"""

from __future__ import annotations

import asyncio
import os
import threading
from collections.abc import Iterator
from dataclasses import replace
from typing import Any

import pytest
import ray
from ray import serve
from ray.util.placement_group import placement_group, remove_placement_group
from ray.util.scheduling_strategies import PlacementGroupSchedulingStrategy

from deployments import worker_group
from deployments.app import build, rank_options
from deployments.app_args import AppArgs
from deployments.cluster_resources import ResourcesMissing
from deployments.specs import ModelSpec
from deployments.worker_group import WorkerGroup
from deployments.workers import VerifierWorker
from tests.serve.tiny_pair import Tiny

CORES = {"target": "0-7,16-23", "speculation": "8-9"}


@ray.remote(concurrency_groups={"life": 1})
class Probe:
    """In place of a model's worker: says what it was started with."""

    def __init__(self, spec: ModelSpec, rank: int, core: int | None) -> None:
        self.rank, self.core = rank, core

    def load(self, store_port: int) -> int:
        self.store_port = store_port
        return os.getpid()

    @ray.method(concurrency_group="life")
    def live(self) -> None:
        threading.Event().wait()

    def describe(self) -> dict[str, Any]:
        return {
            "rank": self.rank,
            "core": self.core,
            "store_port": self.store_port,
            "counted_by_ray": ray.get_runtime_context().get_accelerator_ids()["neuron_cores"],
            "reserved": ray.get_runtime_context().get_assigned_resources(),
            "environment": dict(os.environ),
        }


@ray.remote(num_cpus=0)
class Replica:
    """In place of a deployment's replica: owns a WorkerGroup in its own placement group."""

    async def start(self, spec: ModelSpec, owner: str) -> list[dict[str, Any]]:
        worker_group.GROUP_TIMEOUT_S = 1.0
        # Here it is no such node.
        worker_group.check_node = lambda cores, logical_nc_config: None
        worker_group.check_nxd_node = worker_group.check_node
        self.group = await WorkerGroup.start(Probe, spec, owner)
        return await asyncio.gather(
            *(
                ray.get_actor(name, namespace=worker_group.NAMESPACE).describe.remote()
                for name in self.group.names
            )
        )


def args(**changes: Any) -> AppArgs:
    target = {"model": "m", "tensor_parallel_size": 8, "neuron_cores": CORES["target"]}
    speculation = {
        "drafter": "d",
        "num_speculative_tokens": 5,
        "neuron_cores": CORES["speculation"],
    }
    return AppArgs.model_validate(
        {"target": target, "speculation": speculation, "device": "neuron", "all_greedy": True}
        | changes
    )


def spec_of(part: str, **changes: Any) -> ModelSpec:
    made = args(**changes)
    model = getattr(made, part)
    return ModelSpec(
        model="m",
        revision=None,
        dtype="bfloat16",
        compile="eager",
        device="neuron",
        shapes=made.shapes(1),
        channel_bytes=1 << 20,
        **rank_options(made, model) | {"cpus_per_rank": 0.1},
    )


@pytest.fixture
def replicas(http_port: int) -> Iterator[Any]:
    """Starts replicas with one bundle for themselves and one per rank; ends them all."""
    started: list[tuple[Any, Any]] = []

    def start(spec: ModelSpec, owner: str) -> Any:
        rank = {"CPU": spec.cpus_per_rank, **spec.resources_per_rank}
        process = {name: amount * spec.ranks_per_process for name, amount in rank.items()}
        group = placement_group(
            [{"CPU": 0.1}, *[process] * spec.num_processes], strategy="STRICT_PACK"
        )
        replica = Replica.options(
            scheduling_strategy=PlacementGroupSchedulingStrategy(
                group, placement_group_bundle_index=0
            )
        ).remote()
        started.append((replica, group))
        return replica.start.remote(spec, owner)

    yield start
    for replica, group in started:
        ray.kill(replica)
        remove_placement_group(group)


def test_replicas_get_cores_of_their_own_and_a_rendezvous_of_their_own(replicas: Any) -> None:
    answers = [
        ray.get(replicas(spec_of(part), owner), timeout=120)
        for part, owner in (("target", "t0"), ("target", "t1"), ("speculation", "d0"))
    ]
    cores = [[rank["core"] for rank in replica] for replica in answers]
    assert cores == [list(range(8)), list(range(16, 24)), [8]]
    assert len({replica[0]["store_port"] for replica in answers}) == 3
    for replica in answers:
        for number, rank in enumerate(replica):
            environment = rank["environment"]
            expected = {
                "RANK": str(number),
                "LOCAL_RANK": str(number),
                "WORLD_SIZE": str(len(replica)),
                "LOCAL_WORLD_SIZE": str(len(replica)),
                "MASTER_ADDR": "127.0.0.1",
                "MASTER_PORT": str(replica[0]["store_port"]),
                "NEURON_RT_VISIBLE_CORES": str(rank["core"]),
                "NEURON_RT_NUM_CORES": "1",
                "NEURON_LOGICAL_NC_CONFIG": "2",
                "TORCH_DEVICE_BACKEND_AUTOLOAD": "0",
            }
            assert {name: environment.get(name) for name in expected} == expected
            assert "NEURON_RT_ROOT_COMM_ID" not in environment
            assert len(rank["counted_by_ray"]) == 1
    folders = {
        rank["environment"][f"TORCH_NEURONX_{kind}_CACHE_DIR"]
        for rank in answers[0]
        for kind in ("NEFF", "NEFF_LOCAL", "HLO")
    }
    assert len(folders) == 24 and all("/neuron/rank-" in folder for folder in folders)


def test_with_nxd_one_process_has_all_cores_of_a_replica(replicas: Any) -> None:
    [process] = ray.get(replicas(spec_of("target", parallel="nxd"), "x0"), timeout=120)
    assert (process["rank"], process["core"]) == (0, 0)
    assert process["reserved"]["neuron_cores"] == 8
    assert process["reserved"]["CPU"] == pytest.approx(0.8)
    environment = process["environment"]
    assert environment["NEURON_RT_VISIBLE_CORES"] == "0-7"
    assert environment["NEURON_RT_NUM_CORES"] == "8"


def test_a_replica_without_a_free_group_is_an_error(replicas: Any) -> None:
    spec = spec_of("speculation")
    one = replace(spec, neuron=replace(spec.neuron, cores=type(spec.neuron.cores)("9", 1, (9,))))
    ray.get(replicas(one, "d1"), timeout=60)
    with pytest.raises(ray.exceptions.RayTaskError, match="all 1 groups of 1 cores .* in use"):
        ray.get(replicas(one, "d2"), timeout=90)


def test_the_real_worker_refuses_this_machine_and_says_why(http_port: int) -> None:
    """It has no torch-neuronx; the message comes back from the worker's process."""
    spec = spec_of("target")
    worker = VerifierWorker.options(
        num_cpus=0.1, runtime_env={"env_vars": {"NEURON_RT_VISIBLE_CORES": "40"}}
    ).remote(spec, 0, 40)
    with pytest.raises(
        ray.exceptions.RayTaskError, match="NeuronError: .*torch-neuronx is not installed for"
    ):
        ray.get(worker.load.remote(0), timeout=60)
    ray.kill(worker)


class TestApplication:
    def neuron_args(self, tiny: Tiny, **target: Any) -> dict[str, Any]:
        made = tiny.args(neuron_cores="8")
        made["target"] |= {"tensor_parallel_size": 8, "neuron_cores": "0-7"} | target
        return made | {"device": "neuron", "all_greedy": True, "cluster_wait_s": 0}

    def test_more_cores_than_the_cluster_has_are_refused_before_anything_starts(
        self, http_port: int, tiny: Tiny
    ) -> None:
        asked = self.neuron_args(tiny, resources_per_rank={"neuron_cores": 9})
        with pytest.raises(ResourcesMissing, match="reserves 73 neuron_cores, but .* has 64"):
            build(AppArgs(**asked))

    def test_ranks_that_do_not_divide_the_heads_are_refused_before_anything_starts(
        self, http_port: int, tiny: Tiny
    ) -> None:
        asked = self.neuron_args(tiny, tensor_parallel_size=16, neuron_cores="16-31")
        with pytest.raises(Exception, match="of the target is 16, but num_attention_heads 8"):
            build(AppArgs(**asked))

    @pytest.mark.parametrize(
        ("parallel", "reason"),
        [
            ("native", "device is neuron, but torch-neuronx is not installed for"),
            ("nxd", "parallel is nxd, but torch-neuronx is not installed for"),
        ],
    )
    def test_deployed_on_a_machine_that_is_none_it_fails_with_the_reason(
        self, http_port: int, tiny: Tiny, parallel: str, reason: str
    ) -> None:
        application = build(AppArgs(**self.neuron_args(tiny), parallel=parallel))
        try:
            with pytest.raises(RuntimeError, match="no-neuron failed"):
                serve.run(application, name="no-neuron", route_prefix="/no-neuron")
            deployments = serve.status().applications["no-neuron"].deployments
            assert reason in deployments["Verifier"].message
        finally:
            serve.delete("no-neuron")
