"""Waiting for a compiled graph's message without burning a core.

Ray 2.60 waits for a shared-memory channel by trying its semaphore in a loop, with or without a
timeout: an idle worker keeps one core busy for good, and the Router one more per step under way.
Where cores are few that slows down the very model that is being waited for. So the wait is ours:
one try, then a sleep that grows with the time since the last message (a fiftieth of it, between
0.05 and 2 ms), which adds about one percent to a step.
"""

from __future__ import annotations

import math
import time
from typing import Any

from ray.exceptions import RayChannelTimeoutError
from ray.experimental.channel.shared_memory_channel import Channel

SHARE = 1 / 50
SHORTEST_S, LONGEST_S = 50e-6, 2e-3
FOREVER = (None, -1)  # Ray's words for "no timeout"


def install() -> None:
    """Make every channel that this process reads wait that way; calling it again does nothing."""
    if Channel.read is not read_patiently:
        Channel.read = read_patiently


def read_patiently(channel: Channel, timeout: float | None = None) -> Any:
    """Stands in for `Channel.read(timeout)`, seconds. Raises RayChannelTimeoutError."""
    began = time.monotonic()
    end = math.inf if timeout in FOREVER else began + timeout
    last = getattr(channel, "last_message_at", began)
    while True:
        try:
            message = ray_read(channel, 0)
        except RayChannelTimeoutError:
            now = time.monotonic()
            if now >= end:
                raise
            pause = min(max((now - last) * SHARE, SHORTEST_S), LONGEST_S)
            time.sleep(min(pause, end - now))
        else:
            channel.last_message_at = time.monotonic()
            return message


ray_read = Channel.read
