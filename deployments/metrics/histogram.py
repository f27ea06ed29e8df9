"""A histogram that can be pickled and added up: Prometheus' kind, without a registry."""

from __future__ import annotations

from bisect import bisect_left
from collections import deque
from dataclasses import dataclass, field

KEPT_VALUES = 10_000


@dataclass
class Histogram:
    """How many observed values lie at or below each bound.

    Attributes:
        bounds: upper bounds of the buckets, ascending; one more bucket takes what exceeds them.
        counts: values per bucket, not cumulated, `len(bounds) + 1` long.
        total: sum of the values.
        fresh: the newest values, for whoever wants each of them and drains the queue in time; not
            part of copies and sums.
    """

    bounds: tuple[float, ...]
    counts: list[int] = field(default_factory=list)
    total: float = 0.0
    fresh: deque[float] = field(
        default_factory=lambda: deque(maxlen=KEPT_VALUES), compare=False, repr=False
    )

    def __post_init__(self) -> None:
        self.counts = self.counts or [0] * (len(self.bounds) + 1)

    def observe(self, value: float) -> None:
        self.counts[bisect_left(self.bounds, value)] += 1
        self.total += value
        self.fresh.append(value)

    def add(self, other: Histogram) -> None:
        """Add the values of `other`, which has the same bounds."""
        assert self.bounds == other.bounds
        self.counts = [own + more for own, more in zip(self.counts, other.counts, strict=True)]
        self.total += other.total

    def cumulated(self) -> list[tuple[float, int]]:
        """(bound, values at or below it), the last with the bound infinity."""
        pairs, below = [], 0
        for bound, count in zip((*self.bounds, float("inf")), self.counts, strict=True):
            below += count
            pairs.append((bound, below))
        return pairs

    @property
    def count(self) -> int:
        return sum(self.counts)

    def drain(self) -> list[float]:
        """The fresh values, which are forgotten."""
        return [self.fresh.popleft() for _ in range(len(self.fresh))]

    def __reduce__(self):
        return Histogram, (self.bounds, list(self.counts), self.total)
