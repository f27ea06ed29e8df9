"""Static shapes: buckets cover what is needed, and inconsistent ones are refused."""

from __future__ import annotations

import dataclasses

import pytest

from dflash_core.shapes import StaticShapes, bucket

SHAPES = StaticShapes.create(num_slots=6, max_model_len=1000, num_drafts=7, prefill_chunk=256)


def test_buckets_double_up_to_the_limit_itself() -> None:
    assert SHAPES.num_seqs_buckets == (1, 2, 4, 6)
    assert SHAPES.context_buckets == (128, 256, 512, 1000)
    assert SHAPES.prefill_buckets == (32, 64, 128, 256)
    assert SHAPES.draft_row_buckets == (8, 16, 32, 48, 64, 128, 256)
    assert SHAPES.max_draft_rows == 256


def test_a_short_context_has_one_bucket_and_a_short_chunk() -> None:
    shapes = StaticShapes.create(num_slots=1, max_model_len=64, num_drafts=0)
    assert shapes.context_buckets == (64,)
    assert shapes.prefill_chunk == 64


def test_the_smallest_sufficient_bucket_is_chosen() -> None:
    assert [bucket((2, 4, 8), needed) for needed in (1, 2, 3, 8)] == [2, 2, 4, 8]
    with pytest.raises(ValueError, match="9 exceeds the largest bucket 8"):
        bucket((2, 4, 8), 9)


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"num_slots": 0}, "num_slots = 0"),
        ({"num_drafts": -1}, "num_drafts = -1"),
        ({"num_seqs_buckets": (4, 2, 6)}, "ascending"),
        ({"num_seqs_buckets": (1, 4)}, "add a bucket of at least 6"),
        ({"context_buckets": (128, 2000)}, "must end with max_model_len = 1000"),
    ],
)
def test_an_inconsistent_shape_names_its_field(change: dict, message: str) -> None:
    with pytest.raises(ValueError, match=message):
        dataclasses.replace(SHAPES, **change)
