"""Acceptance statistics of speculative decoding."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any


@dataclass
class AcceptanceStatistics:
    """Counters, with vLLM's meanings.

    Attributes:
        num_drafts: verify steps that carried drafts.
        num_draft_tokens: drafts proposed in them.
        num_accepted_tokens: drafts accepted and kept (none after a stop).
        accepted_per_position: how often draft i of a block was accepted.
        num_steps: decode steps, with or without drafts.
        num_tokens: tokens emitted by decode steps.
        total: whatever is recorded here is recorded there too, e.g. for all sequences of a
            replica: sums that never decrease, however sequences come and go.
    """

    num_drafts: int = 0
    num_draft_tokens: int = 0
    num_accepted_tokens: int = 0
    accepted_per_position: list[int] = field(default_factory=list)
    num_steps: int = 0
    num_tokens: int = 0
    total: AcceptanceStatistics | None = field(default=None, compare=False, repr=False)

    def record(self, *, proposed: int, accepted: int, emitted: int) -> None:
        """Count one decode step of one sequence."""
        assert 0 <= accepted <= proposed
        if self.total is not None:
            self.total.record(proposed=proposed, accepted=accepted, emitted=emitted)
        self.num_steps += 1
        self.num_tokens += emitted
        if not proposed:
            return
        self.num_drafts += 1
        self.num_draft_tokens += proposed
        self.num_accepted_tokens += accepted
        self._reserve(proposed)
        for position in range(accepted):
            self.accepted_per_position[position] += 1

    def add(self, other: AcceptanceStatistics) -> None:
        """Add the counters of `other` to these."""
        self.num_drafts += other.num_drafts
        self.num_draft_tokens += other.num_draft_tokens
        self.num_accepted_tokens += other.num_accepted_tokens
        self.num_steps += other.num_steps
        self.num_tokens += other.num_tokens
        self._reserve(len(other.accepted_per_position))
        for position, count in enumerate(other.accepted_per_position):
            self.accepted_per_position[position] += count

    @property
    def acceptance_length(self) -> float:
        """Tokens per step that carried drafts: 1 + accepted / drafts (0 before any)."""
        return 1 + self.num_accepted_tokens / self.num_drafts if self.num_drafts else 0.0

    def as_dict(self) -> dict[str, Any]:
        """The counters and the two rates that people quote, ready for JSON."""
        proposed = self.num_draft_tokens
        return {
            "num_drafts": self.num_drafts,
            "num_draft_tokens": proposed,
            "num_accepted_tokens": self.num_accepted_tokens,
            "num_accepted_tokens_per_pos": list(self.accepted_per_position),
            "num_decode_steps": self.num_steps,
            "num_decode_tokens": self.num_tokens,
            "acceptance_rate": self.num_accepted_tokens / proposed if proposed else 0.0,
            "acceptance_length": self.acceptance_length,
        }

    def _reserve(self, positions: int) -> None:
        missing = positions - len(self.accepted_per_position)
        self.accepted_per_position.extend([0] * missing)
