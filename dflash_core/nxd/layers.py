"""neuronx-distributed's parallel layers, with the constructor arguments of `dflash_core.parallel`.

They are subclasses, because `shard_checkpoint` looks for instances of its own classes. Weights come
from the sharded checkpoint, so that initialising them would be time lost; their dtype is torch's
default one at the time. To be used within NxDParallelState.
"""

from __future__ import annotations

import torch
from neuronx_distributed.parallel_layers import layers, mappings
from torch import Tensor

from dflash_core.parallel import SINGLE, TensorParallel, split

__all__ = ["ColumnParallelLinear", "RowParallelLinear", "VocabParallelEmbedding", "mappings"]


def leave(weight: Tensor) -> Tensor:
    """In place of an initialisation."""
    return weight


class ColumnParallelLinear(layers.ColumnParallelLinear):
    """The output stays split. Where several ranks share a key/value head (`shards` < ranks), the
    whole layer, which NxD cuts into equal parts, has a copy of it for each of them."""

    def __init__(
        self,
        input_size: int,
        output_size: int,
        bias: bool = False,
        *,
        tp: TensorParallel = SINGLE,
        shards: int | None = None,
    ) -> None:
        shards = tp.size if shards is None else min(shards, tp.size)
        split(output_size, tp, "output size", shards)  # refuses what cannot be split
        super().__init__(
            input_size,
            output_size * (tp.size // shards),
            bias=bias,
            gather_output=False,
            dtype=torch.get_default_dtype(),
            init_method=leave,
        )
        self.shards, self.copies = shards, tp.size // shards

    def repeated(self, whole: Tensor) -> Tensor:
        """A weight or bias of the checkpoint as NxD is to cut it: each shard `copies` times."""
        if self.copies == 1:
            return whole
        return whole.unflatten(0, (self.shards, -1)).repeat_interleave(self.copies, 0).flatten(0, 1)


class RowParallelLinear(layers.RowParallelLinear):
    def __init__(
        self, input_size: int, output_size: int, bias: bool = False, *, tp: TensorParallel = SINGLE
    ) -> None:
        split(input_size, tp, "input size")
        super().__init__(
            input_size,
            output_size,
            bias=bias,
            input_is_parallel=True,
            dtype=torch.get_default_dtype(),
            init_method=leave,
        )


class VocabParallelEmbedding(layers.ParallelEmbedding):
    """`use_spmd_rank`: where a rank's part of the vocabulary starts is computed from a weight, its
    number. As a number in the graph it would be rank 0's on all of them."""

    def __init__(self, vocab_size: int, hidden_size: int, *, tp: TensorParallel = SINGLE) -> None:
        split(vocab_size, tp, "vocab_size")
        super().__init__(
            vocab_size,
            hidden_size,
            init_method=leave,
            dtype=torch.get_default_dtype(),
            use_spmd_rank=tp.size > 1,
        )
