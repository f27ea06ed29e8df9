from __future__ import annotations

size: int | None = None


def get_tensor_model_parallel_size() -> int:
    assert size is not None, "model parallel state is not initialised"
    return size


def get_tensor_model_parallel_rank() -> int:
    """That of the trace: a graph is the same for all ranks."""
    assert size is not None, "model parallel state is not initialised"
    return 0
