"""What a graph must keep to, to run on Trainium as it is.

Sources: the TorchNeuron documentation ("torch.compile backend reference": static shapes, no graph
breaks), the public snapshot of torch-neuronx (`fx/passes`: which collectives are legalised, which
writes become input/output aliases, which random operators exist; `executor.py`: 64-bit integers
are narrowed at the boundary) and its users' reports. None of it was tried on a device here.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass

import torch
from torch import fx

from dflash_core.graphs.capture import CapturedGraph
from dflash_core.graphs.operators import (
    ALLOWED,
    COLLECTIVES,
    WRITES,
    lineage,
    operator_name,
)


@dataclass(frozen=True)
class Violation:
    """A place in a graph that breaks a rule."""

    graph: str
    rule: str
    message: str

    def __str__(self) -> str:
        return f"{self.graph}: {self.rule}: {self.message}"


def check(graph: CapturedGraph) -> list[Violation]:
    """Every violation of every rule in one graph."""
    return [
        Violation(graph.name, rule, message)
        for rule, broken in RULES.items()
        for message in dict.fromkeys(broken(graph))
    ]


def check_ranks(first: CapturedGraph, last: CapturedGraph) -> list[Violation]:
    """The graphs of the first and the last rank must be one: then they are compiled once, and
    whatever is particular about a rank is data."""
    ours, theirs = ([_text(node) for node in each.module.graph.nodes] for each in (first, last))
    for one, other in zip(ours, theirs, strict=False):
        if one != other:
            message = f"{one} on the first rank is {other} on the last one"
            return [Violation(first.name, "rank", message)]
    if len(ours) != len(theirs):
        return [Violation(first.name, "rank", "the ranks' graphs differ in length")]
    return []


def static_shapes(graph: CapturedGraph) -> Iterator[str]:
    """Every dimension is a number, and no operator's result depends on values in its shape."""
    for node in graph.module.graph.nodes:
        for value in _values(node):
            if isinstance(value, torch.SymInt | torch.SymFloat | torch.SymBool):
                yield f"{node.name} is a symbol"
            elif any(not isinstance(size, int) for size in value.shape):
                yield f"{node.name} has the shape {tuple(value.shape)}"
    for node in graph.calls:
        tags = node.target.tags
        if torch.Tag.dynamic_output_shape in tags or torch.Tag.data_dependent_output in tags:
            # Indexing has that tag for masks; with numbers its shape is that of the numbers.
            if operator_name(node) != "aten.index" or _masks(node):
                yield f"{operator_name(node)} gives a result whose shape depends on values"


def narrow_types(graph: CapturedGraph) -> Iterator[str]:
    """64 bits are narrowed at the boundary of a graph: a copy on the host in every step."""
    for node in graph.placeholders:
        for value in _tensors(node):
            if value.dtype in (torch.int64, torch.float64):
                yield f"input {node.name} is {value.dtype}; give it in 32 bits"
    for node in _outputs(graph):
        for value in _tensors(node):
            if value.dtype in (torch.int64, torch.float64):
                yield f"output {node.name} is {value.dtype}; return it in 32 bits"
    for node in graph.calls:
        if any(value.dtype == torch.float64 for value in _tensors(node)):
            yield f"{operator_name(node)} computes in float64, which the device has not"


def known_operators(graph: CapturedGraph) -> Iterator[str]:
    """An operator that was never looked at may have no lowering, or one that runs on the host."""
    for node in graph.calls:
        name = operator_name(node)
        if name not in ALLOWED and not _collective(node) and not _random(node):
            yield f"{name} is not among the operators that were looked at (operators.py)"
    for node in graph.module.graph.nodes:
        if node.op == "call_module" or (node.op == "call_function" and node not in graph.calls):
            if getattr(node.target, "__name__", "") != "getitem":
                yield f"{node.target} is no ATen operator"


def legal_collectives(graph: CapturedGraph) -> Iterator[str]:
    for node in graph.calls:
        if _collective(node) and operator_name(node) not in COLLECTIVES:
            yield f"{operator_name(node)}; only {', '.join(sorted(COLLECTIVES))} are legalised"


def aliased_writes(graph: CapturedGraph) -> Iterator[str]:
    """A cache is written in place or not at all.

    The compiler turns `copy_(cache, scatter(cache, ...))` at the end of a graph (one scatter or
    several in a row) into an output that shares the cache's memory. Any other write costs a copy of
    the whole cache, or is lost.
    """
    written: set[fx.Node] = set()
    for node in graph.calls:
        if operator_name(node) == "aten.copy_":
            cache, chain = node.args[0], lineage(node.args[1])
            written.update(chain)
            if not isinstance(cache, fx.Node) or cache.op != "placeholder":
                yield f"{node.name} writes to {cache}, which is no input of the graph"
            elif len(chain) == 1:
                yield f"{cache.name} is overwritten by {chain[0].name}, not by a scatter into it"
            elif chain[-1] is not cache:
                yield f"{cache.name} is overwritten by a scatter into {chain[-1].name}"
        elif node.target._schema.is_mutable:
            yield f"{operator_name(node)} changes a tensor in place, but is not a final copy_"
    for node in graph.calls:
        if operator_name(node) in WRITES and node not in written:
            cache = lineage(node)[-1]
            if cache.op == "placeholder":
                yield f"{node.name} writes to a copy of {cache.name}, which is not written back"


def finite_constants(graph: CapturedGraph) -> Iterator[str]:
    """A row whose keys are all masked with -inf has a softmax of NaN."""
    for node in graph.calls:
        for value in _flat((node.args, tuple(node.kwargs.values()))):
            if isinstance(value, float) and not math.isfinite(value):
                yield f"{operator_name(node)} has the constant {value}; use a large finite number"


def no_randomness(graph: CapturedGraph) -> Iterator[str]:
    for node in graph.calls:
        if _random(node):
            yield f"{operator_name(node)} draws random numbers; make them an input of the step"


def one_device(graph: CapturedGraph) -> Iterator[str]:
    """A tensor made on the host inside a step is a transfer, and may end the graph."""
    devices = {value.device for node in graph.placeholders for value in _tensors(node)}
    for node in graph.calls:
        for value in _tensors(node):
            if value.device not in devices:
                yield f"{operator_name(node)} makes a tensor on {value.device}"


RULES: dict[str, Callable[[CapturedGraph], Iterable[str]]] = {
    "static shapes": static_shapes,
    "32 bits": narrow_types,
    "operators": known_operators,
    "collectives": legal_collectives,
    "aliased writes": aliased_writes,
    "finite constants": finite_constants,
    "no randomness": no_randomness,
    "one device": one_device,
}


def _collective(node: fx.Node) -> bool:
    return "c10d" in node.target.namespace


def _random(node: fx.Node) -> bool:
    return torch.Tag.nondeterministic_seeded in node.target.tags


def _masks(node: fx.Node) -> bool:
    """Whether an indexing operator is given a tensor of truth values."""
    indices = (index for index in node.args[1] if index is not None)
    return any(value.dtype == torch.bool for index in indices for value in _tensors(index))


def _outputs(graph: CapturedGraph) -> list[fx.Node]:
    [output] = [node for node in graph.module.graph.nodes if node.op == "output"]
    return list(output.all_input_nodes)


def _values(node: fx.Node) -> list[torch.Tensor | torch.SymInt]:
    kinds = torch.Tensor | torch.SymInt | torch.SymFloat | torch.SymBool
    return [value for value in _flat(node.meta.get("val")) if isinstance(value, kinds)]


def _tensors(node: fx.Node) -> list[torch.Tensor]:
    return [value for value in _values(node) if isinstance(value, torch.Tensor)]


def _flat(value: object) -> Iterator[object]:
    if isinstance(value, list | tuple):
        for item in value:
            yield from _flat(item)
    else:
        yield value


def _text(node: fx.Node) -> str:
    return node.format_node() or node.name
