"""What a step costs on an idle replica, and how many tokens it must bring to be worth that."""

from __future__ import annotations

import time
from dataclasses import dataclass, field
from typing import Any

from deployments.graph import ModelGraph
from dflash_core.shapes import bucket

REPEATS = 2
TIMEOUT_S = 120.0

Seconds = dict[int, float]  # by batch size


def measure(graph: ModelGraph, plans: dict[int, Any]) -> Seconds:
    """Round trips of plans that touch nothing but the scratch slot, the faster of two each.

    Args:
        graph: warmed up.
        plans: by batch size.

    Raises:
        WorkerLost
    """
    seconds = {}
    for size, plan in plans.items():
        times = []
        for _ in range(REPEATS):
            began = time.monotonic()
            graph.run(plan, TIMEOUT_S)
            times.append(time.monotonic() - began)
        seconds[size] = min(times)
    return seconds


@dataclass(frozen=True)
class StepCosts:
    """Seconds of a step, with a short context.

    Attributes:
        verify: of the target, by the tokens per request (1, ... K + 1).
        draft: of the drafter.
    """

    verify: dict[int, Seconds] = field(default_factory=dict)
    draft: Seconds = field(default_factory=dict)

    def break_even(self, running: int, groups: int) -> float | None:
        """The acceptance length above which speculation is faster than a plain decode step.

        Optimistic: with two groups in flight, verifying and drafting overlap entirely, though on
        shared cores they do not. None where nothing runs, or something
        has not been measured.

        Args:
            running: requests that decode at once on a Verifier.
            groups: that they are split into.
        """
        if not (running and len(self.verify) > 1 and self.draft):
            return None
        plain, block = self.verify[min(self.verify)], self.verify[max(self.verify)]
        groups = min(groups, running)
        sizes = tuple(plain)
        group = bucket(sizes, min(-(-running // groups), sizes[-1]))
        # The Drafter may serve more Verifiers and then has larger buckets.
        draft_sizes = tuple(self.draft)
        draft = self.draft[bucket(draft_sizes, min(group, draft_sizes[-1]))]
        round_trip = max(groups * block[group], block[group] + draft)
        return round_trip / plain[bucket(sizes, min(running, sizes[-1]))]
