"""`kernels.c` on tensors.

Shape legend: O output size, I input size, B sequences, L block length, R rows (B * L), N query
heads, G key/value heads, D head dimension, V vocabulary, P positions of the rotary tables.
"""

from __future__ import annotations

import ctypes
import functools
from ctypes import POINTER, c_float, c_int64, c_void_p
from typing import NamedTuple

import torch
from torch import Tensor

from dflash_core.cpu import library
from dflash_core.rope import RotaryEmbedding

MAX_HEAD_DIM = 256  # as in kernels.c


class _Weight(ctypes.Structure):
    _fields_ = [
        ("blocks", c_void_p),
        ("bias", c_void_p),
        ("inputs", c_int64),
        ("outputs", c_int64),
        ("swiglu", c_int64),
    ]


class _Block(ctypes.Structure):
    _fields_ = [
        *((name, c_void_p) for name in ("cos", "sin", "positions", "places", "slots")),
        *((name, c_void_p) for name in ("first", "end")),
        ("sequences", c_int64),
        ("length", c_int64),
    ]


class _Heads(ctypes.Structure):
    _fields_ = [
        ("q_norm", c_void_p),
        ("k_norm", c_void_p),
        *((name, c_int64) for name in ("queries", "groups", "dim")),
        ("eps", c_float),
    ]


class _Cache(ctypes.Structure):
    _fields_ = [("keys", c_void_p), ("values", c_void_p), ("positions", c_int64)]


class _Layer(ctypes.Structure):
    _fields_ = [
        ("attention_norm", c_void_p),
        ("mlp_norm", c_void_p),
        *((name, _Weight) for name in ("qkv", "output", "gate_up", "down")),
        ("heads", _Heads),
        ("eps", c_float),
        ("block", c_int64),
        ("tap", c_int64),
    ]


class _Room(ctypes.Structure):
    _fields_ = [
        (name, c_void_p) for name in ("inputs", "projected", "queries", "attended", "gated")
    ]


SIGNATURES = {
    "dflash_linear": (
        POINTER(_Weight), c_void_p, c_void_p, c_float, c_void_p, c_void_p, c_int64,
    ),
    "dflash_inject": (
        POINTER(_Weight), c_void_p, c_float, POINTER(_Weight), POINTER(_Heads), c_int64,
        POINTER(_Block), POINTER(_Cache), c_void_p, c_void_p, c_void_p, c_void_p,
    ),
    "dflash_decode": (
        POINTER(_Layer), c_int64, POINTER(_Block), POINTER(_Cache), POINTER(_Room), c_void_p,
        c_void_p, c_int64,
    ),
    "dflash_argmax": (c_void_p, c_int64, c_int64, c_void_p),
}  # fmt: skip


def usable(dtype: torch.dtype, device: torch.device) -> bool:
    """Whether the kernels are for that dtype and device, and this machine has them."""
    return device.type == "cpu" and dtype == torch.bfloat16 and _library() is not None


class Weight:
    """A weight laid out for `linear`.

    Args:
        weight_OI: bfloat16, I even; of a SwiGLU the gate's O / 2 rows and up's.
        bias_O: or None.
        swiglu: the product is silu(gate) * up.
    """

    def __init__(self, weight_OI: Tensor, bias_O: Tensor | None, *, swiglu: bool = False) -> None:
        O, I = weight_OI.shape  # noqa: E741
        if I % 2:
            raise ValueError(f"a weight of {O} x {I}: the kernels need an even number of inputs")
        self.inputs, self.size = I, O // 2 if swiglu else O
        self.columns = 2 * _lanes()
        blocks = _columns(weight_OI, swiglu).view(-1, self.columns, I // 2, 2)
        self.blocks = blocks.transpose(1, 2).contiguous()
        self.bias = None if bias_O is None else _columns(bias_O.float(), swiglu)
        self.struct = _Weight(_address(self.blocks), _address(self.bias), I, O, swiglu)

    def rows(self, numbers: Tensor) -> Tensor:
        """Rows of the weight (not of a SwiGLU): `[...]` of any integers -> `[..., I]`."""
        block, column = numbers // self.columns, numbers % self.columns
        return self.blocks[block.long(), :, column.long()].flatten(-2)


def _columns(rows: Tensor, swiglu: bool) -> Tensor:
    """Filled up to whole blocks; of a SwiGLU half a block of the gate, then the same of up."""
    lanes = _lanes()
    if not swiglu:
        return _filled(rows, 2 * lanes).contiguous()
    halves = [_filled(half, lanes).unflatten(0, (-1, lanes)) for half in rows.chunk(2)]
    return torch.stack(halves, dim=1).flatten(0, 2).contiguous()


def _filled(rows: Tensor, multiple: int) -> Tensor:
    missing = -len(rows) % multiple
    return torch.cat((rows, rows.new_zeros((missing, *rows.shape[1:])))) if missing else rows


class Heads:
    """Heads of this rank; the weights of the norms of queries and keys, bfloat16 `[D]`, or None."""

    def __init__(
        self, num_heads: int, num_kv_heads: int, head_dim: int, norms: tuple[Tensor, Tensor] | None,
        eps: float,
    ) -> None:  # fmt: skip
        if head_dim > MAX_HEAD_DIM:
            raise ValueError(f"head_dim {head_dim}: the kernels have room for {MAX_HEAD_DIM}")
        self.norms = norms or (None, None)
        self.size = num_heads * head_dim
        addresses = [_address(norm) for norm in self.norms]
        self.struct = _Heads(*addresses, num_heads, num_kv_heads, head_dim, eps)


class Caches:
    """The keys and values of each layer, bfloat16 `[slots, C, G, D]`."""

    def __init__(self, layers: list[tuple[Tensor, Tensor]]) -> None:
        self.tensors = layers
        structs = [_Cache(_address(keys), _address(v), keys.shape[1]) for keys, v in layers]
        self.struct = (_Cache * len(layers))(*structs)


class Rows:
    """Where the tokens of a step are, and which keys each of them sees.

    Args:
        rotary: its tables, float32.
        positions_BL: int32.
        places_BL: int64, row of the cache for each token's key and value (`KVCache.rows`).
        slots_B: int32; None if nothing is attended to.
        first_BL, end_BL: int32, a token sees the keys first <= position < end; first None: all
            from 0.
    """

    def __init__(
        self,
        rotary: RotaryEmbedding,
        positions_BL: Tensor,
        places_BL: Tensor,
        slots_B: Tensor | None = None,
        first_BL: Tensor | None = None,
        end_BL: Tensor | None = None,
    ) -> None:
        tables = rotary.cos_PD, rotary.sin_PD
        tensors = (*tables, positions_BL, places_BL, slots_B, first_BL, end_BL)
        # Kept: the structure only knows addresses.
        self.tensors = [None if each is None else each.contiguous() for each in tensors]
        self.struct = _Block(*map(_address, self.tensors), *positions_BL.shape)


class Layer(NamedTuple):
    """The weights of a decoder layer; norms are bfloat16 `[H]`."""

    attention_norm: Tensor
    mlp_norm: Tensor
    eps: float
    qkv: Weight
    output: Weight
    gate_up: Weight
    down: Weight
    heads: Heads


class Decoder:
    """Decoder layers as one operation.

    Args:
        layers: their weights.
        tapped: those whose outputs are features.
        kinds: of each, which of a step's blocks says what it sees; None: all the first.
    """

    def __init__(
        self, layers: list[Layer], tapped: tuple[int, ...] = (), kinds: list[int] | None = None
    ) -> None:
        self.layers = layers
        self.taps = len(tapped)
        taps = {layer: number for number, layer in enumerate(tapped)}
        self.struct = (_Layer * len(layers))(
            *(
                _Layer(
                    _address(layer.attention_norm),
                    _address(layer.mlp_norm),
                    *(each.struct for each in (layer.qkv, layer.output, layer.gate_up, layer.down)),
                    layer.heads.struct,
                    layer.eps,
                    0 if kinds is None else kinds[number],
                    taps.get(number, -1),
                )
                for number, layer in enumerate(layers)
            )
        )
        first = layers[0]
        attended, gated = first.output.inputs, first.gate_up.size
        self._inputs = max(first.qkv.inputs, attended, gated)
        self._widths = first.qkv.size, attended, attended, gated
        self._room: list[Tensor] = []
        self._rows = 0

    def run(self, x: Tensor, blocks: list[Rows], caches: Caches) -> Tensor:
        """Run the layers on x, bfloat16 `[B, L, H]`, in place; the caches gain its tokens.

        Args:
            blocks: the same tokens as often as there are kinds of layers.

        Returns:
            features, `[B, L, taps * H]`.
        """
        B, L, H = x.shape
        features = x.new_empty((B, L, self.taps * H))
        _library().dflash_decode(
            self.struct, len(self.layers), (_Block * len(blocks))(*(b.struct for b in blocks)),
            caches.struct, self._room_for(x), x.data_ptr(), features.data_ptr(), self.taps,
        )  # fmt: skip
        return features

    def _room_for(self, x: Tensor) -> _Room:
        """For what the layers compute in between: as much as the largest step so far needed."""
        rows = x.shape[0] * x.shape[1]
        if rows > self._rows:
            self._room = [_inputs_room(rows, self._inputs)]
            self._room += [x.new_empty((rows, width)) for width in self._widths]
            self._rows = rows
        return _Room(*map(_address, self._room))


class Injection:
    """What a drafter makes of features: the keys and values of all its layers.

    Args:
        fc: features to hidden states.
        norm: weight and epsilon of the RMS norm of those.
        layers: the key and value projection of each layer, and its heads.
    """

    def __init__(
        self, fc: Weight, norm: tuple[Tensor, float], layers: list[tuple[Weight, Heads]]
    ) -> None:
        self.fc, self.norm, self.layers = fc, norm, layers
        self.weights = (_Weight * len(layers))(*(weight.struct for weight, _ in layers))
        self.heads = (_Heads * len(layers))(*(heads.struct for _, heads in layers))

    def run(self, features: Tensor, block: Rows, caches: Caches) -> None:
        """Features bfloat16 `[R, F]` of a block of R tokens into the caches."""
        rows, weight = len(features), self.layers[0][0]
        inputs = _inputs_room(rows, max(self.fc.inputs, self.fc.size))
        context = features.new_empty((rows, self.fc.size))
        projected = features.new_empty((rows, weight.size))
        gain, eps = self.norm
        _library().dflash_inject(
            self.fc.struct, gain.data_ptr(), eps, self.weights, self.heads, len(self.layers),
            block.struct, caches.struct, features.data_ptr(), inputs.data_ptr(),
            context.data_ptr(), projected.data_ptr(),
        )  # fmt: skip


def linear(x: Tensor, weight: Weight, norm: tuple[Tensor, float] | None = None) -> Tensor:
    """x W^T + bias, or SwiGLU: bfloat16 `[..., I]` -> `[..., O]`, rounded once.

    Args:
        norm: weight and epsilon of an RMS norm of x, rounded to bfloat16 before the product.
    """
    x = x.contiguous()
    y = x.new_empty((*x.shape[:-1], weight.size))
    gain, eps = (None, 0.0) if norm is None else norm
    rows = x.numel() // weight.inputs
    inputs = _inputs_room(rows, weight.inputs)
    _library().dflash_linear(
        weight.struct, x.data_ptr(), _address(gain), eps, inputs.data_ptr(), y.data_ptr(), rows
    )
    return y


def argmax(x: Tensor) -> Tensor:
    """The lowest index of the largest value: bfloat16 `[..., V]` -> int32 `[...]`."""
    x = x.contiguous()
    index = torch.empty(x.shape[:-1], dtype=torch.int32)
    _library().dflash_argmax(x.data_ptr(), index.numel(), x.shape[-1], index.data_ptr())
    return index


def _inputs_room(rows: int, size: int) -> Tensor:
    """For the inputs of products: bfloat16, or float32 where the instructions want that."""
    return torch.empty((rows, size), dtype=torch.float32)


def _address(tensor: Tensor | None) -> int | None:
    return None if tensor is None else tensor.data_ptr()


@functools.cache
def _library() -> ctypes.CDLL | None:
    kernels = library.kernels()
    if kernels is not None:
        for name, arguments in SIGNATURES.items():
            function = getattr(kernels, name)
            function.argtypes, function.restype = arguments, None
    return kernels


def _lanes() -> int:
    """Of a register: half the columns of a weight's block."""
    return c_int64.in_dll(_library(), "dflash_lanes").value
