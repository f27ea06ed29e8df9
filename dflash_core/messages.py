"""What travels between the coordinator and the two models.

Frozen dataclasses of numpy arrays and plain Python values: they pickle in microseconds, and large
arrays cross process borders without being decoded. Invariants are asserted on construction.

Shape legend: B sequences, L block length, R context rows.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

Int32Array = np.ndarray


@dataclass(frozen=True)
class Span:
    """Begin and end of a piece of work, seconds of `time.monotonic()`.

    That clock is one for all processes of a machine, so spans of different workers compare.
    """

    began: float
    ended: float

    @property
    def seconds(self) -> float:
        return self.ended - self.began


@dataclass(frozen=True)
class Features:
    """Hidden states of committed tokens, `[rows, width]`, as opaque bytes.

    Attributes:
        data: uint8, `rows * width * itemsize` long, row-major.
        rows: number of tokens.
        width: tapped layers * hidden size.
        dtype: name of the torch dtype, e.g. "bfloat16".
    """

    data: np.ndarray
    rows: int
    width: int
    dtype: str

    def __post_init__(self) -> None:
        assert self.data.dtype == np.uint8 and self.data.ndim == 1
        assert self.rows == 0 or self.data.nbytes % self.rows == 0

    @property
    def row_bytes(self) -> int:
        return self.data.nbytes // self.rows if self.rows else 0

    def slice(self, start: int, stop: int) -> Features:
        """The rows `start..stop-1`, without copying."""
        part = self.data[start * self.row_bytes : stop * self.row_bytes]
        return Features(part, stop - start, self.width, self.dtype)


@dataclass(frozen=True)
class VerifyPlan:
    """One step of the target: a block of tokens for each of B sequences.

    Decode: row b is `[newest token, drafts...]`; every row of logits is used. Prefill: row b is a
    piece of the prompt; only the logits of its last token are used.

    Attributes:
        tokens: int32 `[B, L]`, rows padded at the end.
        slots, starts, lengths: int32 `[B]`: cache slot, position of the first token, valid tokens.
        prefill: which of the two it is.
        with_features: False where no drafter wants them.
    """

    tokens: Int32Array
    slots: Int32Array
    starts: Int32Array
    lengths: Int32Array
    prefill: bool
    with_features: bool

    def __post_init__(self) -> None:
        assert self.tokens.ndim == 2
        assert len(self.tokens) == len(self.slots) == len(self.starts) == len(self.lengths)
        assert len(self.lengths) == 0 or 1 <= self.lengths.min() <= self.lengths.max()
        assert self.lengths.max(initial=0) <= self.tokens.shape[1]


@dataclass(frozen=True)
class VerifyResult:
    """What the target made of a plan.

    Attributes:
        tokens: per sequence the accepted drafts and one more token (prefill: just that one).
        features: of the committed rows, in sequence order: `len(tokens[b])` rows per decoded
            sequence, `lengths[b]` per prefilled one.
        span: when the model ran.
    """

    tokens: list[list[int]]
    features: Features | None
    span: Span


@dataclass(frozen=True)
class DraftPlan:
    """One step of the drafter: inject R context rows, then draft for B sequences.

    Attributes:
        features: R rows; None where there is nothing to inject.
        row_slots, row_positions: int32 `[R]`, where each row goes.
        tokens: int32 `[B]`, the newest accepted token of each sequence.
        slots, starts, context_starts: int32 `[B]`: cache slot, position of that token, first
            injected position.
        num_drafts: tokens to guess per sequence.
    """

    features: Features | None
    row_slots: Int32Array
    row_positions: Int32Array
    tokens: Int32Array
    slots: Int32Array
    starts: Int32Array
    context_starts: Int32Array
    num_drafts: int

    def __post_init__(self) -> None:
        rows = self.features.rows if self.features is not None else 0
        assert rows == len(self.row_slots) == len(self.row_positions)
        sequences = len(self.tokens)
        assert sequences == len(self.slots) == len(self.starts) == len(self.context_starts)
        assert self.num_drafts >= 1 or sequences == 0


@dataclass(frozen=True)
class DraftResult:
    """Draft tokens per sequence, `num_drafts` each, and when the model ran."""

    tokens: list[list[int]]
    span: Span
