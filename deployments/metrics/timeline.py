"""What happened when: the last steps of this Router as a Chrome trace, for ui.perfetto.dev."""

from __future__ import annotations

import time
from collections import deque
from typing import Any

from dflash_core.messages import Span

CAPACITY = 4096  # steps; some minutes of one busy pair


class Timeline:
    """A ring of steps and deliveries. Any thread may add, any may read.

    All times are `time.monotonic()`, which processes of one machine share.
    """

    def __init__(self) -> None:
        self._steps: deque[tuple[str, str, Span, float, float, dict[str, Any]]] = deque(
            maxlen=CAPACITY
        )
        self._deliveries: deque[tuple[str, float, int]] = deque(maxlen=CAPACITY)

    def step(
        self,
        stage: str,
        replica_id: str,
        span: Span,
        *,
        began: float,
        received: float,
        **facts: Any,
    ) -> None:
        """A plan that was handed over at `began`, worked on during `span`, and answered at
        `received`."""
        self._steps.append((stage, replica_id, span, began, received, facts))

    def delivery(self, request_id: str, tokens: int) -> None:
        """Tokens that leave for the client now."""
        self._deliveries.append((request_id, time.monotonic(), tokens))

    def chrome_trace(self) -> dict[str, Any]:
        """The JSON of Chrome's trace event format: a track for each replica, and one per request.

        A step is three slices: `send` until the worker begins, the stage's name while the model
        runs, `receive` until the Router has the result. Gaps are time that nobody used.
        """
        steps, deliveries = list(self._steps), list(self._deliveries)
        events: list[dict[str, Any]] = []
        tracks: dict[str, int] = {}

        def track(name: str) -> dict[str, int]:
            if name not in tracks:
                number = tracks[name] = len(tracks) + 1
                place = {"pid": 1, "tid": number}
                events.append({"name": "thread_name", "ph": "M", "args": {"name": name}} | place)
            return {"pid": 1, "tid": tracks[name]}

        for stage, replica_id, span, began, received, facts in steps:
            place = track(f"{stage} {replica_id.removeprefix('SERVE_REPLICA::')}")
            for name, start, end in (
                ("send", began, span.began),
                (stage, span.began, span.ended),
                ("receive", span.ended, received),
            ):
                slice_ = {"name": name, "ph": "X", "ts": 1e6 * start, "dur": 1e6 * (end - start)}
                events.append(slice_ | place | ({"args": facts} if name == stage else {}))
        for request_id, moment, tokens in deliveries:
            event = {"name": f"{tokens} tokens", "ph": "i", "ts": 1e6 * moment, "s": "t"}
            events.append(event | track(f"stream {request_id}") | {"args": {"tokens": tokens}})
        return {"displayTimeUnit": "ms", "traceEvents": events}
