"""Tensor parallelism: Megatron-style column/row-parallel layers, one process per rank.

A layer holds only its rank's slice. Each parameter carries a `Shard` that says which slice of the
checkpoint tensor it is, so the loader reads nothing else. Collectives are the functional ones of
`torch.distributed` (all_reduce, all_gather), the only kind that compiles on every backend.

Shape legend: B batch, L block length, H hidden, V vocabulary, Vr vocabulary slice of a rank.
"""

from __future__ import annotations

import sys
from dataclasses import dataclass
from types import ModuleType

import torch
import torch.distributed as dist
import torch.distributed._functional_collectives as funcol
from torch import Tensor, nn
from torch.compiler import is_compiling
from torch.nn import functional as F

from dflash_core.cpu import kernels


@dataclass(frozen=True)
class TensorParallel:
    """This process's place in its tensor-parallel group. `group` is None for a single process."""

    rank: int = 0
    size: int = 1
    group: dist.ProcessGroup | None = None

    def __post_init__(self) -> None:
        if not 0 <= self.rank < self.size:
            raise ValueError(f"rank {self.rank} is outside a group of size {self.size}")
        if self.size > 1 and self.group is None:
            raise ValueError(f"a group of size {self.size} needs a process group")

    @property
    def layers(self) -> ModuleType:
        """Where models take their parallel layers from: this module. (`dflash_core.nxd` has its
        own, of the same names and constructor arguments.)"""
        return sys.modules[__name__]

    def all_reduce(self, x: Tensor) -> Tensor:
        """Sum of `x` over the ranks (any shape)."""
        if self.size == 1:
            return x
        return funcol.wait_tensor(funcol.all_reduce(x, "sum", self.group))

    def all_gather(self, x: Tensor) -> Tensor:
        """The ranks' `x` stacked in rank order: `[...]` -> `[size, ...]`."""
        if self.size == 1:
            return x[None]
        gathered = funcol.all_gather_tensor(x.contiguous()[None], 0, self.group)
        return funcol.wait_tensor(gathered)


SINGLE = TensorParallel()


@dataclass(frozen=True)
class Shard:
    """The slice `[start, start + length)` along `dim` of a checkpoint tensor; dim None = all."""

    dim: int | None = None
    start: int = 0
    length: int = 0


def split(size: int, tp: TensorParallel, what: str, shards: int | None = None) -> Shard:
    """The slice of dimension 0 that this rank holds.

    `shards` < tp.size means that neighbouring ranks hold the same slice (replicated KV heads).

    Raises:
        ValueError: `size` cannot be divided evenly.
    """
    shards = tp.size if shards is None else min(shards, tp.size)
    if size % shards or tp.size % shards:
        raise ValueError(
            f"{what} = {size} cannot be split over {tp.size} tensor-parallel ranks; "
            "choose a tensor_parallel_size that divides it"
        )
    length = size // shards
    return Shard(dim=0, start=(tp.rank * shards // tp.size) * length, length=length)


def sharded(parameter: nn.Parameter, shard: Shard) -> nn.Parameter:
    """Mark which slice of its checkpoint tensor `parameter` holds."""
    parameter.shard = shard
    return parameter


class ColumnParallelLinear(nn.Module):
    """y = x W^T + b with the output dimension split over the ranks; the output stays split."""

    def __init__(
        self,
        input_size: int,
        output_size: int,
        bias: bool = False,
        *,
        tp: TensorParallel = SINGLE,
        shards: int | None = None,
    ) -> None:
        super().__init__()
        shard = split(output_size, tp, "output size", shards)
        self.weight = sharded(nn.Parameter(torch.empty(shard.length, input_size)), shard)
        self.bias = sharded(nn.Parameter(torch.empty(shard.length)), shard) if bias else None

    def forward(self, x: Tensor) -> Tensor:
        return F.linear(x, self.weight, self.bias)


class RowParallelLinear(nn.Module):
    """y = x W^T + b with the input dimension split; partial products are summed over the ranks."""

    def __init__(
        self, input_size: int, output_size: int, bias: bool = False, *, tp: TensorParallel = SINGLE
    ) -> None:
        super().__init__()
        self.tp = tp
        part = split(input_size, tp, "input size")
        shard = Shard(dim=1, start=part.start, length=part.length)
        self.weight = sharded(nn.Parameter(torch.empty(output_size, shard.length)), shard)
        self.bias = nn.Parameter(torch.empty(output_size)) if bias else None

    def forward(self, x: Tensor) -> Tensor:
        y = self.tp.all_reduce(F.linear(x, self.weight))
        return y if self.bias is None else y + self.bias


class VocabParallelEmbedding(nn.Module):
    """Embedding with the vocabulary split over the ranks."""

    def __init__(self, vocab_size: int, hidden_size: int, *, tp: TensorParallel = SINGLE) -> None:
        super().__init__()
        self.tp = tp
        self.shard = split(vocab_size, tp, "vocab_size")
        self.weight = sharded(nn.Parameter(torch.empty(self.shard.length, hidden_size)), self.shard)
        # A tensor, not a number: so every rank compiles the same graph.
        with torch.device("cpu"):
            first_id = torch.tensor([self.shard.start], dtype=torch.int32)
        self.register_buffer("first_id", first_id, persistent=False)

    def forward(self, tokens_BL: Tensor) -> Tensor:
        """`[B, L]` int32 -> `[B, L, H]`, equal on every rank."""
        if self.tp.size == 1:
            return F.embedding(tokens_BL.long(), self.weight)
        local_BL = tokens_BL - self.first_id
        mine_BL = (local_BL >= 0) & (local_BL < self.shard.length)
        x_BLH = F.embedding(local_BL.clamp(0, self.shard.length - 1).long(), self.weight)
        return self.tp.all_reduce(x_BLH * mine_BL[..., None].to(x_BLH.dtype))


def parallel_argmax(logits_BLVr: Tensor, tp: TensorParallel) -> Tensor:
    """Argmax over a vocabulary that is split over the ranks.

    Each rank reduces its own slice; only one value and one index per row are exchanged. Ties go
    to the lowest token id, as in `torch.argmax` over the whole vocabulary.

    Args:
        logits_BLVr: this rank's slice of the logits, `[B, L, Vr]`.

    Returns:
        int32 `[B, L]`, equal on every rank.
    """
    if tp.size == 1:
        if not is_compiling() and kernels.usable(logits_BLVr.dtype, logits_BLVr.device):
            return kernels.argmax(logits_BLVr)
        return logits_BLVr.argmax(dim=-1).to(torch.int32)
    value_BL, index_BL = logits_BLVr.float().max(dim=-1)
    values_RBL = tp.all_gather(value_BL)
    indices_RBL = tp.all_gather(index_BL.to(torch.int32))
    winner_1BL = values_RBL.argmax(dim=0, keepdim=True)
    # The winner's number, not this rank's own, gives the offset: the graph is that of every rank.
    token_1BL = indices_RBL.gather(0, winner_1BL) + winner_1BL * logits_BLVr.shape[-1]
    return token_1BL[0].to(torch.int32)


def gather_vocabulary(logits_BLVr: Tensor, tp: TensorParallel) -> Tensor:
    """The logits of all ranks, `[B, L, Vr]` -> `[B, L, V]`, equal on every rank."""
    if tp.size == 1:
        return logits_BLVr
    return tp.all_gather(logits_BLVr).movedim(0, -2).flatten(-2)
