"""The policy that scales the two models together."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import pytest
from ray.serve.config import AutoscalingConfig

from deployments.autoscaling import PairPolicy


@dataclass
class Context:
    """What the policy reads of Ray Serve's AutoscalingContext."""

    deployment_name: str
    total_num_requests: float = 0.0
    capacity_adjusted_min_replicas: int = 1
    capacity_adjusted_max_replicas: int = 4
    config: Any = None

    def __post_init__(self) -> None:
        self.config = AutoscalingConfig(target_ongoing_requests=3)

    @property
    def deployment_id(self) -> str:
        return f"{self.deployment_name}-id"


def decide(policy: PairPolicy, *contexts: Context) -> dict[str, int]:
    decisions, state = policy({context.deployment_id: context for context in contexts})
    assert state == {}
    return decisions


@pytest.mark.parametrize(
    ("requests", "verifiers", "drafters"),
    [(0, 1, 1), (3, 1, 1), (3.1, 2, 1), (6, 2, 1), (7, 3, 2), (12, 4, 2), (100, 4, 2)],
)
def test_verifiers_follow_demand_and_drafters_the_verifiers(
    requests: float, verifiers: int, drafters: int
) -> None:
    contexts = Context("Verifier", requests), Context("Drafter")
    decisions = decide(PairPolicy(verifiers_per_drafter=2), *contexts)
    assert decisions == {"Verifier-id": verifiers, "Drafter-id": drafters}


def test_only_what_scales_is_decided() -> None:
    assert decide(PairPolicy(), Context("Verifier", 5)) == {"Verifier-id": 2}
    # Where the Verifiers do not scale, Serve keeps the Drafters as they are.
    assert decide(PairPolicy(), Context("Drafter")) == {}


def test_no_verifier_without_a_drafter() -> None:
    with pytest.raises(ValueError, match="verifiers_per_drafter = 0"):
        PairPolicy(verifiers_per_drafter=0)
