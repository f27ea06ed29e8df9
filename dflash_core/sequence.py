"""The decoding state of one request: what is computed, injected, drafted and emitted."""

from __future__ import annotations

from dataclasses import dataclass, replace

from dflash_core.messages import Features
from dflash_core.request import GenerationOutput, TokenLogprobs
from dflash_core.statistics import AcceptanceStatistics
from dflash_core.stopping import Stopping


@dataclass(frozen=True)
class ContextPiece:
    """Features of committed tokens at the positions start, start + 1, ..."""

    start: int
    features: Features


@dataclass(frozen=True)
class DraftJob:
    """What the drafter is asked for one sequence.

    Attributes:
        slot: the drafter's slot.
        context: features to inject first, in order.
        token, start: the newest accepted token and its position; token None = inject only.
        context_start: first position that was ever injected.
    """

    slot: int
    context: tuple[ContextPiece, ...]
    token: int | None
    start: int
    context_start: int


class Sequence:
    """One request between admission and its last token.

    Invariant while decoding: the target's cache holds the positions `0..len(tokens) - 2`; the
    newest token is the first of the next block.

    Args:
        prompt: token ids.
        slot: in the target's cache; -1 = it has none yet.
        stopping: decides, on accepted tokens, where the output ends; of its request are also the
            sampling parameters and the prompt proper, which may be shorter than `prompt` where
            output of before is computed again.
        max_model_len: no position at or beyond it is ever written.
    """

    def __init__(
        self, prompt: list[int], *, slot: int = -1, stopping: Stopping, max_model_len: int
    ) -> None:
        self.tokens = list(prompt)
        self.slot = slot
        self.stopping = stopping
        self.max_model_len = max_model_len
        self.num_computed = 0
        self.prefill_end = len(prompt)
        self.drafts: list[int] = []
        self.draft_slot: int | None = None
        self.context_start = 0
        self.statistics = AcceptanceStatistics()
        self.finished = False
        self.prompt = stopping.request.prompt_token_ids
        self.sampling = stopping.request.sampling
        self._context: list[ContextPiece] = []

    def in_slot(self, slot: int) -> Sequence:
        """The same request in an empty slot of any target: it goes on where this one stands, once
        the prompt and what followed it has been computed there."""
        sequence = Sequence(
            self.tokens, slot=slot, stopping=self.stopping, max_model_len=self.max_model_len
        )
        sequence.statistics = self.statistics
        return sequence

    @property
    def prefilling(self) -> bool:
        return self.num_computed < self.prefill_end

    @property
    def position(self) -> int:
        """Position of the newest token."""
        return len(self.tokens) - 1

    @property
    def num_output_tokens(self) -> int:
        """Tokens generated so far."""
        return len(self.tokens) - len(self.prompt)

    @property
    def draft_room(self) -> int:
        """Most drafts that the next block can use: no position beyond the context limit is
        written, and the block's bonus token needs none."""
        return max(
            0, min(self.max_model_len - len(self.tokens), self.stopping.remaining_tokens - 1)
        )

    def attach_drafter(self, slot: int) -> None:
        """Speculate from here on: the drafter sees the positions that are computed from now."""
        self.draft_slot = slot
        self.context_start = self.num_computed
        self._context = []

    def detach_drafter(self) -> None:
        """Go on without drafts."""
        self.draft_slot = None
        self.drafts = []
        self._context = []

    def next_block(self, num_drafts: int, prefill_chunk: int) -> list[int]:
        """The tokens that the next verify step runs, the first at position `num_computed`."""
        if self.prefilling:
            end = min(self.prefill_end, self.num_computed + prefill_chunk)
            return self.tokens[self.num_computed : end]
        return [self.tokens[-1], *self.drafts[: min(num_drafts, self.draft_room)]]

    def commit(
        self,
        block: list[int],
        emitted: list[int],
        features: Features | None,
        logprobs: list[TokenLogprobs] | None = None,
    ) -> GenerationOutput | None:
        """Take in the result of a verify step over `block`.

        Args:
            block: what `next_block` returned.
            emitted: accepted drafts and one more token.
            features: of the committed positions, or None without a drafter.
            logprobs: one entry per emitted token, if the request asked for them.

        Returns:
            What the client gets, or None (a piece of the prompt that was not the last).
        """
        start = self.num_computed
        decoding = not self.prefilling
        self.num_computed += len(emitted) if decoding else len(block)
        if features is not None and self.draft_slot is not None:
            self._context.append(ContextPiece(start, features))
        if self.prefilling:
            return None
        self.drafts = []
        output = self.stopping.append(emitted)
        if logprobs is not None:
            output = replace(output, logprobs=logprobs[: len(output.token_ids)])
        self.tokens.extend(output.token_ids)
        self.finished = output.finish_reason is not None
        if decoding:
            kept = len(output.token_ids)
            self.statistics.record(
                proposed=len(block) - 1, accepted=min(len(emitted) - 1, kept), emitted=kept
            )
        if self.finished:
            return replace(output, statistics=self.statistics.as_dict())
        return output

    @property
    def num_pending_features(self) -> int:
        """Committed tokens that the drafter has not been told of."""
        return sum(piece.features.rows for piece in self._context)

    def take_draft_job(self, *, drafting: bool = True) -> DraftJob | None:
        """Hand the not yet injected features to the drafter, and ask for drafts where they can be
        used (and `drafting` says so). None where there is nothing to do."""
        assert self.draft_slot is not None
        room = not self.finished and not self.prefilling and self.draft_room > 0
        wants = drafting and room
        if not wants and not self._context:
            return None
        context, self._context = tuple(self._context), []
        return DraftJob(
            slot=self.draft_slot,
            context=context,
            token=self.tokens[-1] if wants else None,
            start=self.position,
            context_start=self.context_start,
        )

    def offer_drafts(self, start: int, drafts: list[int]) -> bool:
        """Take drafts made for the newest token at `start`; False where they come too late."""
        if self.finished or start != self.position:
            return False
        self.drafts = drafts
        return True
