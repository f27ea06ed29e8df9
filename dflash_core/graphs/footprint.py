"""What a rank holds in the memory of its NeuronCore."""

from __future__ import annotations

from dataclasses import dataclass

from torch import Tensor, fx, nn

from dflash_core.graphs.capture import CapturedGraph
from dflash_core.graphs.operators import VIEWS, WRITES, lineage, operator_name
from dflash_core.kv_cache import KVCache

GIB = 1 << 30
CHIP_BYTES = 96 * GIB  # HBM of a Trainium 2 chip, for its eight physical cores
CORES_PER_CHIP = 8


@dataclass(frozen=True)
class Footprint:
    """Bytes per rank.

    Attributes:
        parameters: weights.
        caches: keys and values.
        tables: other buffers (rotary tables).
        activations: the largest sum, over the nodes of any one graph, of intermediate results
            that are still needed, if nothing is fused: an upper bound but for the compiler's own
            scratch space and the code.
    """

    parameters: int
    caches: int
    tables: int
    activations: int

    @property
    def total(self) -> int:
        return self.parameters + self.caches + self.tables + self.activations


def core_bytes(logical_nc_config: int) -> int:
    """Memory of one logical core: 24 GiB with LNC 2."""
    return CHIP_BYTES // CORES_PER_CHIP * logical_nc_config


def footprint(steps: list[nn.Module], activations: int) -> Footprint:
    """Of a rank that runs these steps, which share their weights and caches."""
    holder = nn.ModuleList(steps)
    caches = {
        id(buffer): buffer
        for module in holder.modules()
        if isinstance(module, KVCache)
        for buffer in module.buffers()
    }
    tables = [buffer for buffer in holder.buffers() if id(buffer) not in caches]
    return Footprint(
        parameters=sum(map(_bytes, holder.parameters())),
        caches=sum(map(_bytes, caches.values())),
        tables=sum(map(_bytes, tables)),
        activations=activations,
    )


def activation_bytes(graph: CapturedGraph) -> int:
    """The most that the graph's intermediate results take at any one node."""
    nodes = list(graph.module.graph.nodes)
    last_use: dict[fx.Node, int] = {}
    for index, node in enumerate(nodes):
        for source in node.all_input_nodes:
            last_use[_owner(source)] = index
    most = now = 0
    ends: dict[int, int] = {}
    for index, node in enumerate(nodes):
        if node.op == "call_function" and _owner(node) is node and not _updates(node):
            size = sum(_bytes(value) for value in _tensors(node))
            now += size
            end = last_use.get(node, index)
            ends[end] = ends.get(end, 0) + size
        most = max(most, now)
        now -= ends.pop(index, 0)
    return most


def _updates(node: fx.Node) -> bool:
    """Whether the result is the memory of a cache, changed in place."""
    name = operator_name(node)
    return name == "aten.copy_" or (name in WRITES and lineage(node)[-1].op == "placeholder")


def _owner(node: fx.Node) -> fx.Node:
    """The node whose memory a view shows, or a part of a split."""
    while operator_name(node) in VIEWS or getattr(node.target, "__name__", "") == "getitem":
        node = node.all_input_nodes[0]
    return node


def _tensors(node: fx.Node) -> list[Tensor]:
    value = node.meta.get("val")
    values = value if isinstance(value, list | tuple) else [value]
    return [each for each in values if isinstance(each, Tensor)]


def _bytes(tensor: Tensor) -> int:
    return tensor.numel() * tensor.dtype.itemsize
