"""How many drafts to verify per step (K): as many as bring the most tokens per second.

Expected tokens of a step with k drafts: 1 + p1 + p1 p2 + ... + p1...pk, where p_i is how often
draft i is accepted once the ones before it are (running means over the requests of one Verifier).
What a step costs is measured: once when the replicas are connected, and then with every step.
K = 0, plain decoding, is one of the choices; so that a drafter whose drafts get better is noticed,
the next larger K is tried now and then.
"""

from __future__ import annotations

from collections.abc import Sequence

from deployments.metrics.step_costs import StepCosts
from dflash_core.shapes import bucket

PRIOR = 0.7  # acceptance before anything is known: good enough to be tried
SLOWEST_MEAN = 0.02  # weight of the newest observation, in the long run
COST_WEIGHT = 0.05
OUTLIER = 3.0  # a step that took so many times longer than usual says nothing of the next one
MARGIN = 1.03  # another K must be so much better: estimates are noisy, and changing is not free
TRIAL_BLOCKS = 16  # of all requests together
TRIAL_SHARE = 0.02  # of the time that the Verifier works: an idle one earns no trial


class DraftLength:
    """The choice for one Verifier. Used by its thread alone.

    Args:
        block_lengths: of verify steps, ascending from 1; one draft less is a K.
        costs: measured when the replicas were connected.
        groups: that running requests are split into while they speculate.

    Attributes:
        num_drafts: the K of the last choice.
    """

    def __init__(
        self,
        block_lengths: Sequence[int],
        costs: StepCosts,
        groups: int,
    ) -> None:
        self.choices = [length - 1 for length in block_lengths]
        self.groups = groups
        self._verify = {length: dict(costs.verify[length]) for length in block_lengths}
        self._draft = dict(costs.draft)
        self._acceptance = [PRIOR] * max(self.choices)
        self._observed = [0] * max(self.choices)
        self.num_drafts = max(self.choices)
        self._worked = 0.0
        self._trial_steps = 0
        self._next_trial = self._trial_seconds(1) / TRIAL_SHARE  # the beginning is one, too

    def choose(self, running: int) -> int:
        """K for the next step.

        Args:
            running: requests that decode on the Verifier, at least one.
        """
        speeds = {k: self._tokens_per_second(k, running) for k in self.choices}
        best = max(speeds, key=speeds.__getitem__)
        if speeds[best] < MARGIN * speeds[self.num_drafts]:
            best = self.num_drafts
        self.num_drafts = best
        if best != self.choices[-1] and self._is_trial(running):
            return self.choices[self.choices.index(best) + 1]
        return best

    def _is_trial(self, running: int) -> bool:
        if self._trial_steps:
            self._trial_steps -= 1
            return True
        if self._worked < self._next_trial:
            return False
        self._trial_steps = _trial_steps(running) - 1
        self._next_trial = self._worked + self._trial_seconds(running) / TRIAL_SHARE
        return True

    def _trial_seconds(self, running: int) -> float:
        return _trial_steps(running) * self._seconds(self.choices[-1], running)

    def observe_acceptance(self, proposed: int, accepted: int) -> None:
        """What became of the drafts of one request in one step."""
        for i in range(min(accepted + 1, proposed)):
            self._observed[i] += 1
            weight = max(SLOWEST_MEAN, 1 / (self._observed[i] + 1))
            self._acceptance[i] += weight * ((i < accepted) - self._acceptance[i])

    def observe_verify(self, requests: int, length: int, seconds: float) -> None:
        """How long a verify step took."""
        self._worked += seconds
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


def _trial_steps(running: int) -> int:
    return -(-TRIAL_BLOCKS // running)


def _cost(seconds: dict[int, float], requests: int) -> float:
    sizes = tuple(seconds)
    return seconds[bucket(sizes, min(requests, sizes[-1]))]


def _observe(seconds: dict[int, float], requests: int, observed: float) -> None:
    sizes = tuple(seconds)
    size = bucket(sizes, min(requests, sizes[-1]))
    known = seconds[size]
    seconds[size] += COST_WEIGHT * (min(observed, OUTLIER * known) - known)
