"""Which requests take part in the next step of a Verifier."""

from __future__ import annotations

from deployments.stream import Stream


class Scheduler:
    """Alternates prompt pieces with decode steps, and keeps decoding requests in groups.

    Args:
        groups: with a drafter, decoding requests are split into this many groups, so that the
            Verifier checks one group while the Drafter drafts for another.
    """

    def __init__(self, groups: int) -> None:
        self.groups = groups
        self._prefilled_last = False

    def next_batch(
        self, streams: list[Stream], now: float, *, drafting: bool = True
    ) -> list[Stream]:
        """The streams of the next step, all prefilling (one) or all decoding; [] = nothing ready.

        Args:
            streams: running requests, oldest first.
            now: `time.monotonic()`.
            drafting: False while nobody asks the drafter; there is no use for groups then.
        """
        prefilling = [stream for stream in streams if stream.sequence.prefilling]
        decoding = [stream for stream in streams if not stream.sequence.prefilling]
        ready = [stream for stream in decoding if stream.ready(now)]
        if prefilling and not (ready and self._prefilled_last):
            self._prefilled_last = True
            return prefilling[:1]
        self._prefilled_last = False
        speculating = any(stream.sequence.draft_slot is not None for stream in decoding)
        if not (speculating and drafting) or self.groups == 1:
            return ready
        # Those that waited longest first: a request's place in the list must not starve it.
        ready.sort(key=lambda stream: stream.last_step)
        return ready[: -(-len(decoding) // self.groups)]
