"""Which cores the processes of an application use, how much of them, and who comes first."""

from __future__ import annotations

import os
import re
import time
from collections import defaultdict
from collections.abc import Iterator
from contextlib import suppress
from pathlib import Path
from typing import Any

import psutil
import pytest

from deployments.priority import NICENESS, put_models_first
from tests.serve.application import Application, application, idle
from tests.serve.tiny_pair import Tiny, prompt_of

CORES = sorted(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else []
pinning = pytest.mark.skipif(not CORES, reason="needs a system that can pin threads")


@pytest.fixture(scope="module")
def app(http_port: int, tiny: Tiny) -> Iterator[Application]:
    """The target on the first core, the drafter on the last."""
    args = tiny.args()
    if CORES:
        args["target"] |= {"cpu_cores": str(CORES[0])}
        args["speculation"] |= {"cpu_cores": str(CORES[-1])}
    with application("placement", http_port, args) as app:
        yield app


def worker_pids(stats: dict[str, Any], group: str) -> list[int]:
    return [pid for part in stats[group].values() for pid in part["replica"]["worker_pids"]]


@pinning
def test_models_compute_on_the_cores_they_are_given(app: Application, tiny: Tiny) -> None:
    core_of = {}
    for group, core in (("verifiers", CORES[0]), ("drafters", CORES[-1])):
        core_of |= dict.fromkeys(worker_pids(app.stats(), group), core)
    before = {pid: user_seconds(pid) for pid in core_of}
    assert app.token_ids(prompt_of(20), max_tokens=400) == tiny.continuation(prompt_of(20), 400)
    for pid, core in core_of.items():
        after = user_seconds(pid)
        busiest = max(after, key=lambda thread: after[thread] - before[pid].get(thread, 0.0))
        assert os.sched_getaffinity(busiest) == {core}


def user_seconds(pid: int) -> dict[int, float]:
    """User time of every thread of a process so far."""
    return {thread.id: thread.user_time for thread in psutil.Process(pid).threads()}


def cpu_seconds(pid: int) -> float:
    """User and system time of a process so far (proc(5), fields 14 and 15 of stat)."""
    fields = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
    return (int(fields[11]) + int(fields[12])) / os.sysconf("SC_CLK_TCK")


@pytest.mark.skipif(not Path("/proc/self/stat").exists(), reason="needs Linux's /proc")
def test_idle_workers_leave_the_cores_alone(app: Application) -> None:
    stats = app.wait_until(idle, 5)
    pids = worker_pids(stats, "verifiers") + worker_pids(stats, "drafters")
    before, began = [cpu_seconds(pid) for pid in pids], time.monotonic()
    time.sleep(2.0)  # the time that is measured, not a wait for something
    elapsed = time.monotonic() - began
    shares = [(cpu_seconds(pid) - b) / elapsed for pid, b in zip(pids, before, strict=True)]
    assert max(shares) < 0.1


def test_the_models_come_before_all_else(app: Application) -> None:
    """On few cores whatever runs beside a model's step holds up all its threads."""
    put_models_first()
    stats = app.stats()
    niceness: dict[str, set[int]] = defaultdict(set)
    for process in psutil.Process().children(recursive=True):
        with suppress(psutil.NoSuchProcess):
            name = os.path.basename((process.cmdline() or [process.name()])[0])
            niceness[re.split("[.]", name)[0]].add(process.nice())
    models = worker_pids(stats, "verifiers") + worker_pids(stats, "drafters")
    assert {psutil.Process(pid).nice() for pid in models} == {0}
    for name in ("ray::ProxyActor", "ray::ServeController", "gcs_server"):
        assert niceness[name] == {NICENESS}, niceness
    assert niceness["raylet"] == {0}, "what it starts later would inherit it"
    threads = os.listdir(f"/proc/{stats['router_pid']}/task")
    assert {os.getpriority(os.PRIO_PROCESS, int(each)) for each in threads} == {NICENESS}
