"""Linear layers as the served step runs them: products of one input fused, weights packed.

The modules that a checkpoint is loaded into keep its names; `fuse` replaces them afterwards. Packed
means laid out for oneDNN's bf16 kernels: with few rows a step is bound by how fast weights are
read, and from a row-major weight they are read at half the speed (measured: 1.8 times at 1-8 rows,
1.1 times at 64); the result is the plain one's, bit for bit. A packed weight is opaque to a
compiler, so a graph holds a key in its place, which is looked up when it runs.

Shape legend: O output size, I input size.
"""

from __future__ import annotations

import itertools
from weakref import WeakValueDictionary

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from dflash_core.parallel import ColumnParallelLinear, RowParallelLinear, TensorParallel

_keys = itertools.count()
_layers: WeakValueDictionary[int, FusedLinear] = WeakValueDictionary()
ROWS_HINT = 8  # what the packed layout is chosen for; it is the same from 1 to 64


def packable(dtype: torch.dtype, device: torch.device) -> bool:
    """Whether this processor has oneDNN kernels for packed weights of that dtype."""
    return (
        device.type == "cpu"
        and dtype == torch.bfloat16
        and torch.backends.mkldnn.is_available()
        and torch.ops.mkldnn._is_mkldnn_bf16_supported()
    )


class FusedLinear(nn.Module):
    """y = x W^T + b, the outputs of several layers with one input side by side.

    Args:
        weights: each `[O, I]`.
        biases: of each, or None for none.
        packed: lay the weight out for oneDNN (see `packable`).
    """

    def __init__(
        self, weights: list[Tensor], biases: list[Tensor] | None = None, *, packed: bool
    ) -> None:
        super().__init__()
        self.sizes = [len(weight) for weight in weights]
        self.packed = packed
        weight_OI = weights[0].detach() if len(weights) == 1 else torch.cat(weights).detach()
        bias_O = None if biases is None else torch.cat(biases).detach()
        if packed:
            weight_OI = torch.ops.mkldnn._reorder_linear_weight(weight_OI.contiguous(), ROWS_HINT)
        self.register_buffer("weight", weight_OI, persistent=False)
        self.register_buffer("bias", bias_O, persistent=False)
        key = next(_keys)
        self.register_buffer("key", torch.tensor(key, dtype=torch.int32), persistent=False)
        _layers[key] = self

    def forward(self, x: Tensor, residual: Tensor | None = None) -> Tensor:
        """`[..., I]` -> `[..., O]`, plus `residual` (then rounded once, not twice, if packed)."""
        if self.packed and torch.compiler.is_compiling():
            return torch.ops.dflash.packed_linear(x, self.key, sum(self.sizes), residual)
        if self.packed and residual is not None:
            return torch.ops.mkldnn._linear_pointwise.binary(
                x, residual, self.weight, self.bias, "add"
            )
        if residual is not None:
            return residual + F.linear(x, self.weight, self.bias)
        if self.packed:
            return torch.ops.mkldnn._linear_pointwise(x, self.weight, self.bias, "none", [], "")
        return F.linear(x, self.weight, self.bias)


@torch.library.custom_op("dflash::packed_linear", mutates_args=())
def packed_linear(x: Tensor, key: Tensor, size: int, residual: Tensor | None) -> Tensor:
    """`FusedLinear.forward` of the layer with that key, `size` outputs, as a graph sees it."""
    return _layers[int(key)](x, residual)


@packed_linear.register_fake
def _(x: Tensor, key: Tensor, size: int, residual: Tensor | None) -> Tensor:
    return x.new_empty((*x.shape[:-1], size))


class FusedRows(nn.Module):
    """A `RowParallelLinear` with its weight packed."""

    def __init__(self, layer: RowParallelLinear, *, packed: bool) -> None:
        super().__init__()
        self.tp: TensorParallel = layer.tp
        self.bias = layer.bias
        self.linear = FusedLinear([layer.weight], packed=packed)

    def forward(self, x: Tensor, residual: Tensor | None = None) -> Tensor:
        """As `RowParallelLinear.forward`, plus `residual`."""
        if self.tp.size == 1 and self.bias is None:
            return self.linear(x, residual)
        y = self.tp.all_reduce(self.linear(x))
        y = y if self.bias is None else y + self.bias
        return y if residual is None else residual + y


def fused_columns(*layers: ColumnParallelLinear, packed: bool) -> FusedLinear:
    """Layers with the same input as one."""
    biases = [layer.bias for layer in layers if layer.bias is not None]
    assert len(biases) in (0, len(layers))
    return FusedLinear([layer.weight for layer in layers], biases or None, packed=packed)
