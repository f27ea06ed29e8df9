"""Which requests take part in a step: prompts and decode steps alternate, nobody starves."""

from __future__ import annotations

from dataclasses import dataclass, field
from itertools import pairwise

import pytest

from deployments.scheduler import Scheduler
from deployments.stream import Stream


@dataclass
class State:
    """What the scheduler looks at in a sequence."""

    prefilling: bool = False
    draft_slot: int | None = None
    drafts: list[int] = field(default_factory=list)


def stream(name: str, **state: object) -> Stream:
    return Stream(name, State(**state), send=lambda _: None)


def prompt(name: str) -> Stream:
    return stream(name, prefilling=True)


def speculating(name: str, *, drafting: bool = False, due: float = 0.0) -> Stream:
    made = stream(name, draft_slot=0, drafts=[] if drafting else [1])
    made.drafting, made.drafts_due = drafting, due
    return made


def names(streams: list[Stream]) -> list[str]:
    return [stream.request_id for stream in streams]


def run(scheduler: Scheduler, streams: list[Stream], steps: int) -> list[list[str]]:
    """So many steps, in each of which everything is ready at once."""
    batches = []
    for index in range(steps):
        batch = scheduler.next_batch(streams, now=0.0)
        for member in batch:
            member.last_step = index
        batches.append(names(batch))
    return batches


def test_nothing_is_ready_without_requests() -> None:
    assert Scheduler(2).next_batch([], now=0.0) == []


class TestPrompts:
    def test_a_prompt_runs_alone_and_the_oldest_first(self) -> None:
        assert run(Scheduler(2), [prompt("a"), prompt("b")], 2) == [["a"], ["a"]]

    def test_pieces_of_a_prompt_alternate_with_decode_steps(self) -> None:
        streams = [stream("a"), stream("b"), prompt("c")]
        assert run(Scheduler(1), streams, 4) == [["c"], ["a", "b"], ["c"], ["a", "b"]]

    def test_a_prompt_does_not_wait_while_all_others_wait_for_drafts(self) -> None:
        streams = [speculating("a", drafting=True, due=9.0), prompt("b")]
        assert run(Scheduler(2), streams, 3) == [["b"], ["b"], ["b"]]

    def test_a_prompt_that_is_done_decodes_with_the_rest(self) -> None:
        scheduler, late = Scheduler(1), prompt("b")
        streams = [stream("a"), late]
        assert run(scheduler, streams, 2) == [["b"], ["a"]]
        late.sequence.prefilling = False
        assert run(scheduler, streams, 1) == [["a", "b"]]


class TestGroups:
    def test_without_a_drafter_all_decode_together(self) -> None:
        streams = [stream(name) for name in "abcde"]
        assert run(Scheduler(2), streams, 2) == [list("abcde")] * 2

    def test_one_group_takes_all_that_are_ready(self) -> None:
        streams = [speculating(name) for name in "abc"]
        assert run(Scheduler(1), streams, 2) == [list("abc")] * 2

    @pytest.mark.parametrize(("running", "size"), [(1, 1), (2, 1), (3, 2), (4, 2), (5, 3), (8, 4)])
    def test_a_step_takes_half_of_the_speculating_requests_rounded_up(
        self, running: int, size: int
    ) -> None:
        streams = [speculating(str(index)) for index in range(running)]
        assert len(Scheduler(2).next_batch(streams, now=0.0)) == size

    def test_two_halves_take_turns(self) -> None:
        streams = [speculating(name) for name in "abcd"]
        assert run(Scheduler(2), streams, 4) == [["a", "b"], ["c", "d"]] * 2

    @pytest.mark.parametrize("running", range(1, 9))
    def test_nobody_waits_longer_than_a_round(self, running: int) -> None:
        streams = [speculating(str(index)) for index in range(running)]
        batches = run(Scheduler(2), streams, 20)
        for one in names(streams):
            turns = [index for index, batch in enumerate(batches) if one in batch]
            assert turns[0] <= 1
            assert all(later - earlier <= 2 for earlier, later in pairwise(turns))

    def test_those_that_are_ready_do_not_wait_for_a_group_to_fill(self) -> None:
        """Half of four is two, but only one has its drafts."""
        waiting = [speculating(name, drafting=True, due=9.0) for name in "abc"]
        assert names(Scheduler(2).next_batch([*waiting, speculating("d")], now=0.0)) == ["d"]

    def test_a_half_is_counted_from_all_that_decode_not_from_those_that_are_ready(self) -> None:
        waiting = [speculating(name, drafting=True, due=9.0) for name in "ab"]
        ready = [speculating(name) for name in "cd"]
        assert names(Scheduler(2).next_batch([*waiting, *ready], now=0.0)) == ["c", "d"]


class TestDrafts:
    def test_a_request_waits_for_its_drafts_until_they_are_due(self) -> None:
        scheduler, waiting = Scheduler(2), speculating("a", drafting=True, due=5.0)
        assert scheduler.next_batch([waiting], now=4.9) == []
        assert names(scheduler.next_batch([waiting], now=5.0)) == ["a"]

    def test_a_request_whose_drafts_are_there_need_not_wait(self) -> None:
        waiting = speculating("a", drafting=True, due=5.0)
        waiting.sequence.drafts = [1, 2]
        assert names(Scheduler(2).next_batch([waiting], now=0.0)) == ["a"]

    def test_a_request_that_was_answered_with_nothing_goes_on_without(self) -> None:
        waiting = speculating("a", drafting=True, due=5.0)
        waiting.drafting = False
        assert names(Scheduler(2).next_batch([waiting], now=0.0)) == ["a"]
