"""What travels between the coordinator and the two models.

Frozen dataclasses of numpy arrays and plain Python values: they pickle in microseconds, and large
arrays cross process borders without being decoded. Invariants are asserted on construction.

Shape legend: B sequences, L block length, R context rows, T tokens of several sequences.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from dflash_core.request import TokenLogprobs

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
class SamplingPlan:
    """How the tokens of one step are chosen. It says everything, so that workers keep no state.

    Row i of a block is the distribution of output token `first + i` of its sequence, given what
    the block holds up to its token i.

    Attributes:
        temperature, top_p, min_p: float32 `[B]`; temperature 0 is greedy.
        top_k: int32 `[B]`, 0 for all tokens.
        repetition, presence, frequency: float32 `[B]`, the penalties.
        uniforms: float32 `[B, L]`, one random number in [0, 1) per row of the block.
        history_rows, history_tokens: int32 `[T]`, the tokens that penalties look at, up to the
            newest one: (sequence, token id).
        history_output: bool `[T]`, whether that token was generated (or else is of the prompt).
        bias_rows, bias_tokens: int32, bias_values: float32, each `[T]`.
        banned_rows, banned_tokens: int32 `[T]`, tokens that may not be emitted yet.
        banned_lengths: int32 `[B]`, in that many leading rows of the block.
        num_logprobs: int32 `[B]`, alternatives to report; -1 for no log probabilities.
    """

    temperature: np.ndarray
    top_p: np.ndarray
    top_k: Int32Array
    min_p: np.ndarray
    repetition: np.ndarray
    presence: np.ndarray
    frequency: np.ndarray
    uniforms: np.ndarray
    history_rows: Int32Array
    history_tokens: Int32Array
    history_output: np.ndarray
    bias_rows: Int32Array
    bias_tokens: Int32Array
    bias_values: np.ndarray
    banned_rows: Int32Array
    banned_tokens: Int32Array
    banned_lengths: Int32Array
    num_logprobs: Int32Array

    def __post_init__(self) -> None:
        assert self.uniforms.ndim == 2 and len(self.uniforms) == len(self.temperature)
        assert len(self.history_rows) == len(self.history_tokens) == len(self.history_output)
        assert len(self.bias_rows) == len(self.bias_tokens) == len(self.bias_values)
        assert len(self.banned_rows) == len(self.banned_tokens)


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
        sampling: None where every token is the argmax of its logits. Of a prefill plan its L is 1.
    """

    tokens: Int32Array
    slots: Int32Array
    starts: Int32Array
    lengths: Int32Array
    prefill: bool
    with_features: bool
    sampling: SamplingPlan | None = None

    def __post_init__(self) -> None:
        assert self.tokens.ndim == 2
        assert len(self.tokens) == len(self.slots) == len(self.starts) == len(self.lengths)
        assert len(self.lengths) == 0 or 1 <= self.lengths.min() <= self.lengths.max()
        assert self.lengths.max(initial=0) <= self.tokens.shape[1]
        if self.sampling is not None:
            rows = 1 if self.prefill else self.tokens.shape[1]
            assert self.sampling.uniforms.shape == (len(self.tokens), rows)


@dataclass(frozen=True)
class VerifyResult:
    """What the target made of a plan.

    Attributes:
        tokens: per sequence the accepted drafts and one more token (prefill: just that one).
        features: of the committed rows, in sequence order: `len(tokens[b])` rows per decoded
            sequence, `lengths[b]` per prefilled one.
        span: when the model ran.
        logprobs: per sequence one entry for each of its tokens, None for those that did not ask;
            None where nobody did.
    """

    tokens: list[list[int]]
    features: Features | None
    span: Span
    logprobs: list[list[TokenLogprobs] | None] | None = None


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
