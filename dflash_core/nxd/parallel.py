"""The tensor-parallel group of a model whose ranks are all driven by one process."""

from __future__ import annotations

from dataclasses import dataclass
from types import ModuleType

from torch import Tensor

from dflash_core.parallel import TensorParallel


@dataclass(frozen=True)
class NxdParallel(TensorParallel):
    """What a model is traced with. One graph is that of all ranks, so `rank` is always 0: what
    differs between ranks is a weight (see `dflash_core.nxd.weights`).

    Attributes:
        logical_nc_config: physical cores per logical one (LNC), as on the node.
    """

    logical_nc_config: int = 2

    def __post_init__(self) -> None:
        if self.rank != 0 or self.size < 1:
            raise ValueError(f"rank {self.rank} of {self.size}: a trace is that of rank 0")

    @property
    def layers(self) -> ModuleType:
        from dflash_core.nxd import layers

        return layers

    def all_reduce(self, x: Tensor) -> Tensor:
        return self.layers.mappings.reduce_from_tensor_model_parallel_region(x)

    def all_gather(self, x: Tensor) -> Tensor:
        gather = self.layers.mappings.gather_from_tensor_model_parallel_region_with_dim
        return gather(x.contiguous()[None], 0)
