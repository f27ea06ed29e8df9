"""How many drafts to verify per step (K): as many as bring the most tokens per second.

Expected tokens of a step with k drafts: 1 + p1 + p1 p2 + ... + p1...pk, where p_i is how often
draft i is accepted once the ones before it are (running means over the requests of one Verifier).
What a step costs is measured: once when the replicas are connected, and then with every step.
K = 0, plain decoding, is one of the choices; so that a drafter whose drafts get better is noticed,
whole blocks are tried again now and then.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence

from deployments.metrics.step_costs import StepCosts
from dflash_core.shapes import bucket

PRIOR = 0.7  # acceptance before anything is known: good enough to be tried
SLOWEST_MEAN = 0.02  # weight of the newest observation, in the long run
COST_WEIGHT = 0.05
OUTLIER = 3.0  # a step that took so many times longer than usual says nothing of the next one
MARGIN = 1.03  # another K must be so much better: estimates are noisy, and changing is not free
TRIAL_BLOCKS = 16  # of all requests together
TRIAL_SHARE = 0.02  # of the time


class DraftLength:
    """The choice for one Verifier. Used by its thread alone.

    Args:
        block_lengths: of verify steps, ascending from 1; one draft less is a K.
        costs: measured when the replicas were connected.
        groups: that running requests are split into while they speculate.
        clock: seconds.

    Attributes:
        num_drafts: the K of the last choice.
    """

    def __init__(
        self,
        block_lengths: Sequence[int],
        costs: StepCosts,
        groups: int,
        *,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self.choices = [length - 1 for length in block_lengths]
        self.groups = groups
        self._clock = clock
        self._verify = {length: dict(costs.verify[length]) for length in block_lengths}
        self._draft = dict(costs.draft)
        self._acceptance = [PRIOR] * max(self.choices)
        self._observed = [0] * max(self.choices)
        self.num_drafts = max(self.choices)
        self._trial_steps = 0
        self._next_trial = 0.0

    def choose(self, running: int) -> int:
        """K for the next step.

        Args:
            running: requests that decode on the Verifier, at least one.
        """
        speeds = {k: self._tokens_per_second(k, running) for k in self.choices}
        best = max(speeds, key=speeds.__getitem__)
        if speeds[best] < MARGIN * speeds[self.num_drafts]:
            best = self.num_drafts
        longest = self.choices[-1]
        if best != longest and self._is_trial(running):
            return longest
        self.num_drafts = best
        return best

    def _is_trial(self, running: int) -> bool:
        if self._trial_steps:
            self._trial_steps -= 1
            return True
        now = self._clock()
        if now < self._next_trial:
            return False
        steps = -(-TRIAL_BLOCKS // running)
        self._trial_steps = steps - 1
        self._next_trial = now + steps * self._seconds(self.choices[-1], running) / TRIAL_SHARE
        return True

    def observe_acceptance(self, proposed: int, accepted: int) -> None:
        """What became of the drafts of one request in one step."""
        for i in range(min(accepted + 1, proposed)):
            self._observed[i] += 1
            weight = max(SLOWEST_MEAN, 1 / (self._observed[i] + 1))
            self._acceptance[i] += weight * ((i < accepted) - self._acceptance[i])

    def observe_verify(self, requests: int, length: int, seconds: float) -> None:
        """How long a verify step took."""
        _observe(self._verify[length], requests, seconds)

    def observe_draft(self, requests: int, seconds: float) -> None:
        """How long the drafter took."""
        _observe(self._draft, requests, seconds)

    def expected_tokens(self, num_drafts: int) -> float:
        """Of a step of one request."""
        expected = still_right = 1.0
        for acceptance in self._acceptance[:num_drafts]:
            still_right *= acceptance
            expected += still_right
        return expected

    def _tokens_per_second(self, num_drafts: int, running: int) -> float:
        return running * self.expected_tokens(num_drafts) / self._seconds(num_drafts, running)

    def _seconds(self, num_drafts: int, running: int) -> float:
        """Until every request has had a step."""
        verify = self._verify[num_drafts + 1]
        if num_drafts == 0:
            return _cost(verify, running)
        groups = min(self.groups, running)
        group = -(-running // groups)
        step = _cost(verify, group)
        # Either the Verifier is never idle, or every group waits for its own drafts.
        return max(groups * step, step + _cost(self._draft, group))


def _cost(seconds: dict[int, float], requests: int) -> float:
    sizes = tuple(seconds)
    return seconds[bucket(sizes, min(requests, sizes[-1]))]


def _observe(seconds: dict[int, float], requests: int, observed: float) -> None:
    sizes = tuple(seconds)
    size = bucket(sizes, min(requests, sizes[-1]))
    known = seconds[size]
    seconds[size] += COST_WEIGHT * (min(observed, OUTLIER * known) - known)
