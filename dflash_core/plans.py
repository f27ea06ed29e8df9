"""Build the models' plans from sequences, and hand their results back."""

from __future__ import annotations

import numpy as np

from dflash_core.messages import DraftPlan, Features, VerifyPlan, VerifyResult
from dflash_core.request import GenerationOutput
from dflash_core.sampling_plan import sampling_plan
from dflash_core.sequence import ContextPiece, DraftJob, Sequence
from dflash_core.shapes import StaticShapes, bucket


def verify_plan(
    sequences: list[Sequence],
    shapes: StaticShapes,
    *,
    with_features: bool,
    num_drafts: int | None = None,
) -> tuple[VerifyPlan, list[list[int]]]:
    """One step for these sequences, which must all be prefilling or all be decoding.

    Args:
        with_features: whether they have a drafter.
        num_drafts: most drafts to verify of each; None = as many as the shapes allow.

    Returns:
        The plan, and the unpadded blocks for `commit`. A decode plan has the smallest of the
        shapes' block lengths that holds them.
    """
    prefill = sequences[0].prefilling
    assert all(sequence.prefilling == prefill for sequence in sequences)
    most = shapes.num_drafts if num_drafts is None else num_drafts
    blocks = [sequence.next_block(most, shapes.prefill_chunk) for sequence in sequences]
    lengths = np.array([len(block) for block in blocks], dtype=np.int32)
    if prefill:
        width = bucket(shapes.prefill_buckets, int(lengths.max()))
    else:
        width = bucket(shapes.block_lengths, int(lengths.max()))
    tokens = np.zeros((len(blocks), width), dtype=np.int32)
    for row, block in zip(tokens, blocks, strict=True):
        row[: len(block)] = block
    plan = VerifyPlan(
        tokens=tokens,
        slots=np.array([sequence.slot for sequence in sequences], dtype=np.int32),
        starts=np.array([sequence.num_computed for sequence in sequences], dtype=np.int32),
        lengths=lengths,
        prefill=prefill,
        with_features=with_features,
        sampling=sampling_plan(sequences, blocks, 1 if prefill else width),
    )
    return plan, blocks


def commit(
    sequences: list[Sequence], blocks: list[list[int]], result: VerifyResult
) -> list[GenerationOutput | None]:
    """Give every sequence its part of a verify result; what `Sequence.commit` returned for each."""
    outputs, row = [], 0
    logprobs = result.logprobs or [None] * len(sequences)
    for sequence, block, emitted, asked in zip(
        sequences, blocks, result.tokens, logprobs, strict=True
    ):
        rows = len(block) if sequence.prefilling else len(emitted)
        features = result.features.slice(row, row + rows) if result.features else None
        outputs.append(sequence.commit(block, emitted, features, asked))
        row += rows
    return outputs


def draft_plans(jobs: list[DraftJob], *, num_drafts: int, max_rows: int) -> list[DraftPlan]:
    """The jobs as one plan, preceded by plans that only inject where `max_rows` is exceeded."""
    slots = [job.slot for job in jobs for _ in job.context]
    pieces = [piece for job in jobs for piece in job.context]
    if pieces:
        row_slots = np.repeat(
            np.array(slots, dtype=np.int32), [piece.features.rows for piece in pieces]
        )
        row_positions = np.concatenate([_positions(piece) for piece in pieces])
        features = join([piece.features for piece in pieces])
    else:
        row_slots = row_positions = np.zeros(0, dtype=np.int32)
        features = None
    drafting = [job for job in jobs if job.token is not None]
    # At least one plan, which injects what fits and drafts; the surplus rows go before it.
    ends = list(range(len(row_slots), 0, -max_rows))[::-1] or [0]
    plans, begin = [], 0
    for end in ends:
        asked = drafting if end == ends[-1] else []
        plans.append(
            DraftPlan(
                features=features.slice(begin, end) if features else None,
                row_slots=row_slots[begin:end],
                row_positions=row_positions[begin:end],
                tokens=np.array([job.token for job in asked], dtype=np.int32),
                slots=np.array([job.slot for job in asked], dtype=np.int32),
                starts=np.array([job.start for job in asked], dtype=np.int32),
                context_starts=np.array([job.context_start for job in asked], dtype=np.int32),
                num_drafts=num_drafts,
            )
        )
        begin = end
    return plans


def join(parts: list[Features]) -> Features:
    """The rows of all parts in order (a single part is not copied)."""
    if len(parts) == 1:
        return parts[0]
    data = np.concatenate([part.data for part in parts])
    return Features(data, sum(part.rows for part in parts), parts[0].width, parts[0].dtype)


def _positions(piece: ContextPiece) -> np.ndarray:
    return np.arange(piece.start, piece.start + piece.features.rows, dtype=np.int32)


def scratch_verify_plan(
    shapes: StaticShapes, batch: int, length: int, *, prefill: bool = False, start: int = 0
) -> VerifyPlan:
    """A plan of that shape, after `start` positions, which touches nothing but the scratch slot:
    for warming up."""
    ones = np.ones(batch, dtype=np.int32)
    return VerifyPlan(
        tokens=np.zeros((batch, length), dtype=np.int32),
        slots=ones * shapes.num_slots,
        starts=ones * start,
        lengths=ones * length,
        prefill=prefill,
        with_features=True,
    )


def scratch_draft_plan(
    shapes: StaticShapes, batch: int, features: Features | None, *, start: int = 1
) -> DraftPlan:
    """A plan that injects these features and drafts after `start` positions, in nothing but the
    scratch slot."""
    ones = np.ones(batch, dtype=np.int32)
    row_ones = np.ones(features.rows if features else 0, dtype=np.int32)
    return DraftPlan(
        features=features,
        row_slots=row_ones * shapes.num_slots,
        row_positions=row_ones * 0,
        tokens=ones * 0,
        slots=ones * shapes.num_slots,
        starts=ones * start,
        context_starts=ones * 0,
        num_drafts=shapes.num_drafts,
    )
