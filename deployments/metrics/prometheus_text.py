"""The figures in Prometheus' text format, under vLLM's names wherever vLLM has one."""

from __future__ import annotations

from collections.abc import Iterator

from prometheus_client import CollectorRegistry, generate_latest
from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, HistogramMetricFamily
from prometheus_client.metrics_core import Metric
from prometheus_client.registry import Collector

from deployments.metrics.figures import Counters, Gauges
from deployments.metrics.request_record import HISTOGRAMS

LABELS = ("model_name", "engine")
ENGINE = "0"  # all replicas together; clients expect the label


class Figures(Collector):
    """One scrape.

    Args:
        counters, gauges: the figures.
        model_name: value of the label that every series has.
        num_drafts: K; 0 leaves the series of speculative decoding out, as vLLM does, so that
            clients do not report an acceptance of zero for a server that does not speculate.
    """

    def __init__(
        self, counters: Counters, gauges: Gauges, *, model_name: str, num_drafts: int
    ) -> None:
        self._counters = counters
        self._gauges = gauges
        # `vllm bench serve` splits a line at its first space.
        self._labels = ("_".join(model_name.split()), ENGINE)
        self._num_drafts = num_drafts

    def collect(self) -> Iterator[Metric]:
        counters, gauges = self._counters, self._gauges
        requests = counters.requests
        yield self._gauge("vllm:num_requests_running", "Requests that have a slot.", gauges.running)
        yield self._gauge("vllm:num_requests_waiting", "Requests without one.", gauges.waiting)
        yield self._gauge(
            "vllm:kv_cache_usage_perc",
            "Slots of the KV caches in use; 1 is all of them.",
            min(1.0, gauges.running / gauges.slots) if gauges.slots else 0.0,
        )
        yield self._counter("vllm:prompt_tokens", "Prompt tokens.", requests.prompt_tokens)
        yield self._counter(
            "vllm:generation_tokens", "Generated tokens.", requests.generation_tokens
        )
        yield self._counter(
            "vllm:request_success",
            "Requests by how they ended.",
            requests.finished,
            "finished_reason",
        )
        yield from self._histograms()
        if self._num_drafts:
            yield from self._speculation()
        yield from self._stages()
        for name in ("verifiers", "drafters", "routers"):
            yield self._gauge(
                f"dflash:{name}", f"{name.capitalize()} at work.", getattr(gauges, name)
            )

    def _speculation(self) -> Iterator[Metric]:
        acceptance = self._counters.acceptance
        prefix = "vllm:spec_decode_num"
        yield self._counter(f"{prefix}_drafts", "Steps with drafts.", acceptance.num_drafts)
        yield self._counter(
            f"{prefix}_draft_tokens", "Drafts proposed.", acceptance.num_draft_tokens
        )
        yield self._counter(
            f"{prefix}_accepted_tokens", "Drafts accepted.", acceptance.num_accepted_tokens
        )
        yield self._counter(
            f"{prefix}_accepted_tokens_per_pos",
            "Drafts accepted, by place in the block.",
            self._counters.accepted_per_position(self._num_drafts),
            "position",
        )

    def _stages(self) -> Iterator[Metric]:
        counters = self._counters
        acceptance = counters.acceptance
        yield self._counter("dflash:decode_steps", "Decode steps.", acceptance.num_steps)
        yield self._counter("dflash:decode_tokens", "Their tokens.", acceptance.num_tokens)
        yield self._counter(
            "dflash:stage_steps",
            "Steps of the models (verify: with those of prompts).",
            counters.stage_steps,
            "stage",
        )
        yield self._counter(
            "dflash:stage_seconds",
            "Time in the models, on the way to them and back, and of requests waiting for slots.",
            counters.stage_seconds,
            "stage",
        )
        yield self._counter(
            "dflash:feature_bytes",
            "Hidden states moved.",
            counters.feature_bytes,
            "direction",
        )

    def _histograms(self) -> Iterator[Metric]:
        for name, (_, documentation) in HISTOGRAMS.items():
            yield self._histogram(name, name, documentation)
        # What vLLM called the same figure before; dashboards still ask for it.
        yield self._histogram(
            "time_per_output_token_seconds",
            "inter_token_latency_seconds",
            "Old name of inter_token_latency_seconds.",
        )

    def _histogram(self, name: str, source: str, documentation: str) -> Metric:
        histogram = self._counters.requests.histograms[source]
        family = HistogramMetricFamily(f"vllm:{name}", documentation, labels=LABELS)
        buckets = [
            ("+Inf" if bound == float("inf") else str(bound), count)
            for bound, count in histogram.cumulated()
        ]
        family.add_metric(self._labels, buckets, histogram.total)
        return family

    def _gauge(self, name: str, documentation: str, value: float) -> Metric:
        family = GaugeMetricFamily(name, documentation, labels=LABELS)
        family.add_metric(self._labels, value)
        return family

    def _counter(
        self, name: str, documentation: str, values: float | dict[str, float], label: str = ""
    ) -> Metric:
        """One series, or with `label` one for each of its values."""
        labels = LABELS + ((label,) if label else ())
        family = CounterMetricFamily(name, documentation, labels=labels)
        for label_value, value in (values if isinstance(values, dict) else {"": values}).items():
            family.add_metric(self._labels + ((label_value,) if label else ()), value)
        return family


def metrics_text(counters: Counters, gauges: Gauges, *, model_name: str, num_drafts: int) -> bytes:
    """The answer to `GET /metrics`, see Figures."""
    registry = CollectorRegistry()
    registry.register(Figures(counters, gauges, model_name=model_name, num_drafts=num_drafts))
    return generate_latest(registry)
