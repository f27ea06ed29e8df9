"""Weights of rank size, not a number until a checkpoint sets them. Attributes say how they are cut:
`tensor_model_parallel`, `partition_dim`, `partition_stride`."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from neuronx_distributed.parallel_layers.mappings import reduce_from_tensor_model_parallel_region
from neuronx_distributed.parallel_layers.parallel_state import (
    get_tensor_model_parallel_rank,
    get_tensor_model_parallel_size,
)


def parameter(shape: tuple[int, ...], dtype: torch.dtype, dim: int | None) -> nn.Parameter:
    made = nn.Parameter(torch.full(shape, torch.nan, dtype=dtype))
    if dim is not None:
        made.tensor_model_parallel, made.partition_dim, made.partition_stride = True, dim, 1
    return made


def divide(numerator: int, denominator: int) -> int:
    assert numerator % denominator == 0, f"{numerator} is not divisible by {denominator}"
    return numerator // denominator


class BaseParallelLinear(nn.Module):
    pass


class ColumnParallelLinear(BaseParallelLinear):
    def __init__(
        self,
        input_size: int,
        output_size: int,
        bias: bool = True,
        gather_output: bool = True,
        dtype: torch.dtype = torch.float32,
        device: torch.device | None = None,
        stride: int = 1,
        init_method: Callable[[Any], Tensor] | None = None,
        sequence_parallel_enabled: bool = False,
        sequence_dimension: int | None = None,
        keep_master_weight: bool = False,
        skip_bias_add: bool = False,
        pad: bool = False,
        tensor_model_parallel_group: Any = None,
        reduce_dtype: torch.dtype = torch.float32,
    ) -> None:
        super().__init__()
        assert not gather_output, "this stand-in knows nothing else"
        own = divide(output_size, get_tensor_model_parallel_size())
        self.weight = parameter((own, input_size), dtype, 0)
        self.bias = parameter((own,), dtype, 0) if bias else None

    def forward(self, input: Tensor, *_: Any) -> Tensor:
        return F.linear(input, self.weight, self.bias)


class RowParallelLinear(BaseParallelLinear):
    def __init__(
        self,
        input_size: int,
        output_size: int,
        bias: bool = True,
        input_is_parallel: bool = False,
        dtype: torch.dtype = torch.float32,
        device: torch.device | None = None,
        stride: int = 1,
        init_method: Callable[[Any], Tensor] | None = None,
        sequence_parallel_enabled: bool = False,
        sequence_dimension: int | None = None,
        keep_master_weight: bool = False,
        skip_bias_add: bool = False,
        pad: bool = False,
        reduce_output: bool = True,
        tensor_model_parallel_group: Any = None,
        reduce_dtype: torch.dtype = torch.float32,
    ) -> None:
        super().__init__()
        assert input_is_parallel, "this stand-in knows nothing else"
        self.reduce_dtype = reduce_dtype
        own = divide(input_size, get_tensor_model_parallel_size())
        self.weight = parameter((output_size, own), dtype, 1)
        self.bias = parameter((output_size,), dtype, None) if bias else None

    def forward(self, input_: Tensor) -> Tensor:
        partial = F.linear(input_, self.weight)
        output = reduce_from_tensor_model_parallel_region(partial.to(self.reduce_dtype))
        output = output.to(partial.dtype)
        return output if self.bias is None else output + self.bias


class SPMDRank(nn.Module):
    def __init__(self, world_size: int) -> None:
        super().__init__()
        self.rank = nn.Parameter(torch.zeros(1, dtype=torch.int32), requires_grad=False)
        self.rank.tensor_model_parallel, self.rank.partition_dim = True, 0
        self.rank.partition_stride = 1

    def get_rank(self) -> Tensor:
        return self.rank


class ParallelEmbedding(nn.Module):
    def __init__(
        self,
        num_embeddings: int,
        embedding_dim: int,
        padding_idx: int | None = None,
        max_norm: float | None = None,
        norm_type: float = 2.0,
        scale_grad_by_freq: bool = False,
        sparse: bool = False,
        init_method: Callable[[Any], Any] = nn.init.normal_,
        device: torch.device | None = None,
        dtype: torch.dtype = torch.float32,
        shard_across_embedding: bool = False,
        pad: bool = False,
        sequence_parallel_enabled: bool = False,
        tensor_model_parallel_group: Any = None,
        use_spmd_rank: bool = False,
    ) -> None:
        super().__init__()
        assert not shard_across_embedding, "this stand-in knows nothing else"
        self.size = get_tensor_model_parallel_size()
        self.own = divide(num_embeddings, self.size)
        self.dtype = dtype
        self.rank_util = SPMDRank(self.size) if use_spmd_rank else None
        self.weight = parameter((self.own, embedding_dim), dtype, 0)

    def forward(self, input_: Tensor) -> Tensor:
        if self.size == 1:
            return F.embedding(input_.long(), self.weight)
        rank = self.rank_util.get_rank() if self.rank_util else get_tensor_model_parallel_rank()
        local = input_ - self.own * rank
        mine = (local >= 0) & (local < self.own)
        output = F.embedding(local.mul(mine.long()).long(), self.weight)
        output = output.mul(mine.float().unsqueeze(-1)).to(self.dtype)
        return reduce_from_tensor_model_parallel_region(output)
