"""The figures of one Router as Ray metrics, for Ray's dashboard and its Prometheus endpoint.

Ray adds the labels application, deployment and replica, and the prefix `ray_`; it does not export
names with colons, so these are `dflash_...`.
"""

from __future__ import annotations

from ray.serve.metrics import Counter, Gauge, Histogram

from deployments.metrics.figures import Counters, Gauges
from deployments.metrics.request_record import HISTOGRAMS, RequestFigures

# name: (label, what it counts)
COUNTERS: dict[str, tuple[str | None, str]] = {
    "dflash_drafts": (None, "Steps with drafts."),
    "dflash_draft_tokens": (None, "Drafts proposed."),
    "dflash_accepted_tokens": (None, "Drafts accepted."),
    "dflash_accepted_tokens_per_pos": ("position", "Drafts accepted, by place in the block."),
    "dflash_decode_steps": (None, "Decode steps."),
    "dflash_decode_tokens": (None, "Tokens of decode steps."),
    "dflash_prompt_tokens": (None, "Prompt tokens."),
    "dflash_generation_tokens": (None, "Generated tokens."),
    "dflash_requests": ("finished_reason", "Requests by how they ended."),
    "dflash_stage_steps": ("stage", "Steps of the models."),
    "dflash_stage_seconds": ("stage", "Time per stage."),
    "dflash_feature_bytes": ("direction", "Hidden states moved."),
}
GAUGES: dict[str, str] = {
    "dflash_requests_running": "Requests that have a slot.",
    "dflash_requests_waiting": "Requests without one.",
    "dflash_slots": "Places in the KV caches of all Verifiers.",
    "dflash_verifiers": "Verifiers at work.",
    "dflash_drafters": "Drafters at work.",
}
EXPORTED_HISTOGRAMS = {
    "dflash_time_to_first_token_seconds": "time_to_first_token_seconds",
    "dflash_inter_token_latency_seconds": "inter_token_latency_seconds",
    "dflash_e2e_request_latency_seconds": "e2e_request_latency_seconds",
}


class RayMetrics:
    """Brings Ray's metrics up to date; call it now and then, from one thread.

    Ray has no way to export a counter that is zero: series begin with their first increment.
    """

    def __init__(self) -> None:
        self._counters = {
            name: Counter(name, description=text, tag_keys=(label,) if label else None)
            for name, (label, text) in COUNTERS.items()
        }
        self._gauges = {name: Gauge(name, description=text) for name, text in GAUGES.items()}
        self._histograms = {
            name: Histogram(
                name, description=HISTOGRAMS[source][1], boundaries=list(HISTOGRAMS[source][0])
            )
            for name, source in EXPORTED_HISTOGRAMS.items()
        }
        self._exported: dict[tuple[str, str], float] = {}

    def update(self, counters: Counters, gauges: Gauges, requests: RequestFigures) -> None:
        """Export these figures.

        Args:
            counters, gauges: sums; what has come since the last call is added to Ray's counters.
            requests: whose histograms' fresh values are taken out.
        """
        for (name, label_value), value in self._values(counters).items():
            done = self._exported.get((name, label_value), 0.0)
            if value > done:
                label = COUNTERS[name][0]
                self._counters[name].inc(value - done, {label: label_value} if label else {})
                self._exported[name, label_value] = value
        for name, value in {
            "dflash_requests_running": gauges.running,
            "dflash_requests_waiting": gauges.waiting,
            "dflash_slots": gauges.slots,
            "dflash_verifiers": gauges.verifiers,
            "dflash_drafters": gauges.drafters,
        }.items():
            self._gauges[name].set(value)
        for name, source in EXPORTED_HISTOGRAMS.items():
            for value in requests.histograms[source].drain():
                self._histograms[name].observe(value)

    def _values(self, counters: Counters) -> dict[tuple[str, str], float]:
        """By name and value of its label ("" without one)."""
        acceptance, requests = counters.acceptance, counters.requests
        values: dict[str, float | dict[str, float]] = {
            "dflash_drafts": acceptance.num_drafts,
            "dflash_draft_tokens": acceptance.num_draft_tokens,
            "dflash_accepted_tokens": acceptance.num_accepted_tokens,
            "dflash_accepted_tokens_per_pos": counters.accepted_per_position(),
            "dflash_decode_steps": acceptance.num_steps,
            "dflash_decode_tokens": acceptance.num_tokens,
            "dflash_prompt_tokens": requests.prompt_tokens,
            "dflash_generation_tokens": requests.generation_tokens,
            "dflash_requests": requests.finished,
            "dflash_stage_steps": counters.stage_steps,
            "dflash_stage_seconds": counters.stage_seconds,
            "dflash_feature_bytes": counters.feature_bytes,
        }
        return {
            (name, label_value): count
            for name, value in values.items()
            for label_value, count in (value if isinstance(value, dict) else {"": value}).items()
        }
