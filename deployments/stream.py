"""A running request as the Router's threads see it."""

from __future__ import annotations

import math
import time
from collections.abc import Callable
from dataclasses import dataclass

from dflash_core.request import GenerationOutput
from dflash_core.sequence import Sequence

Delivery = GenerationOutput | Exception


@dataclass(eq=False)
class Stream:
    """One request on one Verifier. Only that Verifier's thread changes it.

    Attributes:
        request_id: for logs.
        sequence: its decoding state.
        send: passes an output, or the error that ended the request, to the client's side; called
            from the Verifier's thread.
        interval: seconds between two outputs at least. Every one wakes up the Router's event loop,
            Serve's proxy and the client, which costs the models more than most steps are long
            where they share their cores; so tokens that come faster travel together.
        drafting: the drafter has been asked and has not answered yet.
        drafts_due: while drafting, when to go on without drafts (`time.monotonic()`).
        last_step: the Verifier's last step that it took part in.
        removed: the client is gone or the request is finished; the drafter drops its work.
    """

    request_id: str
    sequence: Sequence
    send: Callable[[Delivery], None]
    interval: float = 0.0
    drafting: bool = False
    drafts_due: float = 0.0
    last_step: int = -1
    removed: bool = False
    _held: GenerationOutput | None = None
    _next_output: float = -math.inf

    def ready(self, now: float) -> bool:
        """Whether the next verify step may run: drafts are there, or not worth waiting for."""
        return not self.drafting or bool(self.sequence.drafts) or now >= self.drafts_due

    def deliver(self, output: GenerationOutput) -> None:
        """Send the output, or hold it for the next one. The last one is sent at once."""
        self._held = output if self._held is None else self._held + output
        if output.finish_reason is not None or time.monotonic() >= self._next_output:
            self.flush()

    def flush(self) -> None:
        """Send what is held."""
        if self._held is not None:
            held, self._held = self._held, None
            self._next_output = time.monotonic() + self.interval
            self.send(held)

    def fail(self, error: Exception) -> None:
        """Send what is held, then the error that ends the request."""
        self.flush()
        self.send(error)
