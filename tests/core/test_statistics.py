"""What the counters of acceptance mean."""

from __future__ import annotations

import json

import pytest

from dflash_core.statistics import AcceptanceStatistics


def steps(*proposed_accepted: tuple[int, int]) -> AcceptanceStatistics:
    statistics = AcceptanceStatistics()
    for proposed, accepted in proposed_accepted:
        statistics.record(proposed=proposed, accepted=accepted, emitted=accepted + 1)
    return statistics


def test_drafts_are_counted_per_block_per_token_and_per_position() -> None:
    statistics = steps((3, 3), (3, 0), (3, 1))
    assert statistics.num_drafts == 3
    assert statistics.num_draft_tokens == 9
    assert statistics.num_accepted_tokens == 4
    assert statistics.accepted_per_position == [2, 1, 1]
    assert (statistics.num_steps, statistics.num_tokens) == (3, 7)


def test_a_step_without_drafts_counts_as_a_step_but_not_as_a_draft() -> None:
    statistics = steps((0, 0), (2, 1), (0, 0))
    assert (statistics.num_steps, statistics.num_tokens) == (3, 4)
    assert (statistics.num_drafts, statistics.num_draft_tokens) == (1, 2)
    assert statistics.acceptance_length == 2.0


def test_blocks_may_differ_in_length() -> None:
    """K shrinks near the context limit."""
    statistics = steps((1, 1), (4, 3), (2, 2))
    assert statistics.accepted_per_position == [3, 2, 1, 0]


def test_sums_of_requests_equal_the_counters_of_all_their_steps() -> None:
    total = AcceptanceStatistics()
    total.add(steps((1, 1)))
    total.add(AcceptanceStatistics())
    total.add(steps((4, 3), (0, 0)))
    assert total == steps((1, 1), (4, 3), (0, 0))


def test_adding_leaves_the_added_alone() -> None:
    part, total = steps((2, 1)), steps((3, 3))
    total.add(part)
    total.record(proposed=2, accepted=2, emitted=3)
    assert part == steps((2, 1))


def test_rates_are_those_that_people_quote() -> None:
    numbers = steps((4, 4), (4, 0)).as_dict()
    assert numbers["acceptance_rate"] == 0.5
    assert numbers["acceptance_length"] == 3.0
    assert numbers["num_accepted_tokens_per_pos"] == [1, 1, 1, 1]
    assert json.loads(json.dumps(numbers)) == numbers


def test_rates_before_any_draft_are_zero() -> None:
    numbers = steps((0, 0)).as_dict()
    assert (numbers["acceptance_rate"], numbers["acceptance_length"]) == (0.0, 0.0)


def test_more_accepted_than_proposed_is_a_bug_of_the_caller() -> None:
    with pytest.raises(AssertionError):
        steps((2, 3))
