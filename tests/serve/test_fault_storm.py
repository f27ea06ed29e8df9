"""Many faults and bad clients at once, under load: nobody else's request fails or changes.

A short form runs with all tests; `make test-faults` runs the whole of it and prints how long
everything took to recover.
"""

from __future__ import annotations

import os
import random
import signal
import statistics
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import httpx
import pytest

from tests.serve.application import Application, application, idle, resident_bytes
from tests.serve.load import Load
from tests.serve.tiny_pair import MAX_MODEL_LEN, Tiny, prompt_of

STREAMS = 16
MAX_TOKENS = 160
RECOVERY_S = 90


@pytest.fixture(scope="module")
def full(request: pytest.FixtureRequest) -> bool:
    return request.config.getoption("--full-faults")


@pytest.fixture(scope="module")
def app(http_port: int, tiny: Tiny) -> Iterator[Application]:
    args = tiny.args(draft_timeout_s=0.5) | {"max_num_seqs": STREAMS}
    with application("storm", http_port, args) as app:
        yield app


@pytest.fixture(scope="module")
def expected(tiny: Tiny) -> dict[int, list[int]]:
    """Prompt length to what the target alone says."""
    return {n: tiny.continuation(prompt_of(n), MAX_TOKENS) for n in range(5, 5 + STREAMS)}


def workers(stats: dict[str, Any], group: str) -> list[int]:
    """Process ids of the workers that are connected."""
    parts = stats[group].values()
    if group == "drafters":
        used = {part["drafter"] for part in stats["verifiers"].values()}
        parts = [part for id_, part in stats[group].items() if id_ in used]
    return [pid for part in parts for pid in part.get("replica", {}).get("worker_pids", [])]


def kill_one(app: Application, group: str, moment: float) -> float:
    """Kill a worker of the group after `moment` seconds; seconds until another is in use."""
    [pid] = workers(app.wait_until(lambda stats: workers(stats, group), RECOVERY_S), group)
    time.sleep(moment)
    os.kill(pid, signal.SIGKILL)
    began = time.monotonic()
    app.wait_until(lambda stats: workers(stats, group) not in ([], [pid]), RECOVERY_S)
    return time.monotonic() - began


def test_workers_that_are_killed_at_random_moments(
    app: Application, expected: dict[int, list[int]], full: bool, capsys: pytest.CaptureFixture
) -> None:
    kills = ["drafters"] * (20 if full else 2) + ["verifiers"] * (5 if full else 1)
    chance = random.Random(0)
    chance.shuffle(kills)
    recoveries: dict[str, list[float]] = {"drafters": [], "verifiers": []}
    with Load(app, expected) as load:
        for group in kills:
            recoveries[group].append(kill_one(app, group, chance.uniform(0.2, 2.0)))
    assert load.wrong == []
    assert load.finished >= STREAMS
    app.wait_until(idle, 30)
    with capsys.disabled():
        for group, seconds in recoveries.items():
            print(
                f"\n{len(seconds)} {group} killed, {load.finished} streams whole; replaced after "
                f"{statistics.median(seconds):.1f} s (median), {max(seconds):.1f} s (longest)"
            )


MALFORMED = [
    b"{",
    b"[]",
    b'{"prompt": "x", "max_tokens": -1}',
    b'{"prompt": {"a": 1}}',
    b'{"prompt": "x", "temperature": "hot"}',
    b'{"prompt": [99999999]}',
    b'{"prompt": "x", "stop": [""]}',
    b'{"prompt": "\\ud800"}',
    b'{"prompt": "x", "n": 0}',
    b'{"prompt": "x", "logit_bias": {"a": 1}}',
]


def malformed(app: Application, turn: int) -> None:
    headers = {"Content-Type": "application/json"}
    content = MALFORMED[turn % len(MALFORMED)]
    answer = httpx.post(
        f"{app.base_url}/v1/completions", content=content, headers=headers, timeout=120
    )
    assert answer.status_code == 400, answer.text
    assert answer.json()["error"]["type"] == "invalid_request_error"


def too_long(app: Application, turn: int) -> None:
    prompt = [5] * MAX_MODEL_LEN if turn % 2 else "a" * 10_000_000
    answer = httpx.post(f"{app.base_url}/v1/completions", json={"prompt": prompt}, timeout=120)
    assert answer.status_code == (400 if turn % 2 else 413), answer.text


def disconnecting(app: Application, turn: int) -> None:
    """Leaves after a random number of bytes, or before the first."""
    body = {"prompt": prompt_of(9), "max_tokens": 400, "ignore_eos": True, "stream": True}
    url = f"{app.base_url}/v1/completions"
    chunks = random.Random(turn).choice((0, 1, 2, 5, 20))
    with httpx.stream("POST", url, json=body, timeout=120) as response:
        for _, _ in zip(range(chunks), response.iter_raw(), strict=False):
            pass


def slow(app: Application, turn: int) -> None:
    """Reads a stream of 100 tokens a few bytes at a time."""
    body = {"prompt": prompt_of(9), "max_tokens": 100, "ignore_eos": True, "stream": True}
    url = f"{app.base_url}/v1/completions"
    with httpx.stream("POST", url, json=body, timeout=120) as response:
        for turn, _ in enumerate(response.iter_raw(chunk_size=64)):
            if turn < 20:
                time.sleep(0.05)  # this is what it does, not a wait for anything


def test_bad_clients_harm_nobody(
    app: Application, expected: dict[int, list[int]], full: bool, capsys: pytest.CaptureFixture
) -> None:
    share = 1 if full else 8
    turns = (
        [(disconnecting, i) for i in range(200 // share)]
        + [(malformed, i) for i in range(200 // share)]
        + [(too_long, i) for i in range(50 // share)]
        + [(slow, i) for i in range(24 // share)]
    )
    sizes = []
    for seed in range(2):  # the first time is for everything that is allocated once
        random.Random(seed).shuffle(turns)
        few = dict(list(expected.items())[:4])
        with Load(app, few) as load, ThreadPoolExecutor(8) as pool:
            for done in [pool.submit(work, app, turn) for work, turn in turns]:
                done.result()
        assert load.wrong == []
        assert load.finished >= 4
        sizes.append(resident_bytes(app.wait_until(idle, 30)))
    with capsys.disabled():
        print(f"\n{len(turns)} bad clients twice: resident {sizes[0] >> 20}, {sizes[1] >> 20} MiB")
    assert sizes[1] < 1.05 * sizes[0] + (32 << 20)
