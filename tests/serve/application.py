"""Applications on the test's Ray cluster, and a client for them."""

from __future__ import annotations

import asyncio
import json
import os
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import httpx
from ray import serve

from deployments.app import build
from deployments.app_args import AppArgs

READY_TIMEOUT_S = 120.0


class Application:
    """A running application: where it is and how to ask it things."""

    def __init__(self, name: str, base_url: str) -> None:
        self.name = name
        self.base_url = base_url
        self.http = httpx.Client(base_url=base_url, timeout=120.0)

    def stats(self) -> dict[str, Any]:
        return self.http.get("/stats").raise_for_status().json()

    def completion(self, prompt: str | list[int], **options: Any) -> dict[str, Any]:
        """A whole completion with the ids of its tokens, greedy."""
        body = {"prompt": prompt, "temperature": 0, "return_token_ids": True} | options
        return self.http.post("/v1/completions", json=body).raise_for_status().json()

    def token_ids(self, prompt: str | list[int], **options: Any) -> list[int]:
        return self.completion(prompt, **options)["choices"][0]["token_ids"]

    def stream(self, prompt: str | list[int], **options: Any) -> Iterator[dict[str, Any]]:
        """The chunks of a streamed completion, as they come."""
        body = {"prompt": prompt, "temperature": 0, "stream": True} | options
        with self.http.stream("POST", "/v1/completions", json=body) as response:
            response.raise_for_status()
            for line in response.iter_lines():
                if line.startswith("data: ") and line != "data: [DONE]":
                    yield json.loads(line.removeprefix("data: "))

    def many_token_ids(
        self, prompts: list[list[int]], *, concurrency: int, **options: Any
    ) -> list[list[int]]:
        """Token ids for all prompts, at most `concurrency` at a time, in order."""
        body = {"temperature": 0, "return_token_ids": True} | options

        async def run() -> list[list[int]]:
            slots = asyncio.Semaphore(concurrency)
            async with httpx.AsyncClient(base_url=self.base_url, timeout=300.0) as client:

                async def one(prompt: list[int]) -> list[int]:
                    async with slots:
                        answer = await client.post(
                            "/v1/completions", json=body | {"prompt": prompt}
                        )
                    return answer.raise_for_status().json()["choices"][0]["token_ids"]

                return await asyncio.gather(*map(one, prompts))

        return asyncio.run(run())

    def wait_until(self, condition: Any, timeout: float) -> dict[str, Any]:
        """Poll /stats until `condition(stats)` holds; returns the stats that satisfied it."""
        deadline = time.monotonic() + timeout
        while not condition(stats := self.stats()):
            assert time.monotonic() < deadline, f"not within {timeout} s: {stats}"
            time.sleep(0.02)
        return stats

    def wait_until_ready(self) -> None:
        deadline = time.monotonic() + READY_TIMEOUT_S
        while (answer := self.http.get("/health")).status_code != 200:
            assert time.monotonic() < deadline, answer.text
            time.sleep(0.1)


@contextmanager
def application(name: str, port: int, args: dict[str, Any]) -> Iterator[Application]:
    """Deploy `args` under its own route on the running cluster; gone afterwards."""
    serve.run(build(AppArgs(**args)), name=name, route_prefix=f"/{name}")
    app = Application(name, f"http://127.0.0.1:{port}/{name}")
    try:
        app.wait_until_ready()
        yield app
    finally:
        app.http.close()
        serve.delete(name)


def resident_bytes(stats: dict[str, Any]) -> int:
    """Of the Router and all workers, on this machine (proc(5), field 2 of statm)."""
    parts = [*stats["verifiers"].values(), *stats["drafters"].values()]
    pids = [stats["router_pid"]]
    for part in parts:
        pids += part["replica"]["worker_pids"]
    pages = [int(Path(f"/proc/{pid}/statm").read_text().split()[1]) for pid in pids]
    return sum(pages) * os.sysconf("SC_PAGESIZE")


def idle(stats: dict[str, Any]) -> bool:
    """No request is running or waiting, and every slot of every Verifier is free."""
    replicas = [verifier["replica"] for verifier in stats["verifiers"].values()]
    return (
        stats["requests"] == {"running": 0, "waiting": 0}
        and all(verifier["running"] == 0 for verifier in stats["verifiers"].values())
        and all(replica["free_slots"] == replica["slots"] for replica in replicas)
    )
