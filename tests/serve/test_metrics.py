"""Metrics: what is counted, how it is written, and that it adds up over all replicas."""

from __future__ import annotations

import asyncio
import contextlib
import json
import logging
import os
import pickle
import re
import signal
import time
from collections import Counter
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import httpx
import pytest
import ray
from prometheus_client.parser import text_string_to_metric_families

from deployments.api.errors import QueueFull
from deployments.metrics import ray_metrics
from deployments.metrics.figures import Counters, Gauges, RollCall, Snapshot
from deployments.metrics.histogram import Histogram
from deployments.metrics.prometheus_text import metrics_text
from deployments.metrics.request_record import RequestFigures, RequestRecord
from deployments.metrics.speculation_check import WINDOW_DRAFTS, SpeculationCheck
from deployments.metrics.step_costs import StepCosts, measure
from deployments.router import Router
from dflash_core.request import GenerationOutput, GenerationRequest
from dflash_core.statistics import AcceptanceStatistics
from tests.serve.application import Application, application, idle
from tests.serve.tiny_pair import K, Tiny, prompt_of

ROOT = Path(__file__).parents[2]
DASHBOARD = ROOT / "cluster" / "grafana-dashboard.json"


# What a request leaves behind.


class Clock:
    def __init__(self) -> None:
        self.now = 100.0

    def __call__(self) -> float:
        return self.now


@pytest.fixture
def log() -> Iterator[list[logging.LogRecord]]:
    """What the application logs; Ray may have turned propagation off."""
    records: list[logging.LogRecord] = []

    class Keep(logging.Handler):
        def emit(self, record: logging.LogRecord) -> None:
            records.append(record)

    handler, logger = Keep(), logging.getLogger("ray.serve")
    level = logger.level
    logger.addHandler(handler)
    logger.setLevel(logging.INFO)
    yield records
    logger.removeHandler(handler)
    logger.setLevel(level)


def run_request(
    figures: RequestFigures, clock: Clock, *, error: BaseException | None = None
) -> None:
    """Arrive, wait 2 s for a slot, first token after 1 s more, two blocks after 0.5 s each."""
    request = GenerationRequest("the-id", [11, 12, 13], max_tokens=9, stop=("secret",))
    statistics = {"num_drafts": 2, "num_accepted_tokens": 4, "acceptance_length": 3.0}
    with RequestRecord(figures, request, clock) as record:
        if isinstance(error, QueueFull):
            raise error
        clock.now += 2.0
        record.admitted()
        clock.now += 1.0
        record.add(GenerationOutput([5], "a"))
        clock.now += 0.5
        record.add(GenerationOutput([6, 7, 8], "bcd"))
        if error is not None:
            raise error
        clock.now += 0.5
        record.add(GenerationOutput([9, 2], "e", "stop", statistics=statistics))


def test_times_and_tokens_of_a_request() -> None:
    figures = RequestFigures()
    run_request(figures, Clock())
    assert (figures.prompt_tokens, figures.generation_tokens) == (3, 6)
    assert figures.finished == {"stop": 1, "length": 0, "abort": 0, "error": 0}
    assert figures.queue_seconds == 2.0
    sums = {
        name: (histogram.count, histogram.total) for name, histogram in figures.histograms.items()
    }
    assert sums == {
        "time_to_first_token_seconds": (1, 3.0),
        "inter_token_latency_seconds": (2, 1.0),
        "request_time_per_output_token_seconds": (1, 0.2),
        "e2e_request_latency_seconds": (1, 4.0),
        "request_queue_time_seconds": (1, 2.0),
        "request_inference_time_seconds": (1, 2.0),
        "request_prefill_time_seconds": (1, 1.0),
        "request_decode_time_seconds": (1, 1.0),
        "request_prompt_tokens": (1, 3),
        "request_generation_tokens": (1, 6),
    }


@pytest.mark.parametrize(
    ("error", "reason"),
    [(asyncio.CancelledError(), "abort"), (GeneratorExit(), "abort"), (OSError(), "error")],
)
def test_a_request_that_does_not_finish_counts_its_tokens_and_how_it_ended(
    error: BaseException, reason: str
) -> None:
    figures = RequestFigures()
    with pytest.raises(type(error)):
        run_request(figures, Clock(), error=error)
    assert figures.finished[reason] == sum(figures.finished.values()) == 1
    assert figures.generation_tokens == 4
    assert figures.histograms["e2e_request_latency_seconds"].count == 0


def test_a_refused_request_is_none_that_ended(log: list[logging.LogRecord]) -> None:
    figures = RequestFigures()
    with pytest.raises(QueueFull):
        run_request(figures, Clock(), error=QueueFull("full"))
    assert figures == RequestFigures()
    assert '"finish_reason": "refused"' in log[-1].getMessage()


def test_every_request_is_one_line_in_the_log_without_its_text(
    log: list[logging.LogRecord],
) -> None:
    run_request(RequestFigures(), Clock())
    [record] = log
    word, _, line = record.getMessage().partition(" ")
    assert word == "request"
    assert json.loads(line) == {
        "id": "the-id",
        "prompt_tokens": 3,
        "output_tokens": 6,
        "finish_reason": "stop",
        "queue_s": 2.0,
        "ttft_s": 3.0,
        "duration_s": 4.0,
        "num_drafts": 2,
        "num_draft_tokens": None,
        "num_accepted_tokens": 4,
        "acceptance_length": 3.0,
    }


def test_a_histogram_counts_a_value_at_its_bound_below_it() -> None:
    histogram = Histogram((1.0, 2.0))
    for value in (0.5, 1.0, 1.5, 7.0):
        histogram.observe(value)
    assert histogram.cumulated() == [(1.0, 2), (2.0, 3), (float("inf"), 4)]
    assert histogram.drain() == [0.5, 1.0, 1.5, 7.0] and histogram.drain() == []
    copy = pickle.loads(pickle.dumps(histogram))
    copy.add(histogram)
    assert (copy.count, copy.total, histogram.count) == (8, 20.0, 4)


def test_what_a_sequence_records_is_in_the_sums_at_once() -> None:
    total = AcceptanceStatistics()
    one, other = AcceptanceStatistics(total=total), AcceptanceStatistics(total=total)
    one.record(proposed=3, accepted=2, emitted=3)
    other.record(proposed=3, accepted=0, emitted=1)
    one.record(proposed=0, accepted=0, emitted=1)
    assert total.as_dict() == {
        "num_drafts": 2,
        "num_draft_tokens": 6,
        "num_accepted_tokens": 2,
        "num_accepted_tokens_per_pos": [1, 1, 0],
        "num_decode_steps": 3,
        "num_decode_tokens": 5,
        "acceptance_rate": 2 / 6,
        "acceptance_length": 2.0,
    }


# Several Routers.


def snapshot(router: str, taken: float, tokens: int, running: int = 1) -> Snapshot:
    counters = Counters(requests=RequestFigures(generation_tokens=tokens))
    return Snapshot(router, taken, counters, Gauges(running=running, slots=8, routers=1))


def test_figures_of_all_routers_add_up_and_slots_are_shared() -> None:
    counters, gauges = RollCall().total([[snapshot("a", 1, 5)], [snapshot("b", 7, 3, 2)]])
    assert counters.requests.generation_tokens == 8
    assert (gauges.running, gauges.slots, gauges.routers) == (3, 8, 2)


def test_a_router_that_is_gone_stays_in_the_counters_whoever_is_asked() -> None:
    a, b, c = RollCall(), RollCall(), RollCall()
    reports = [a.report(snapshot("a", 1, 5)), b.report(snapshot("b", 1, 3))]
    assert a.total(reports)[0].requests.generation_tokens == 8
    # b is gone, c is new and is asked; it learns of b from a.
    reports = [a.report(snapshot("a", 2, 6)), c.report(snapshot("c", 2, 0))]
    counters, gauges = c.total(reports)
    assert (counters.requests.generation_tokens, gauges.routers, gauges.running) == (9, 2, 2)
    # a is gone as well.
    assert c.total([c.report(snapshot("c", 3, 1))])[0].requests.generation_tokens == 10


def test_an_old_report_does_not_replace_a_newer_one() -> None:
    roll_call = RollCall()
    roll_call.total([[snapshot("a", 1, 5)], [snapshot("b", 9, 7)]])
    counters, _ = roll_call.total([[snapshot("a", 2, 5), snapshot("b", 8, 3)]])
    assert counters.requests.generation_tokens == 12


# The text.


def bench_reading(text: str) -> dict[str, Any] | None:
    """What `vllm bench serve` makes of a scrape: it goes by beginnings and ends of lines."""
    sums: Counter[str] = Counter()
    positions: Counter[int] = Counter()
    for line in text.split("\n"):
        if not line.startswith("vllm:spec_decode"):
            continue
        series, value = line.split(" ", 1)
        name = series.split("{")[0]
        if not name.endswith("_total"):
            continue
        short = name.removeprefix("vllm:spec_decode_num_").removesuffix("_total")
        if short == "accepted_tokens_per_pos":
            position = re.search(r'position="(\d+)"', series)
            assert position
            positions[int(position[1])] += int(float(value))
        else:
            sums[short] += int(float(value))
    if not sums:
        return None
    return dict(sums) | {"per_pos": [positions[i] for i in sorted(positions)]}


def series(text: str) -> dict[str, float]:
    """All samples, by name and labels but for those that every one of ours has."""
    samples = {}
    for family in text_string_to_metric_families(text):
        for sample in family.samples:
            labels = {k: v for k, v in sample.labels.items() if k not in ("model_name", "engine")}
            key = sample.name + "".join(f"[{k}={v}]" for k, v in sorted(labels.items()))
            samples[key] = sample.value
    return samples


def counters_of(text: str) -> dict[str, float]:
    """The samples that may never decrease."""
    ends = ("_total", "_bucket", "_count", "_sum")
    return {key: value for key, value in series(text).items() if key.split("[")[0].endswith(ends)}


def written(counters: Counters, num_drafts: int, model_name: str = "m") -> str:
    text = metrics_text(counters, Gauges(), model_name=model_name, num_drafts=num_drafts)
    return text.decode()


def test_speculation_is_zero_before_traffic_in_every_position() -> None:
    assert bench_reading(written(Counters(), num_drafts=3)) == {
        "drafts": 0,
        "draft_tokens": 0,
        "accepted_tokens": 0,
        "per_pos": [0, 0, 0],
    }


def test_a_server_without_speculation_has_no_figures_of_it() -> None:
    text = written(Counters(), num_drafts=0)
    assert bench_reading(text) is None
    assert "vllm:generation_tokens_total" in text


def test_a_model_name_with_spaces_does_not_break_the_lines() -> None:
    counters = Counters()
    counters.acceptance.record(proposed=3, accepted=2, emitted=3)
    reading = bench_reading(written(counters, 3, model_name='My  "fine" model'))
    assert reading is not None and reading["accepted_tokens"] == 2


def test_names_and_types_are_those_of_vllm() -> None:
    families = {
        family.name: family.type
        for family in text_string_to_metric_families(written(Counters(), num_drafts=2))
    }
    ours = {name for name in families if name.startswith("dflash:")}
    assert {name: kind for name, kind in families.items() if name not in ours} == {
        "vllm:num_requests_running": "gauge",
        "vllm:num_requests_waiting": "gauge",
        "vllm:kv_cache_usage_perc": "gauge",
        "vllm:prompt_tokens": "counter",
        "vllm:generation_tokens": "counter",
        "vllm:request_success": "counter",
        "vllm:spec_decode_num_drafts": "counter",
        "vllm:spec_decode_num_draft_tokens": "counter",
        "vllm:spec_decode_num_accepted_tokens": "counter",
        "vllm:spec_decode_num_accepted_tokens_per_pos": "counter",
        "vllm:time_to_first_token_seconds": "histogram",
        "vllm:inter_token_latency_seconds": "histogram",
        "vllm:time_per_output_token_seconds": "histogram",
        "vllm:request_time_per_output_token_seconds": "histogram",
        "vllm:e2e_request_latency_seconds": "histogram",
        "vllm:request_queue_time_seconds": "histogram",
        "vllm:request_inference_time_seconds": "histogram",
        "vllm:request_prefill_time_seconds": "histogram",
        "vllm:request_decode_time_seconds": "histogram",
        "vllm:request_prompt_tokens": "histogram",
        "vllm:request_generation_tokens": "histogram",
    }


# Speculation that does not pay.

COSTS = StepCosts(
    verify={1: {1: 10e-3, 8: 12e-3}, 8: {1: 11e-3, 8: 40e-3}}, draft={1: 4e-3, 8: 5e-3}
)


@pytest.mark.parametrize(
    ("running", "groups", "expected"),
    [
        (1, 2, (11 + 4) / 10),  # one request cannot overlap with anything
        (8, 1, (40 + 5) / 12),
        (8, 2, 2 * 40 / 12),  # two halves, the drafter's time hidden
        (2, 2, 2 * 11 / 12),
        (20, 1, (40 + 5) / 12),  # more than the largest batch size measured
    ],
)
def test_break_even_is_the_time_of_a_round_in_plain_steps(
    running: int, groups: int, expected: float
) -> None:
    assert COSTS.break_even(running, groups) == pytest.approx(expected)


def test_the_cost_of_a_step_is_the_faster_of_two_runs(monkeypatch: pytest.MonkeyPatch) -> None:
    clock = Clock()
    monkeypatch.setattr("deployments.metrics.step_costs.time.monotonic", clock)

    class Graph:
        seconds = iter([5.0, 2.0, 3.0, 4.0])

        def run(self, plan: str, timeout: float) -> None:
            assert plan in ("one", "eight") and timeout > 1
            clock.now += next(self.seconds)

    assert measure(Graph(), {1: "one", 8: "eight"}) == {1: 2.0, 8: 3.0}  # type: ignore[arg-type]


def test_break_even_is_unknown_where_nothing_runs_or_was_measured() -> None:
    assert COSTS.break_even(0, 2) is None
    assert StepCosts(verify={1: {1: 1.0}}).break_even(1, 1) is None


def acceptance(steps: int, accepted: int) -> AcceptanceStatistics:
    statistics = AcceptanceStatistics()
    for _ in range(steps):
        statistics.record(proposed=7, accepted=accepted, emitted=accepted + 1)
    return statistics


@pytest.mark.parametrize(
    ("accepted", "words"),
    [(0, ["almost nothing", "mask_token_id", "target_layer_ids"]), (1, ["slower", "2.50 plain"])],
)
def test_speculation_that_does_not_pay_is_reported_once(
    log: list[logging.LogRecord], accepted: int, words: list[str]
) -> None:
    check = SpeculationCheck({4: 2.5}.get)
    for windows in (1, 2, 3):
        check.observe(acceptance(windows * WINDOW_DRAFTS, accepted), 4)
    [warning] = log
    assert warning.levelno == logging.WARNING
    assert all(word in warning.getMessage() for word in words)


def test_load_is_what_it_was_on_average_while_there_was_any(log: list[logging.LogRecord]) -> None:
    asked: list[int] = []
    check = SpeculationCheck(lambda running: asked.append(running))
    for running in (0, 2, 6, 0):
        check.observe(acceptance(WINDOW_DRAFTS - 1, 3), running)
    check.observe(acceptance(WINDOW_DRAFTS, 3), 0)
    assert asked == [4]


def test_speculation_that_pays_or_has_hardly_begun_is_not_reported(
    log: list[logging.LogRecord],
) -> None:
    check = SpeculationCheck({1: 1.5}.get)
    check.observe(acceptance(WINDOW_DRAFTS - 1, 0), 1)
    check.observe(acceptance(WINDOW_DRAFTS * 3, 1), 1)
    check.observe(acceptance(WINDOW_DRAFTS * 6, 1), 2)
    assert log == []


def test_acceptance_is_judged_by_what_came_last(log: list[logging.LogRecord]) -> None:
    check, statistics = SpeculationCheck({}.get), acceptance(5 * WINDOW_DRAFTS, 3)
    check.observe(statistics, 1)
    statistics.add(acceptance(WINDOW_DRAFTS, 0))
    check.observe(statistics, 1)
    assert len(log) == 1


# The files in cluster/.


def test_the_dashboard_asks_for_nothing_that_is_not_exported() -> None:
    asked = set(re.findall(r"ray_(dflash_\w+)", DASHBOARD.read_text()))
    exported = {f"{name}_total" for name in ray_metrics.COUNTERS} | set(ray_metrics.GAUGES)
    exported |= {
        f"{name}_{part}"
        for name in ray_metrics.EXPORTED_HISTOGRAMS
        for part in ("bucket", "sum", "count")
    }
    assert asked and asked <= exported


# The running application.


def scrape(app: Application) -> str:
    answer = app.http.get("/metrics").raise_for_status()
    assert answer.headers["content-type"].startswith("text/plain; version=0.0.4")
    return answer.text


@pytest.fixture(scope="module")
def app(http_port: int, tiny: Tiny) -> Iterator[Application]:  # noqa: F811
    args = tiny.args() | {"stream_batching_interval_ms": 0}  # an output for every step
    with application("metrics", http_port, args) as app:
        yield app


def test_a_scrape_says_what_stats_and_the_answers_say(app: Application) -> None:
    before = counters_of(scrape(app))
    assert before["vllm:spec_decode_num_drafts_total"] == 0
    assert bench_reading(scrape(app))["per_pos"] == [0] * K
    lengths = [9, 10, 11]
    answers = [app.completion(prompt_of(n), max_tokens=20, ignore_eos=True) for n in lengths]
    stats = app.wait_until(idle, 5)
    text = scrape(app)
    speculation, reading = stats["speculation"], bench_reading(text)
    assert reading == {
        "drafts": speculation["num_drafts"],
        "draft_tokens": speculation["num_draft_tokens"],
        "accepted_tokens": speculation["num_accepted_tokens"],
        "per_pos": speculation["num_accepted_tokens_per_pos"],
    }
    assert reading["drafts"] == sum(answer["metrics"]["num_drafts"] for answer in answers) > 0
    samples = series(text)
    assert samples["vllm:prompt_tokens_total"] == sum(lengths)
    assert samples["vllm:generation_tokens_total"] == 3 * 20
    assert samples["vllm:request_success_total[finished_reason=length]"] == 3
    assert samples["vllm:time_to_first_token_seconds_count"] == 3
    assert samples["vllm:e2e_request_latency_seconds_count"] == 3
    steps = sum(answer["metrics"]["num_decode_steps"] for answer in answers)
    assert samples["vllm:inter_token_latency_seconds_count"] == steps
    assert samples["vllm:num_requests_running"] == samples["vllm:num_requests_waiting"] == 0
    assert samples["vllm:kv_cache_usage_perc"] == 0
    assert samples["dflash:verifiers"] == samples["dflash:drafters"] == 1
    verify = next(iter(stats["verifiers"].values()))["verify"]
    draft = next(iter(stats["drafters"].values()))["draft"]
    assert samples["dflash:feature_bytes_total[direction=from_verifier]"] == verify["feature_bytes"]
    assert samples["dflash:feature_bytes_total[direction=to_drafter]"] == draft["feature_bytes"] > 0
    assert samples["dflash:stage_steps_total[stage=draft]"] == draft["steps"]
    for stage in ("verify", "draft", "transfer", "queue"):
        assert samples[f"dflash:stage_seconds_total[stage={stage}]"] > 0


def test_every_prompt_of_a_batch_is_a_request(app: Application) -> None:
    prompts = [prompt_of(n) for n in (7, 8, 9)]
    single = [app.token_ids(prompt, max_tokens=12, ignore_eos=True) for prompt in prompts]
    app.wait_until(idle, 5)
    name = "vllm:request_success_total[finished_reason=length]"
    before = series(scrape(app))[name]
    body = {"prompt": prompts, "max_tokens": 12, "ignore_eos": True, "temperature": 0}
    answer = app.http.post("/v1/completions", json=body | {"return_token_ids": True}).json()
    choices = sorted(answer["choices"], key=lambda choice: choice["index"])
    assert [choice["token_ids"] for choice in choices] == single
    assert answer["usage"]["completion_tokens"] == 36
    assert series(scrape(app))[name] == before + 3


def test_running_requests_fill_the_cache_and_one_that_leaves_is_aborted(app: Application) -> None:
    app.wait_until(idle, 5)
    before = series(scrape(app))
    stream = app.stream(prompt_of(12), max_tokens=400, ignore_eos=True)
    next(stream)
    during = series(scrape(app))
    assert during["vllm:num_requests_running"] == 1
    assert during["vllm:kv_cache_usage_perc"] == 1 / 4
    stream.close()
    app.wait_until(idle, 5)
    name = "vllm:request_success_total[finished_reason=abort]"
    assert series(scrape(app))[name] == before[name] + 1


def test_the_same_figures_are_on_rays_endpoint(app: Application) -> None:
    app.completion(prompt_of(9), max_tokens=20, ignore_eos=True)
    generated = series(scrape(app))["vllm:generation_tokens_total"]
    [node] = ray.nodes()
    url = f"http://127.0.0.1:{node['MetricsExportPort']}"
    deadline = time.monotonic() + 60
    while True:
        exported = {}
        with contextlib.suppress(httpx.HTTPError):
            for family in text_string_to_metric_families(httpx.get(url).text):
                for sample in family.samples:
                    if sample.labels.get("application") == app.name:
                        exported[sample.name] = sample.value
        if exported.get("ray_dflash_generation_tokens_total") == generated:
            break
        assert time.monotonic() < deadline, exported
        time.sleep(0.5)
    # Everything that the dashboard asks for, except what has not happened.
    asked = set(re.findall(r"ray_dflash_\w+", DASHBOARD.read_text()))
    assert asked - exported.keys() <= {
        "ray_dflash_accepted_tokens_total",
        "ray_dflash_accepted_tokens_per_pos_total",
    }


def test_counters_survive_the_loss_of_both_models(app: Application) -> None:
    app.completion(prompt_of(9), max_tokens=20, ignore_eos=True)
    before = counters_of(scrape(app))
    stats = app.stats()
    pids = {
        pid
        for group in ("verifiers", "drafters")
        for part in stats[group].values()
        for pid in part["replica"]["worker_pids"]
    }
    for pid in pids:
        os.kill(pid, signal.SIGKILL)
    deadline = time.monotonic() + 60
    lost = False
    while not lost or app.http.get("/health").json().get("status") != "ready":
        assert time.monotonic() < deadline
        samples = series(scrape(app))
        lost = lost or samples["dflash:verifiers"] == 0
        after = counters_of(scrape(app))
        assert {key: value for key, value in before.items() if after[key] < value} == {}
        before = after
        time.sleep(0.1)
    app.completion(prompt_of(10), max_tokens=20, ignore_eos=True)
    after = counters_of(scrape(app))
    assert after["vllm:spec_decode_num_drafts_total"] > before["vllm:spec_decode_num_drafts_total"]
    assert bench_reading(scrape(app))["drafts"] == app.stats()["speculation"]["num_drafts"]


def test_a_scrape_of_any_router_shows_all_of_them(
    http_port: int,
    tiny: Tiny,
    monkeypatch: pytest.MonkeyPatch,  # noqa: F811
) -> None:
    monkeypatch.setattr("deployments.app.Router", Router.options(num_replicas=2))
    with application("routers", http_port, tiny.args()) as app:
        stats: dict[int, dict[str, Any]] = {}
        requests, deadline = 0, time.monotonic() + 60
        # Until both Routers have served something.
        while len(stats) < 2 or not all(s["speculation"]["num_drafts"] for s in stats.values()):
            assert time.monotonic() < deadline, stats
            answer = httpx.post(
                f"{app.base_url}/v1/completions",
                json={"prompt": prompt_of(9), "max_tokens": 8, "temperature": 0},
                timeout=60,
            )
            requests += answer.status_code == 200
            found = httpx.get(f"{app.base_url}/stats").json()
            stats[found["router_pid"]] = found
        while len(fresh := routers_stats(app)) < 2:
            assert time.monotonic() < deadline
        for _ in range(6):  # whichever of them answers
            text = httpx.get(f"{app.base_url}/metrics").text
            samples = series(text)
            assert samples["dflash:routers"] == 2
            assert samples["dflash:verifiers"] == 1
            assert samples["vllm:time_to_first_token_seconds_count"] == requests
            assert bench_reading(text)["drafts"] == sum(
                part["speculation"]["num_drafts"] for part in fresh.values()
            )


def routers_stats(app: Application) -> dict[int, dict[str, Any]]:
    """What the Routers that a few requests reach say of themselves."""
    answers = [httpx.get(f"{app.base_url}/stats").json() for _ in range(12)]
    return {answer["router_pid"]: answer for answer in answers}


def test_the_baseline_has_all_figures_but_those_of_speculation(
    http_port: int,
    tiny: Tiny,  # noqa: F811
) -> None:
    args = tiny.args() | {"speculation": None}
    with application("plain", http_port, args) as app:
        app.completion(prompt_of(9), max_tokens=5, ignore_eos=True)
        text = scrape(app)
        assert bench_reading(text) is None
        assert series(text)["vllm:generation_tokens_total"] == 5
        assert series(text)["dflash:drafters"] == 0
