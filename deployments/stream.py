"""A running request as the Router's threads see it."""

from __future__ import annotations

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
        deliver: passes an output, or the error that ended the request, to the client's side;
            called from the Verifier's thread.
        drafting: the drafter has been asked and has not answered yet.
        drafts_due: while drafting, when to go on without drafts (`time.monotonic()`).
        last_step: the Verifier's last step that it took part in.
        removed: the client is gone or the request is finished; the drafter drops its work.
    """

    request_id: str
    sequence: Sequence
    deliver: Callable[[Delivery], None]
    drafting: bool = False
    drafts_due: float = 0.0
    last_step: int = -1
    removed: bool = False

    def ready(self, now: float) -> bool:
        """Whether the next verify step may run: drafts are there, or not worth waiting for."""
        return not self.drafting or bool(self.sequence.drafts) or now >= self.drafts_due
