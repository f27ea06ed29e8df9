"""Greedy acceptance: a draft counts while it is what the target itself would have said."""

from __future__ import annotations

import pytest
import torch

from dflash_core.verify import accept


def accepted(tokens: list[list[int]], lengths: list[int], argmax: list[list[int]]) -> list[int]:
    return accept(
        torch.tensor(tokens, dtype=torch.int32),
        torch.tensor(lengths, dtype=torch.int32),
        torch.tensor(argmax, dtype=torch.int32),
    ).tolist()


@pytest.mark.parametrize(
    ("block", "argmax", "count"),
    [
        pytest.param([5, 6, 7, 8], [6, 7, 8, 9], 3, id="all right"),
        pytest.param([5, 6, 7, 8], [1, 7, 8, 9], 0, id="the first wrong"),
        pytest.param([5, 6, 7, 8], [6, 1, 8, 9], 1, id="right again after a wrong one"),
        pytest.param([5, 6, 7, 8], [6, 7, 1, 9], 2, id="the last wrong"),
        pytest.param([5], [9], 0, id="no drafts"),
    ],
)
def test_drafts_are_accepted_up_to_the_first_wrong_one(
    block: list[int], argmax: list[int], count: int
) -> None:
    assert accepted([block], [len(block)], [argmax]) == [count]


def test_padding_is_never_accepted_even_where_it_equals_the_argmax() -> None:
    block, argmax = [5, 6, 0, 0], [6, 0, 0, 0]
    assert accepted([block] * 4, [1, 2, 3, 4], [argmax] * 4) == [0, 1, 2, 3]


def accepted_slowly(block: list[int], argmax: list[int]) -> int:
    count = 0
    while count + 1 < len(block) and block[count + 1] == argmax[count]:
        count += 1
    return count


@pytest.mark.parametrize("seed", range(20))
def test_a_batch_equals_a_loop_over_its_sequences(seed: int) -> None:
    random = torch.Generator().manual_seed(seed)
    batch, length = 16, 1 + seed % 8
    tokens = torch.randint(2, (batch, length), generator=random)
    argmax = torch.randint(2, (batch, length), generator=random)
    lengths = torch.randint(1, length + 1, (batch,), generator=random)
    assert accepted(tokens.tolist(), lengths.tolist(), argmax.tolist()) == [
        accepted_slowly(block[:valid], rows)
        for block, valid, rows in zip(
            tokens.tolist(), lengths.tolist(), argmax.tolist(), strict=True
        )
    ]
