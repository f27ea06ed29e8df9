from __future__ import annotations

from types import TracebackType

from neuronx_distributed.parallel_layers import parallel_state


class NxDParallelState:
    def __init__(
        self,
        world_size: int = 1,
        rank: int = 0,
        tensor_model_parallel_size: int = 1,
        pipeline_model_parallel_size: int = 1,
        context_parallel_size: int = 1,
        expert_model_parallel_size: int = 1,
        lnc_size: int | None = None,
    ) -> None:
        assert world_size == tensor_model_parallel_size, "this stand-in knows nothing else"
        self.size = tensor_model_parallel_size

    def __enter__(self) -> NxDParallelState:
        assert parallel_state.size is None, "already initialised"
        parallel_state.size = self.size
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        parallel_state.size = None
