"""What processes that die, hang or answer nonsense cost: time, and never a token or a request."""

from __future__ import annotations

import asyncio
import json
import os
import signal
import time
from collections.abc import Callable, Iterator
from typing import Any

import httpx
import pytest
import ray

from deployments.replicas import SERVE_NAMESPACE
from tests.serve.application import Application, application, idle
from tests.serve.tiny_pair import Tiny, prompt_of

MAX_TOKENS = 300
RECOVERY_S = 90
PROMPTS = [prompt_of(n) for n in range(5, 13)]
SEEDED = {"temperature": 1.0, "seed": 7, "max_tokens": 100}


@pytest.fixture(scope="module")
def app(http_port: int, tiny: Tiny) -> Iterator[Application]:
    with application("faults", http_port, tiny.args(draft_timeout_s=0.5)) as app:
        yield app


@pytest.fixture(autouse=True)
def whole(app: Application) -> None:
    """Every test begins with an application that has all its parts and nothing to do."""
    wait_for_speculation(app)
    app.wait_until(idle, 30)


def wait_for_speculation(app: Application) -> dict[str, Any]:
    def speculating(stats: dict[str, Any]) -> bool:
        verifiers = stats["verifiers"].values()
        return bool(verifiers) and all(part["drafter"] in stats["drafters"] for part in verifiers)

    return app.wait_until(speculating, RECOVERY_S)


def worker_pids(stats: dict[str, Any], group: str) -> list[int]:
    return [pid for part in stats[group].values() for pid in part["replica"]["worker_pids"]]


def worker_pid(app: Application, group: str) -> int:
    [pid] = worker_pids(app.stats(), group)
    return pid


def replica(app: Application, group: str) -> dict[str, Any]:
    [part] = app.stats()[group].values()
    return part["replica"]


def undisturbed(tiny: Tiny) -> list[list[int]]:
    return [tiny.continuation(prompt, MAX_TOKENS) for prompt in PROMPTS]


def outputs_while(app: Application, disturb: Callable[[], None], **options: Any) -> list[list[int]]:
    """The token ids of all prompts, streamed at once; `disturb` is called when each stream that
    has a slot has brought something, and none is through."""
    body = {"max_tokens": MAX_TOKENS, "ignore_eos": True, "stream": True, "return_token_ids": True}
    body |= {"temperature": 0} | options

    async def run() -> list[list[int]]:
        first = asyncio.Semaphore(0)
        async with httpx.AsyncClient(base_url=app.base_url, timeout=300) as client:

            async def one(prompt: list[int]) -> list[int]:
                ids: list[int] = []
                request = client.stream("POST", "/v1/completions", json=body | {"prompt": prompt})
                async with request as response:
                    assert response.status_code == 200
                    async for line in response.aiter_lines():
                        if not line.startswith("data: {"):
                            continue
                        chunk = json.loads(line.removeprefix("data: "))
                        assert "error" not in chunk, chunk
                        if not ids:
                            first.release()
                        ids += chunk["choices"][0]["token_ids"]
                return ids

            streams = asyncio.gather(*map(one, PROMPTS))
            for _ in range(4):  # as many as there are slots
                await first.acquire()
            assert not streams.done()
            await asyncio.to_thread(disturb)
            return await streams

    return asyncio.run(run())


def test_a_drafter_that_dies_costs_speed_only(app: Application, tiny: Tiny) -> None:
    pid = worker_pid(app, "drafters")
    outputs = outputs_while(app, lambda: os.kill(pid, signal.SIGKILL))
    assert outputs == undisturbed(tiny)
    assert app.http.get("/health").status_code == 200
    wait_for_speculation(app)
    assert worker_pid(app, "drafters") != pid
    before = app.stats()["speculation"]["num_draft_tokens"]
    app.completion(prompt_of(9), max_tokens=20, ignore_eos=True)
    assert app.stats()["speculation"]["num_draft_tokens"] > before


def test_a_drafter_that_hangs_is_not_waited_for(app: Application, tiny: Tiny) -> None:
    pid = worker_pid(app, "drafters")
    try:
        outputs = outputs_while(app, lambda: os.kill(pid, signal.SIGSTOP))
    finally:
        os.kill(pid, signal.SIGCONT)
    assert outputs == undisturbed(tiny)


@pytest.mark.parametrize("sampling", [{}, SEEDED], ids=["greedy", "seeded"])
def test_requests_outlive_the_worker_of_their_verifier(
    app: Application, tiny: Tiny, sampling: dict[str, Any]
) -> None:
    expected = undisturbed(tiny)
    if sampling:
        expected = outputs_while(app, lambda: None, **sampling)
    pid = worker_pid(app, "verifiers")
    outputs = outputs_while(app, lambda: os.kill(pid, signal.SIGKILL), **sampling)
    assert outputs == expected
    assert worker_pid(app, "verifiers") != pid


def test_requests_outlive_the_replica_of_their_verifier(app: Application, tiny: Tiny) -> None:
    pid = replica(app, "verifiers")["pid"]
    outputs = outputs_while(app, lambda: os.kill(pid, signal.SIGKILL))
    assert outputs == undisturbed(tiny)
    assert replica(app, "verifiers")["pid"] != pid


def test_usage_counts_no_token_twice_after_a_loss(app: Application, tiny: Tiny) -> None:
    pid = worker_pid(app, "verifiers")
    stream = app.stream(
        prompt_of(9),
        max_tokens=MAX_TOKENS,
        ignore_eos=True,
        stream_options={"include_usage": True},
        stop=["never said, this"],
    )
    next(stream)
    os.kill(pid, signal.SIGKILL)
    *_, last, usage = stream
    assert last["choices"][0]["finish_reason"] == "length"
    assert usage["usage"]["completion_tokens"] == MAX_TOKENS
    assert usage["usage"]["prompt_tokens"] == 9
    # The prompt's step gives one token, and so does the one after the loss.
    assert last["metrics"]["num_decode_tokens"] == MAX_TOKENS - 2


def test_a_router_that_dies_leaves_no_slot_taken(app: Application) -> None:
    router = app.stats()["router_pid"]
    stream = app.stream(prompt_of(9), max_tokens=400, ignore_eos=True)
    next(stream)
    os.kill(router, signal.SIGKILL)
    with pytest.raises(httpx.HTTPError):
        list(stream)
    deadline = time.monotonic() + RECOVERY_S
    while True:
        try:
            if app.http.get("/health").status_code == 200:
                break
        except httpx.HTTPError:
            pass
        assert time.monotonic() < deadline
        time.sleep(0.1)
    assert app.stats()["router_pid"] != router
    app.wait_until(idle, 30)


def test_serve_replaces_replicas_after_its_controller_has_died(
    app: Application, tiny: Tiny
) -> None:
    """The controller, when it comes back, must not take the workers for replicas."""
    controller = ray.get_actor("SERVE_CONTROLLER_ACTOR", namespace=SERVE_NAMESPACE)
    ray.kill(controller, no_restart=False)
    before = replica(app, "drafters")["replica_id"]
    os.kill(worker_pid(app, "drafters"), signal.SIGKILL)

    def replaced(stats: dict[str, Any]) -> bool:
        return bool(stats["drafters"]) and before not in stats["drafters"]

    app.wait_until(replaced, RECOVERY_S)
    wait_for_speculation(app)
    assert app.token_ids(prompt_of(9), max_tokens=20) == tiny.continuation(prompt_of(9), 20)


def test_questions_that_are_not_waited_for_break_nothing(app: Application, tiny: Tiny) -> None:
    """Clients that ask for /stats and leave at once, while replicas come and go."""
    pid = worker_pid(app, "drafters")
    os.kill(pid, signal.SIGKILL)
    impatient = httpx.Timeout(30, read=0.001)
    deadline = time.monotonic() + RECOVERY_S
    while pid in (stats_pids := worker_pids(app.stats(), "drafters")) or not stats_pids:
        assert time.monotonic() < deadline
        for _ in range(5):
            with pytest.raises(httpx.TimeoutException):
                httpx.get(f"{app.base_url}/stats", timeout=impatient)
    wait_for_speculation(app)
    assert app.token_ids(prompt_of(9), max_tokens=20) == tiny.continuation(prompt_of(9), 20)


def test_nonsense_from_a_drafter_is_a_fault_and_has_it_replaced(http_port: int, tiny: Tiny) -> None:
    args = tiny.args(runner="tests.drafters:NonsenseDrafter")
    with application("nonsense", http_port, args) as app:
        first = replica(app, "drafters")["replica_id"]
        answers = app.many_token_ids(PROMPTS, concurrency=4, max_tokens=40)
        assert answers == [tiny.continuation(prompt, 40) for prompt in PROMPTS]
        assert app.stats()["speculation"]["num_accepted_tokens"] == 0

        def replaced(stats: dict[str, Any]) -> bool:
            return bool(stats["drafters"]) and first not in stats["drafters"]

        app.wait_until(replaced, RECOVERY_S)
