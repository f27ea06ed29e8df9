from __future__ import annotations

import torch
from torch import Tensor, nn

from neuronx_distributed.parallel_layers import parallel_state
from neuronx_distributed.parallel_layers.layers import (
    BaseParallelLinear,
    ParallelEmbedding,
    SPMDRank,
)

SHARDED_MODULES = (BaseParallelLinear, ParallelEmbedding, SPMDRank)


def shard_checkpoint(
    checkpoint: dict[str, Tensor],
    model: nn.Module,
    start_rank: int | None = None,
    end_rank: int | None = None,
    load_on_device: bool = False,
    serialize_path: str | None = None,
) -> list[dict[str, Tensor]]:
    size = parallel_state.get_tensor_model_parallel_size()
    shards = []
    for rank in range(size):
        shard = dict(checkpoint)
        _shard(model, shard, "", rank, size)
        shards.append(shard)
    return shards


def _shard(module: nn.Module, shard: dict[str, Tensor], prefix: str, rank: int, size: int) -> None:
    """Children first. Only NxD's own classes are looked at, and one whose parameter is not in the
    checkpoint is left at that point. A parameter of a child is cut again by its parent: so it is in
    NxD."""
    for name, child in module.named_children():
        _shard(child, shard, f"{prefix}{name}.", rank, size)
    if not isinstance(module, SHARDED_MODULES):
        return
    for name, parameter in module.named_parameters():
        if prefix + name not in shard:
            return
        tensor = shard[prefix + name]
        if getattr(parameter, "tensor_model_parallel", False):
            dim = parameter.partition_dim
            own = tensor.shape[dim] // size
            shard[prefix + name] = torch.split(tensor, own, dim)[rank].clone()
