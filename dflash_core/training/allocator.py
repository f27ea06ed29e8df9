"""Keep freed memory in the process.

A training step allocates and frees hundreds of large tensors. glibc gives every one of them back to
the kernel, which must clear the pages anew: measured here, half of the time of a step.
"""

from __future__ import annotations

import ctypes
import sys

M_TRIM_THRESHOLD = -1  # <malloc.h>
M_MMAP_MAX = -4
M_ARENA_MAX = -8
NEVER = 2**31 - 1


def keep_freed_memory() -> None:
    """Serve large allocations from the heap and never shrink it. No effect without glibc."""
    if not sys.platform.startswith("linux"):
        return
    mallopt = getattr(ctypes.CDLL(None), "mallopt", None)
    if mallopt is not None:
        mallopt(M_ARENA_MAX, 1)  # the heaps of other threads' arenas are given back when empty
        mallopt(M_MMAP_MAX, 0)
        mallopt(M_TRIM_THRESHOLD, NEVER)
