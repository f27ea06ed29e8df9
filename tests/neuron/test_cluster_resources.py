"""What cannot be placed is an error of the start, with what was found; not a replica that waits."""

from __future__ import annotations

import pytest

from deployments import cluster_resources
from deployments.app import bundles
from deployments.app_args import AppArgs
from deployments.cluster_resources import ResourcesMissing, missing, require

ARGS = AppArgs.model_validate(
    {
        "target": {"model": "t", "tensor_parallel_size": 8, "neuron_cores": "0-7"},
        "speculation": {
            "drafter": "d",
            "num_speculative_tokens": 9,
            "neuron_cores": "8",
        },
        "device": "neuron",
        "all_greedy": True,
    }
)
MODELS = [bundles(ARGS, ARGS.target), bundles(ARGS, ARGS.speculation)]
TRN2 = {"CPU": 192.0, "neuron_cores": 64.0}


def test_on_trainium_every_rank_reserves_a_core() -> None:
    assert [bundle.get("neuron_cores") for bundle in MODELS[0]] == [None] + [1] * 8
    assert [bundle.get("neuron_cores") for bundle in MODELS[1]] == [None, 1]
    assert missing(MODELS, [TRN2]) is None


def test_forced_to_the_cpu_the_same_configuration_reserves_none() -> None:
    args = ARGS.model_copy(update={"device": "cpu"})
    assert all("neuron_cores" not in bundle for bundle in bundles(args, args.target))


@pytest.mark.parametrize(
    ("nodes", "message"),
    [
        ([{"CPU": 16.0}], "reserves 9 neuron_cores, .*of 1 nodes has 0; Ray finds .*neuron-ls"),
        ([{"CPU": 16.0, "neuron_cores": 8.0}], "reserves 9 neuron_cores, .* has 8; "),
        ([{"CPU": 1.0, "neuron_cores": 64.0}], r"reserves 4\.7 CPU, .* has 1; lower cpus_per_rank"),
        ([], "cluster of 0 nodes has 0"),
    ],
)
def test_what_the_cluster_lacks_in_all(nodes: list[dict[str, float]], message: str) -> None:
    reason = missing(MODELS, nodes)
    assert reason is not None
    with pytest.raises(ResourcesMissing, match=message):
        raise ResourcesMissing(reason)


def test_a_replica_does_not_spread_over_nodes() -> None:
    reason = missing(MODELS, [{"CPU": 8.0, "neuron_cores": 5.0}] * 4)
    assert reason is not None
    assert reason.startswith(
        "a replica reserves 4.1 CPU, 8 neuron_cores on one node, but the nodes"
    )
    assert "8 CPU, 5 neuron_cores | 8 CPU, 5 neuron_cores" in reason


def test_a_node_that_joins_in_time_ends_the_wait(monkeypatch: pytest.MonkeyPatch) -> None:
    """The node of an autoscaled cluster starts after the application."""
    answers = iter([[{"CPU": 8.0}], [{"CPU": 8.0}], [{"CPU": 8.0}, TRN2]])
    monkeypatch.setattr(cluster_resources.ray, "is_initialized", lambda: True)
    monkeypatch.setattr(cluster_resources, "node_resources", lambda: next(answers))
    monkeypatch.setattr(cluster_resources.time, "sleep", lambda seconds: None)
    require(MODELS, wait_s=60)
    assert next(answers, None) is None


def test_the_wait_ends(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(cluster_resources.ray, "is_initialized", lambda: True)
    monkeypatch.setattr(cluster_resources, "node_resources", lambda: [{"CPU": 8.0}])
    with pytest.raises(ResourcesMissing, match=r"waited 0 s, option cluster_wait_s"):
        require(MODELS, wait_s=0)
