"""The operators that a graph may contain, by what they are there for.

The list is short on purpose: an operator gets onto it after somebody has looked at how it is
lowered for Trainium. All of these are plain tensor algebra that torch-neuronx lowers to StableHLO;
the remarks are about those that need care.
"""

from __future__ import annotations

from torch import fx
from torch._ops import OpOverload

ALGEBRA = {
    "aten.add", "aten.sub", "aten.mul", "aten.div", "aten.neg", "aten.pow", "aten.rsqrt",
    "aten.mean", "aten.sum", "aten.mm", "aten.bmm", "aten.addmm", "aten.silu", "aten.sigmoid",
    "aten.exp", "aten._softmax",
    "aten._safe_softmax",  # of scaled_dot_product_attention with a mask; its masks are finite
}  # fmt: skip
COMPARISONS = {
    "aten.lt", "aten.le", "aten.gt", "aten.ge", "aten.eq", "aten.ne", "aten.bitwise_and",
    "aten.bitwise_or", "aten.bitwise_not", "aten.logical_and", "aten.logical_or",
    "aten.logical_not", "aten.where", "aten.clamp", "aten.minimum", "aten.maximum",
}  # fmt: skip
VIEWS = {
    "aten.view", "aten._unsafe_view", "aten.reshape", "aten.expand", "aten.permute",
    "aten.transpose", "aten.t", "aten.unsqueeze", "aten.squeeze", "aten.slice", "aten.select",
    "aten.split", "aten.split_with_sizes", "aten.unbind", "aten.alias",
}  # fmt: skip
COPIES = {"aten.clone", "aten.cat", "aten.stack", "aten._to_copy", "aten.repeat", "aten.copy_"}
CONSTANTS = {
    "aten.arange", "aten.full", "aten.zeros", "aten.ones", "aten.scalar_tensor", "aten.new_empty",
    "aten.empty", "aten.full_like", "aten.zeros_like", "aten.ones_like",
}  # fmt: skip
# Their indices are int64 inside the graph (int32 has no lowering there), made from int32 inputs.
GATHERS = {"aten.index", "aten.index_select", "aten.gather", "aten.embedding"}
REDUCTIONS = {"aten.argmax", "aten.max", "aten.amax", "aten.min", "aten.cumsum", "aten.cumprod"}
# What becomes an input/output alias when a copy_ into the same tensor follows.
WRITES = {
    "aten.index_copy", "aten.scatter", "aten.index_put", "aten.slice_scatter",
    "aten.select_scatter",
}  # fmt: skip
ALLOWED = ALGEBRA | COMPARISONS | VIEWS | COPIES | CONSTANTS | GATHERS | REDUCTIONS | WRITES

COLLECTIVES = {
    "_c10d_functional.all_reduce",
    "_c10d_functional.all_gather_into_tensor",
    "_c10d_functional.reduce_scatter_tensor",
    "_c10d_functional.all_to_all_single",
    "_c10d_functional.wait_tensor",  # waits for one of these; nothing on the device
}
SAME_ELEMENTS = VIEWS - {"aten.split", "aten.split_with_sizes", "aten.unbind"}


def operator_name(node: fx.Node) -> str:
    """Namespace and name without the overload: "aten.add"; "" where it is no operator."""
    if node.op != "call_function" or not isinstance(node.target, OpOverload):
        return ""
    return f"{node.target.namespace}.{node.target._schema.name.partition('::')[2]}"


def lineage(node: fx.Node) -> list[fx.Node]:
    """The writes that made a tensor out of another one, newest first, and then that one.

    Views and clones are looked through, as torch-neuronx does where it looks for aliases.
    """
    writes = []
    while True:
        name = operator_name(node)
        if name in WRITES:
            writes.append(node)
        elif name not in SAME_ELEMENTS and name != "aten.clone":
            return [*writes, node]
        node = node.args[0]
