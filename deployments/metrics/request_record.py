"""What requests took: the figures of vLLM's request metrics, and a line in the log for each."""

from __future__ import annotations

import asyncio
import json
import logging
import time
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

from deployments.api.errors import ApiError
from deployments.metrics.histogram import Histogram
from dflash_core.request import GenerationOutput, GenerationRequest

logger = logging.getLogger("ray.serve")

FINISHED_REASONS = ("stop", "length", "abort", "error")

# Names and bounds as in vLLM, so that its dashboards and alerts fit.
_FIRST_TOKEN = (0.001, 0.005, 0.01, 0.02, 0.04, 0.06, 0.08, 0.1, 0.25, 0.5, 0.75, 1.0, 2.5, 5.0,
                7.5, 10.0, 20.0, 40.0, 80.0, 160.0, 640.0, 2560.0)  # fmt: skip
_NEXT_TOKEN = (0.01, 0.025, 0.05, 0.075, 0.1, 0.15, 0.2, 0.3, 0.4, 0.5, 0.75, 1.0, 2.5, 5.0, 7.5,
               10.0, 20.0, 40.0, 80.0)  # fmt: skip
_REQUEST = (0.3, 0.5, 0.8, 1.0, 1.5, 2.0, 2.5, 5.0, 10.0, 15.0, 20.0, 30.0, 40.0, 50.0, 60.0, 120.0,
            240.0, 480.0, 960.0, 1920.0, 7680.0)  # fmt: skip
_TOKENS = tuple(float(m * 10**e) for e in range(6) for m in (1, 2, 5))

HISTOGRAMS: dict[str, tuple[tuple[float, ...], str]] = {
    "time_to_first_token_seconds": (_FIRST_TOKEN, "Time to the first token."),
    "inter_token_latency_seconds": (_NEXT_TOKEN, "Time between two outputs of a request."),
    "request_time_per_output_token_seconds": (
        _NEXT_TOKEN,
        "Time per token after the first, mean of a request.",
    ),
    "e2e_request_latency_seconds": (_REQUEST, "Time from arrival to the last token."),
    "request_queue_time_seconds": (_REQUEST, "Time that a request waited for a slot."),
    "request_inference_time_seconds": (_REQUEST, "Time from the slot to the last token."),
    "request_prefill_time_seconds": (_REQUEST, "Time from the slot to the first token."),
    "request_decode_time_seconds": (_REQUEST, "Time from the first token to the last."),
    "request_prompt_tokens": (_TOKENS, "Tokens of a prompt."),
    "request_generation_tokens": (_TOKENS, "Tokens that a request generated."),
}


@dataclass
class RequestFigures:
    """Sums over the requests of a Router.

    Attributes:
        prompt_tokens: of the prompts whose first token has come.
        generation_tokens: tokens delivered.
        finished: requests by reason; "abort" = the client left, "error" = failed after it started.
        queue_seconds: that requests waited for their slots, finished or not.
        histograms: by vLLM's names, see HISTOGRAMS.
    """

    prompt_tokens: int = 0
    generation_tokens: int = 0
    finished: dict[str, int] = field(default_factory=lambda: dict.fromkeys(FINISHED_REASONS, 0))
    queue_seconds: float = 0.0
    histograms: dict[str, Histogram] = field(
        default_factory=lambda: {
            name: Histogram(bounds) for name, (bounds, _) in HISTOGRAMS.items()
        }
    )

    def add(self, other: RequestFigures) -> None:
        self.prompt_tokens += other.prompt_tokens
        self.generation_tokens += other.generation_tokens
        self.queue_seconds += other.queue_seconds
        for reason, count in other.finished.items():
            self.finished[reason] += count
        for name, histogram in other.histograms.items():
            self.histograms[name].add(histogram)

    def observe(self, name: str, value: float) -> None:
        self.histograms[name].observe(value)


class RequestRecord:
    """Follows one request, as a context manager around it, and enters it into the figures.

    Args:
        figures: of the Router; only its event loop changes them.
        request: identified by its id in the log; its prompt is never logged.
        clock: seconds.
    """

    def __init__(
        self,
        figures: RequestFigures,
        request: GenerationRequest,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self._figures = figures
        self._id = request.request_id
        self._prompt_tokens = len(request.prompt_token_ids)
        self._clock = clock
        self._arrived = clock()
        self._admitted: float | None = None
        self._first: float | None = None
        self._last = self._arrived
        self._output_tokens = 0
        self._finish_reason: str | None = None
        self._statistics: dict[str, Any] | None = None

    def admitted(self) -> None:
        """The request has its slot (the first, should it need another one later)."""
        if self._admitted is not None:
            return
        self._admitted = self._clock()
        self._figures.queue_seconds += self._admitted - self._arrived

    def add(self, output: GenerationOutput) -> None:
        """The engine has delivered this."""
        now = self._clock()
        if self._first is None:
            self._first = now
            self._figures.prompt_tokens += self._prompt_tokens
            self._figures.observe("time_to_first_token_seconds", now - self._arrived)
        else:
            self._figures.observe("inter_token_latency_seconds", now - self._last)
        self._last = now
        self._output_tokens += len(output.token_ids)
        self._figures.generation_tokens += len(output.token_ids)
        self._finish_reason = output.finish_reason
        self._statistics = output.statistics

    def __enter__(self) -> RequestRecord:
        return self

    def __exit__(self, _: Any, error: BaseException | None, __: Any) -> None:
        if self._finish_reason is not None:
            reason = self._finish_reason
            self._observe_finished()
        elif isinstance(error, ApiError) and self._admitted is None:
            reason = "refused"
        elif error is None or isinstance(error, (GeneratorExit, asyncio.CancelledError)):
            reason = "abort"
        else:
            reason = "error"
        if reason in self._figures.finished:
            self._figures.finished[reason] += 1
        logger.info("request %s", json.dumps(self._line(reason, error)))

    def _observe_finished(self) -> None:
        assert self._admitted is not None and self._first is not None
        decode = self._last - self._first
        for name, value in {
            "e2e_request_latency_seconds": self._last - self._arrived,
            "request_queue_time_seconds": self._admitted - self._arrived,
            "request_inference_time_seconds": self._last - self._admitted,
            "request_prefill_time_seconds": self._first - self._admitted,
            "request_decode_time_seconds": decode,
            "request_prompt_tokens": self._prompt_tokens,
            "request_generation_tokens": self._output_tokens,
        }.items():
            self._figures.observe(name, value)
        if self._output_tokens > 1:
            self._figures.observe(
                "request_time_per_output_token_seconds", decode / (self._output_tokens - 1)
            )

    def _line(self, reason: str, error: BaseException | None) -> dict[str, Any]:
        statistics = self._statistics or {}
        now = self._clock()

        def since_arrival(moment: float | None) -> float | None:
            return None if moment is None else round(moment - self._arrived, 4)

        line = {
            "id": self._id,
            "prompt_tokens": self._prompt_tokens,
            "output_tokens": self._output_tokens,
            "finish_reason": reason,
            "queue_s": since_arrival(self._admitted),
            "ttft_s": since_arrival(self._first),
            "duration_s": since_arrival(now),
            "num_drafts": statistics.get("num_drafts"),
            "num_draft_tokens": statistics.get("num_draft_tokens"),
            "num_accepted_tokens": statistics.get("num_accepted_tokens"),
            "acceptance_length": statistics.get("acceptance_length"),
        }
        return line | ({"error": type(error).__name__} if reason in ("error", "refused") else {})
