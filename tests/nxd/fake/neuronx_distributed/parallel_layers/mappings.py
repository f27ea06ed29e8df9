from __future__ import annotations

from typing import Any

from torch import Tensor

from neuronx_distributed import collectives
from neuronx_distributed.parallel_layers.parallel_state import get_tensor_model_parallel_size


def reduce_from_tensor_model_parallel_region(input_: Tensor, process_group: Any = None) -> Tensor:
    if get_tensor_model_parallel_size() == 1:
        return input_
    return collectives.all_reduce(input_)


def gather_from_tensor_model_parallel_region_with_dim(
    input_: Tensor, gather_dim: int, process_group: Any = None
) -> Tensor:
    if get_tensor_model_parallel_size() == 1:
        return input_
    return collectives.all_gather(input_, gather_dim)
