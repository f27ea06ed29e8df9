"""Connecting to a model replica: its compiled graph, warmed up, and what its steps cost."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

from deployments.graph import ModelGraph
from deployments.metrics.step_costs import Seconds, measure
from deployments.replicas import ReplicaDescription
from deployments.specs import DrafterSpec, VerifierSpec
from dflash_core import plans
from dflash_core.messages import DraftResult, VerifyResult

WARM_UP_TIMEOUT_S = 120.0


def open_verifier(
    description: ReplicaDescription, spec: VerifierSpec
) -> tuple[ModelGraph[VerifyResult], dict[int, Seconds]]:
    """The graph, and the seconds of decode steps by the tokens per request.

    Raises what ModelGraph and its `run` raise.
    """
    shapes = spec.shapes
    graph = ModelGraph[VerifyResult](description.workers, "verify", channel_bytes=spec.plan_bytes)
    with _closed_on_error(graph):
        graph.run(plans.scratch_verify_plan(shapes, 1, 1), WARM_UP_TIMEOUT_S)
        seconds = {
            length: measure(
                graph,
                {
                    size: plans.scratch_verify_plan(shapes, size, length)
                    for size in shapes.num_seqs_buckets
                },
            )
            for length in shapes.block_lengths
        }
    return graph, seconds


def open_drafter(
    description: ReplicaDescription, spec: DrafterSpec
) -> tuple[ModelGraph[DraftResult], Seconds]:
    """The graph, and the seconds of its steps. Raises what ModelGraph and its `run` raise."""
    graph = ModelGraph[DraftResult](description.workers, "draft", channel_bytes=spec.channel_bytes)
    with _closed_on_error(graph):
        graph.run(plans.scratch_draft_plan(spec.shapes, 1, None), WARM_UP_TIMEOUT_S)
        seconds = measure(
            graph,
            {
                size: plans.scratch_draft_plan(spec.shapes, size, None)
                for size in spec.shapes.num_seqs_buckets
            },
        )
    return graph, seconds


@contextmanager
def _closed_on_error(graph: ModelGraph) -> Iterator[None]:
    try:
        yield
    except BaseException:
        graph.close()
        raise
