"""The shapes at which the steps of both models run: one compiled graph each.

What is warmed up, what is checked for Trainium (`dflash_core.graphs`) and what may be compiled are
these lists; that no step ever runs at another shape is tested.
"""

from __future__ import annotations

from typing import NamedTuple

from dflash_core.shapes import StaticShapes


class TargetShape(NamedTuple):
    """A block of `length` tokens for each of `batch` sequences, attending to `context` keys."""

    prefill: bool
    batch: int
    length: int
    context: int


class InjectShape(NamedTuple):
    """That many rows of features, padding included."""

    rows: int


class DraftShape(NamedTuple):
    """Drafts for `batch` sequences with that many keys of context; the features of the last step
    (`rows`, K + 1 per sequence) are injected first."""

    batch: int
    rows: int
    context: int


def target_shapes(shapes: StaticShapes) -> list[TargetShape]:
    """Of verify and prefill steps. A block is never longer than what it attends to."""
    blocks = [
        (False, batch, length)
        for batch in shapes.num_seqs_buckets
        for length in shapes.block_lengths
    ]
    blocks += [(True, 1, length) for length in shapes.prefill_buckets]
    return [
        TargetShape(prefill, batch, length, context)
        for prefill, batch, length in blocks
        for context in shapes.context_buckets
        if context >= length
    ]


def inject_shapes(shapes: StaticShapes) -> list[InjectShape]:
    return [InjectShape(rows) for rows in shapes.draft_row_buckets]


def draft_shapes(shapes: StaticShapes) -> list[DraftShape]:
    return [
        DraftShape(batch, batch * (shapes.num_drafts + 1), context)
        for batch in shapes.num_seqs_buckets
        for context in shapes.context_buckets
    ]
