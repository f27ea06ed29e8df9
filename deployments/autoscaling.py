"""How many replicas of the two models: Verifiers by demand for slots, Drafters in proportion.

Named in a `serve run` file as the application's `autoscaling_policy`; each deployment that is to
scale has an `autoscaling_config` with its bounds and delays, which Ray Serve applies around this.
"""

from __future__ import annotations

import math

from ray.serve.config import AutoscalingContext

Contexts = dict  # DeploymentID (of Ray Serve) -> AutoscalingContext; the id is not public
Decisions = dict  # DeploymentID -> int


class PairPolicy:
    """An application-level policy.

    A request holds a lease on its Verifier, or waits for one there, for as long as it lives: what
    Serve counts as a Verifier's ongoing requests is its slot use and its queue. Drafters serve no
    requests that Serve could count.

    Args:
        verifiers_per_drafter: that share a Drafter; not more than the application's own.

    Raises:
        ValueError: less than one.
    """

    def __init__(self, verifiers_per_drafter: int = 1) -> None:
        if verifiers_per_drafter < 1:
            raise ValueError(f"verifiers_per_drafter = {verifiers_per_drafter} must be at least 1")
        self.verifiers_per_drafter = verifiers_per_drafter

    def __call__(self, contexts: Contexts) -> tuple[Decisions, dict]:
        """The wanted number of replicas of the deployments that scale; Serve bounds it."""
        by_name = {context.deployment_name: context for context in contexts.values()}
        decisions = {}
        if (verifier := by_name.get("Verifier")) is not None:
            wanted = _verifiers(verifier)
            decisions[verifier.deployment_id] = wanted
            if (drafter := by_name.get("Drafter")) is not None:
                drafters = math.ceil(wanted / self.verifiers_per_drafter)
                decisions[drafter.deployment_id] = drafters
        return decisions, {}


def _verifiers(context: AutoscalingContext) -> int:
    wanted = math.ceil(context.total_num_requests / context.config.get_target_ongoing_requests())
    lowest, highest = context.capacity_adjusted_min_replicas, context.capacity_adjusted_max_replicas
    return min(max(wanted, lowest), highest)
