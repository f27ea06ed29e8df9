"""A checkpoint cut into the weights of each rank, by NxD's own `shard_checkpoint`."""

from __future__ import annotations

import torch
from torch import Tensor, nn

from dflash_core.nxd.layers import ColumnParallelLinear

RANK = ".rank_util.rank"  # of a ParallelEmbedding with use_spmd_rank


def sharded_weights(
    program: nn.Module, whole: dict[str, Tensor], ranks: int
) -> list[dict[str, Tensor]]:
    """One dictionary per rank.

    Args:
        program: made of NxD's layers; its parameters say along which dimension they are cut.
        whole: the weights of one rank that holds everything, by the names of the program.
    """
    from neuronx_distributed import shard_checkpoint

    checkpoint = dict(whole)
    for name, module in program.named_modules():
        if isinstance(module, ColumnParallelLinear):
            for leaf, _ in module.named_parameters(recurse=False):
                checkpoint[f"{name}.{leaf}"] = module.repeated(checkpoint[f"{name}.{leaf}"])
    shards = shard_checkpoint(checkpoint=checkpoint, model=program)
    numbers = [name for name, _ in program.named_parameters() if name.endswith(RANK)]
    for rank, shard in enumerate(shards[:ranks]):
        shard |= {name: torch.tensor([rank], dtype=torch.int32) for name in numbers}
    return shards
