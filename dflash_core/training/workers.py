"""Threads that each work on a part of their own, with single-threaded tensor operations.

Splitting every operation over the cores makes each of the thousand operations of a step wait for
its slowest thread; where another process takes a core now and then, that multiplies the time.
Splitting the step waits once.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from concurrent.futures import ThreadPoolExecutor
from typing import TypeVar

import torch

Part = TypeVar("Part")
Result = TypeVar("Result")


class Workers:
    """Args: threads; operations of the whole process become single-threaded."""

    def __init__(self, threads: int) -> None:
        torch.set_num_threads(1)
        self.threads = threads
        self._pool = ThreadPoolExecutor(threads, "training")

    def map(self, run: Callable[[Part], Result], parts: Iterable[Part]) -> list[Result]:
        """`run` of every part, in order; raises what the first failing one raised."""
        return list(self._pool.map(run, parts))

    def split(self, size: int) -> list[slice]:
        """0..size in as many equal parts as there are threads, where it has so many."""
        parts = max(1, min(self.threads, size))
        ends = [size * part // parts for part in range(parts + 1)]
        return [slice(begin, end) for begin, end in zip(ends, ends[1:], strict=False)]
