"""Tensor-parallel ranks as processes of their own, for tests."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

import torch
import torch.distributed as dist

from dflash_core.parallel import TensorParallel
from dflash_core.runtime import join_group


@contextmanager
def rank_of_group(rank: int, size: int, store_port: int) -> Iterator[TensorParallel]:
    """This process as one rank on the CPU, with one thread; it leaves the group in order.

    A thread of gloo may still hold a tensor when the last collective has returned. Freeing it
    while the interpreter ends aborts the process, so those threads end before.
    """
    torch.set_num_threads(1)
    group = join_group("cpu", rank, size, store_port)
    yield group
    if size > 1:
        dist.barrier()
        dist.destroy_process_group()
