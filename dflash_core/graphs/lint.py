"""Capture, check and size all graphs of a model, on the first and the last rank."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import dataclass

from dflash_core.graphs.capture import CapturedGraph, CaptureError, capture, simulated_group
from dflash_core.graphs.catalogue import Graph
from dflash_core.graphs.footprint import Footprint, activation_bytes, footprint
from dflash_core.graphs.operators import operator_name
from dflash_core.graphs.rules import Violation, check, check_ranks
from dflash_core.kv_cache import KVCache
from dflash_core.parallel import TensorParallel


@dataclass(frozen=True)
class CheckedGraph:
    """What was found out about one graph.

    Attributes:
        operators: calls in it; 0 where it could not be captured.
        inputs: shape and type of the step's arguments, as text.
        activations: bytes of intermediate results, see Footprint.
    """

    name: str
    operators: int
    inputs: str
    activations: int
    violations: tuple[Violation, ...]


@dataclass(frozen=True)
class CheckedModel:
    """All graphs of a model, and what one of its ranks holds in memory."""

    graphs: tuple[CheckedGraph, ...]
    footprint: Footprint

    @property
    def violations(self) -> list[Violation]:
        return [each for graph in self.graphs for each in graph.violations]


def lint(
    make: Callable[[TensorParallel], list[Graph]],
    ranks: int,
    *,
    on_graph: Callable[[CheckedGraph], None] = lambda checked: None,
) -> CheckedModel:
    """Check every graph that `make` lists.

    Args:
        make: the graphs of a rank.
        ranks: size of the tensor-parallel group.
        on_graph: called after each, for progress.
    """
    others: dict[str, CapturedGraph] = {}
    if ranks > 1:
        with simulated_group(ranks - 1, ranks) as tp:
            for graph in _first_of_each_kind(make(tp)):
                try:
                    others[graph.name] = capture(graph.name, graph.step, *graph.args)
                except CaptureError:
                    continue  # the first rank's own failure is reported below
    checked = []
    with simulated_group(0, ranks) as tp:
        graphs = make(tp)
        for graph in graphs:
            checked.append(_checked(graph, others.get(graph.name)))
            on_graph(checked[-1])
    activations = max(graph.activations for graph in checked)
    steps = list({id(graph.step): graph.step for graph in graphs}.values())
    return CheckedModel(tuple(checked), footprint(steps, activations))


def _checked(graph: Graph, other: CapturedGraph | None) -> CheckedGraph:
    inputs = ", ".join(
        str(arg) if isinstance(arg, int) else f"{_short(arg.dtype)}{list(arg.shape)}"
        for arg in graph.args
    )
    try:
        captured = capture(graph.name, graph.step, *graph.args)
    except CaptureError as error:
        violation = Violation(graph.name, "one static graph", str(error))
        return CheckedGraph(graph.name, 0, inputs, 0, (violation,))
    violations = check(captured)
    caches = sum(
        len(list(module.buffers(recurse=True)))
        for module in graph.step.modules()
        if isinstance(module, KVCache)
    )
    written = sum(operator_name(node) == "aten.copy_" for node in captured.calls)
    if written != caches:
        message = f"{written} of {caches} key and value caches are written in place"
        violations.append(Violation(graph.name, "aliased writes", message))
    if other is not None:
        violations += check_ranks(captured, other)
    return CheckedGraph(
        graph.name,
        len(captured.calls),
        inputs,
        activation_bytes(captured),
        tuple(violations),
    )


def _first_of_each_kind(graphs: Iterable[Graph]) -> list[Graph]:
    """What a rank number could get into is the code, which graphs of one kind share."""
    return list({graph.kind: graph for graph in reversed(list(graphs))}.values())


def _short(dtype: object) -> str:
    return str(dtype).removeprefix("torch.")
