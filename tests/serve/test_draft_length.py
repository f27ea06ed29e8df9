"""The number of drafts per step follows what is fastest, and comes back when drafts get better."""

from __future__ import annotations

import random

import pytest

from deployments.draft_length import DraftLength
from deployments.metrics.step_costs import StepCosts

LENGTHS = (1, 4, 8)
CHEAP = StepCosts(  # a block costs what a token costs, as on a memory-bound device
    verify={1: {1: 10.0, 8: 12.0}, 4: {1: 10.2, 8: 13.0}, 8: {1: 10.5, 8: 14.0}},
    draft={1: 3.0, 8: 4.0},
)
DEAR = StepCosts(  # many rows are bound by compute
    verify={1: {1: 10.0, 8: 12.0}, 4: {1: 10.5, 8: 30.0}, 8: {1: 11.0, 8: 60.0}},
    draft={1: 3.0, 8: 6.0},
)


class Server:
    """Steps of a Verifier with given costs and acceptance, in simulated seconds."""

    def __init__(self, costs: StepCosts, *, believed: StepCosts | None = None, groups: int = 1):
        self.now = 0.0
        self.costs = costs
        self.chance = random.Random(0)
        self.length = DraftLength(LENGTHS, believed or costs, groups)
        self.chosen: list[int] = []
        self.tokens = 0

    def run(self, steps: int, *, acceptance: float, running: int = 1) -> list[int]:
        """The choices of so many steps."""
        size = 1 if running == 1 else 8
        for _ in range(steps):
            k = self.length.choose(running)
            self.chosen.append(k)
            seconds = self.costs.verify[k + 1][size] * 1e-3
            self.length.observe_verify(running, k + 1, seconds * self.chance.uniform(0.9, 1.1))
            for _ in range(running):
                accepted = 0
                while accepted < k and self.chance.random() < acceptance:
                    accepted += 1
                self.length.observe_acceptance(k, accepted)
                self.tokens += accepted + 1
            if k:
                draft = self.costs.draft[size] * 1e-3
                self.length.observe_draft(running, draft)
                seconds += draft
            self.now += seconds
        return self.chosen[-steps:]

    def tokens_per_second(self) -> float:
        return self.tokens / self.now


def in_seconds(costs: StepCosts) -> StepCosts:
    return StepCosts(
        verify={
            length: {size: value * 1e-3 for size, value in row.items()}
            for length, row in costs.verify.items()
        },
        draft={size: value * 1e-3 for size, value in costs.draft.items()},
    )


def server(costs: StepCosts, believed: StepCosts | None = None) -> Server:
    return Server(costs, believed=in_seconds(believed or costs))


def share(chosen: list[int], k: int) -> float:
    return chosen.count(k) / len(chosen)


def test_good_drafts_are_all_verified() -> None:
    assert share(server(CHEAP).run(300, acceptance=0.8), 7) == 1.0


def test_useless_drafts_are_given_up_and_tried_rarely() -> None:
    measured = server(CHEAP)
    measured.run(100, acceptance=0.02)
    assert share(measured.run(2000, acceptance=0.02), 0) > 0.95


@pytest.mark.parametrize("running", [1, 8])
def test_useless_drafts_cost_little_from_the_beginning_on(running: int) -> None:
    measured, plain = server(DEAR), server(DEAR)
    plain.length.choose = lambda _: 0
    for each in (measured, plain):
        each.run(1000, acceptance=0.0, running=running)
    assert measured.tokens_per_second() > 0.97 * plain.tokens_per_second()


def test_drafts_that_get_better_are_noticed() -> None:
    measured = server(CHEAP)
    measured.run(2000, acceptance=0.02)
    measured.run(3000, acceptance=0.8)
    assert share(measured.run(300, acceptance=0.8), 7) == 1.0


def test_where_rows_are_dear_fewer_drafts_are_verified() -> None:
    one, many = server(DEAR), server(DEAR)
    assert share(one.run(400, acceptance=0.6)[100:], 7) > 0.9
    # With so many rows a whole block costs five plain steps and brings two and a half tokens.
    assert share(many.run(400, acceptance=0.6, running=8)[100:], 0) > 0.85


@pytest.mark.parametrize("acceptance", [0.0, 0.2, 0.4, 0.5, 0.6, 0.7, 0.9])
@pytest.mark.parametrize("costs", [CHEAP, DEAR], ids=["cheap", "dear"])
@pytest.mark.parametrize("running", [1, 8])
def test_it_is_nearly_as_fast_as_the_best_fixed_choice(
    acceptance: float, costs: StepCosts, running: int
) -> None:
    fixed = []
    for k in (0, 3, 7):
        other = server(costs)
        other.length.choose = lambda _, k=k: k
        other.run(3000, acceptance=acceptance, running=running)
        fixed.append(other.tokens_per_second())
    measured = server(costs)
    measured.run(3000, acceptance=acceptance, running=running)
    assert measured.tokens_per_second() > 0.95 * max(fixed)


def test_it_does_not_oscillate() -> None:
    measured = server(CHEAP)
    chosen = measured.run(3000, acceptance=0.35)[200:]
    changes = sum(a != b for a, b in zip(chosen, chosen[1:], strict=False))
    assert changes < 0.02 * len(chosen)


def test_wrong_first_measurements_are_corrected() -> None:
    slow_drafter = StepCosts(CHEAP.verify, {1: 30.0, 8: 40.0})
    measured = server(slow_drafter, believed=CHEAP)
    measured.run(300, acceptance=0.5)
    assert share(measured.run(1000, acceptance=0.5), 0) > 0.9


def test_one_step_that_takes_long_changes_nothing() -> None:
    measured = server(CHEAP)
    measured.run(200, acceptance=0.8)
    measured.length.observe_verify(1, 8, 5.0)
    assert measured.length.choose(1) == 7
