"""The static shapes that a server runs: what varies is data, never a shape."""

from __future__ import annotations

from dataclasses import dataclass

MIN_PREFILL = 32


@dataclass(frozen=True)
class StaticShapes:
    """Every size that a compiled step is specialised on.

    Attributes:
        num_slots: sequences that have a place in the KV cache.
        max_model_len: longest sequence (prompt + output), in tokens.
        num_drafts: draft tokens per step (K); 0 without a drafter.
        prefill_chunk: prompt tokens per prefill step.
        num_seqs_buckets: batch sizes of a decode step, ascending, the last >= num_slots.
        context_buckets: context lengths of attention, ascending, the last == max_model_len.
        partial_drafts: numbers of drafts between 0 and num_drafts that a step may carry as well.
    """

    num_slots: int
    max_model_len: int
    num_drafts: int
    prefill_chunk: int
    num_seqs_buckets: tuple[int, ...]
    context_buckets: tuple[int, ...]
    partial_drafts: tuple[int, ...] = ()

    def __post_init__(self) -> None:
        for name in ("num_slots", "max_model_len", "prefill_chunk"):
            if getattr(self, name) < 1:
                raise ValueError(f"{name} = {getattr(self, name)} must be at least 1")
        if self.num_drafts < 0:
            raise ValueError(f"num_drafts = {self.num_drafts} must not be negative")
        if not all(0 < k < self.num_drafts for k in self.partial_drafts):
            raise ValueError(
                f"partial_drafts = {self.partial_drafts} must lie between 0 and {self.num_drafts}"
            )
        for name, last in (
            ("num_seqs_buckets", self.num_slots),
            ("context_buckets", self.max_model_len),
        ):
            buckets = getattr(self, name)
            if not buckets or list(buckets) != sorted(set(buckets)) or buckets[0] < 1:
                raise ValueError(f"{name} = {buckets} must be ascending positive numbers")
            if buckets[-1] < last:
                raise ValueError(
                    f"{name} = {buckets} ends below {last}; add a bucket of at least {last}"
                )
        if self.context_buckets[-1] != self.max_model_len:
            raise ValueError(
                f"context_buckets = {self.context_buckets} must end with "
                f"max_model_len = {self.max_model_len}"
            )

    @property
    def block_lengths(self) -> tuple[int, ...]:
        """Tokens per sequence of a decode step, ascending: the newest one, and drafts."""
        return tuple(sorted({k + 1 for k in (0, *self.partial_drafts, self.num_drafts)}))

    @property
    def prefill_buckets(self) -> tuple[int, ...]:
        """Lengths of a piece of prompt, ascending: a short prompt is not padded to a chunk."""
        return doublings(min(MIN_PREFILL, self.prefill_chunk), self.prefill_chunk)

    @property
    def draft_row_buckets(self) -> tuple[int, ...]:
        """Numbers of context rows that one draft step can inject, ascending."""
        decode = {batch * (self.num_drafts + 1) for batch in self.num_seqs_buckets}
        return tuple(sorted(decode.union(self.prefill_buckets)))

    @property
    def max_draft_rows(self) -> int:
        """Most context rows that one draft step can inject."""
        return self.draft_row_buckets[-1]

    @classmethod
    def create(
        cls, *, num_slots: int, max_model_len: int, num_drafts: int, prefill_chunk: int = 256
    ) -> StaticShapes:
        """Powers of two for the batch, doublings from 128 for the context."""
        return cls(
            num_slots=num_slots,
            max_model_len=max_model_len,
            num_drafts=num_drafts,
            prefill_chunk=min(prefill_chunk, max_model_len),
            num_seqs_buckets=doublings(1, num_slots),
            context_buckets=doublings(min(128, max_model_len), max_model_len),
        )


def doublings(first: int, last: int) -> tuple[int, ...]:
    """first, 2 * first, 4 * first, ... and `last` itself at the end."""
    sizes = []
    while first < last:
        sizes.append(first)
        first *= 2
    return (*sizes, last)


def bucket(sizes: tuple[int, ...], needed: int) -> int:
    """The smallest of the ascending `sizes` that is at least `needed`.

    Raises:
        ValueError: none is.
    """
    for size in sizes:
        if size >= needed:
            return size
    raise ValueError(f"{needed} exceeds the largest bucket {sizes[-1]}")
