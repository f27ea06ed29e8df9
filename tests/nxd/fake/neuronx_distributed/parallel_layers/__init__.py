from neuronx_distributed.parallel_layers.layers import (
    ColumnParallelLinear,
    ParallelEmbedding,
    RowParallelLinear,
)

__all__ = ["ColumnParallelLinear", "ParallelEmbedding", "RowParallelLinear"]
