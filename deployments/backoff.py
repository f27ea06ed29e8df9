"""How long to leave something alone after it has failed."""

from __future__ import annotations

import time

FIRST_S, LAST_S = 1.0, 30.0


class Backoff:
    """Twice as long after every failure, up to half a minute.

    Attributes:
        seconds: the current pause.
    """

    def __init__(self) -> None:
        self.seconds = 0.0
        self._ends = 0.0

    def is_over(self) -> bool:
        return time.monotonic() >= self._ends

    def begin(self) -> None:
        """It has failed again."""
        self.seconds = min(max(FIRST_S, 2 * self.seconds), LAST_S)
        self._ends = time.monotonic() + self.seconds
