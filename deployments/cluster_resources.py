"""Does the cluster have what the application reserves? Asked before Serve waits for it, for good.

A replica whose placement group fits on no node is never started, and Serve only logs that it waits.
"""

from __future__ import annotations

import time
from collections import Counter
from collections.abc import Sequence

import ray

NEURON_CORES = "neuron_cores"
POLL_S = 0.5
Resources = dict[str, float]


class ResourcesMissing(Exception):
    """No node, or not the whole cluster, has what has to be reserved."""


def require(replicas: Sequence[Sequence[Resources]], wait_s: float) -> None:
    """Check that one replica of every model fits into the Ray cluster that this runs in.

    It looks at what nodes have, not at what is free: what an earlier version of the same
    application holds will be free when it is replaced. Without Ray (no cluster yet) it does
    nothing.

    Args:
        replicas: for each model the bundles of a replica, which have to be on one node.
        wait_s: seconds in which nodes may still join.

    Raises:
        ResourcesMissing: what is reserved, what there is, and what to do.
    """
    if not ray.is_initialized():
        return
    end = time.monotonic() + wait_s
    while True:
        reason = missing(replicas, node_resources())
        if reason is None:
            return
        if time.monotonic() >= end:
            raise ResourcesMissing(f"{reason} (waited {wait_s:g} s, option cluster_wait_s)")
        time.sleep(POLL_S)


def node_resources() -> list[Resources]:
    """The resources of every live node."""
    return [node["Resources"] for node in ray.nodes() if node["Alive"]]


def missing(replicas: Sequence[Sequence[Resources]], nodes: Sequence[Resources]) -> str | None:
    """What stands in the way of one replica of each model; None if nothing does."""
    needs = [total(bundles) for bundles in replicas]
    for name, need in total(needs).items():
        have = sum(node.get(name, 0) for node in nodes)
        if have < need:
            return (
                f"the application reserves {need:g} {name}, but the cluster of {len(nodes)} nodes "
                f"has {have:g}; {remedy(name)}"
            )
    for need in needs:
        if not any(all(node.get(name, 0) >= need[name] for name in need) for node in nodes):
            found = [describe({name: node.get(name, 0) for name in need}) for node in nodes]
            return (
                f"a replica reserves {describe(need)} on one node, but the nodes have "
                f"{' | '.join(found) or 'nothing'}; use a larger node, or fewer or smaller ranks "
                "(tensor_parallel_size, cpus_per_rank)"
            )
    return None


def total(parts: Sequence[Resources]) -> Resources:
    summed: Counter[str] = Counter()
    for part in parts:
        summed.update(part)
    return dict(summed)


def describe(resources: Resources) -> str:
    return ", ".join(f"{amount:g} {name}" for name, amount in resources.items())


def remedy(name: str) -> str:
    if name == NEURON_CORES:
        return (
            "Ray finds Neuron cores only where /opt/aws/neuron/bin/neuron-ls is installed: start "
            "it on a trn2 node with --resources='{\"neuron_cores\": 64}' (cluster/ does), lower "
            "tensor_parallel_size, or set device: cpu"
        )
    if name == "CPU":
        return "lower cpus_per_rank or tensor_parallel_size, or start Ray with more CPUs"
    return f"start Ray with more {name}, or change resources_per_rank"
