"""A long steady load on a running server: does anything grow, slow down or drift?

    python -m tests.benchmarks.soak [--minutes 20] [--concurrency 8]

prints a line per minute: requests, tokens per second, time per token, acceptance length, resident
memory of the Router and the workers (on this machine). Written: OUT.json and OUT.png. Status 1 if a
request failed, or if the last quarter's memory is more than 3 % above the second quarter's.
"""

from __future__ import annotations

import asyncio
import itertools
import json
import statistics
import time
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Annotated

import httpx
import typer
from rich.console import Console
from rich.table import Table

from tests.benchmarks.prompts import PROMPTS
from tests.benchmarks.report import Figure, write
from tests.serve.application import resident_bytes

GROWTH = 1.03
console = Console()


@dataclass
class Window:
    """What happened in one minute."""

    requests: int = 0
    failed: int = 0
    tokens: int = 0
    per_token_s: list[float] = field(default_factory=list)
    acceptance_length: float = 0.0
    resident_mib: float = 0.0


class Soak:
    """Requests that follow each other at a constant concurrency, counted by the minute."""

    def __init__(self, client: httpx.AsyncClient, max_tokens: int) -> None:
        self.client = client
        self.max_tokens = max_tokens
        self.window = Window()
        self.prompts = itertools.cycle(PROMPTS.values())

    async def repeat(self, ended: asyncio.Event) -> None:
        while not ended.is_set():
            try:
                await self._request(next(self.prompts))
                self.window.requests += 1
            except Exception as error:
                self.window.failed += 1
                console.print(f"failed: {error!r}", style="red")

    async def _request(self, prompt: str) -> None:
        body = {
            "messages": [{"role": "user", "content": prompt}],
            "max_tokens": self.max_tokens,
            "temperature": 0,
            "ignore_eos": True,
            "stream": True,
            "stream_options": {"include_usage": True},
        }
        first = last = 0.0
        async with self.client.stream("POST", "/v1/chat/completions", json=body) as response:
            response.raise_for_status()
            async for line in response.aiter_lines():
                if not line.startswith("data: {"):
                    continue
                chunk = json.loads(line.removeprefix("data: "))
                if chunk["choices"]:
                    last = time.monotonic()
                    first = first or last
                else:
                    tokens = chunk["usage"]["completion_tokens"]
                    self.window.tokens += tokens
                    self.window.per_token_s.append((last - first) / max(1, tokens - 1))


async def soak(base_url: str, minutes: int, concurrency: int, max_tokens: int) -> list[Window]:
    windows = []
    async with httpx.AsyncClient(base_url=base_url, timeout=600) as client:
        load, ended = Soak(client, max_tokens), asyncio.Event()
        tasks = [asyncio.create_task(load.repeat(ended)) for _ in range(concurrency)]
        before = (await client.get("/stats")).json()["speculation"]
        for minute in range(minutes):
            load.window = window = Window()
            await asyncio.sleep(60)
            stats = (await client.get("/stats")).raise_for_status().json()
            after = stats["speculation"]
            steps = after["num_decode_steps"] - before["num_decode_steps"]
            produced = after["num_decode_tokens"] - before["num_decode_tokens"]
            window.acceptance_length = produced / max(1, steps)
            window.resident_mib = resident_bytes(stats) / 2**20
            before = after
            windows.append(window)
            console.print(
                f"minute {minute + 1}: {window.requests} requests, {window.tokens / 60:.0f} tok/s, "
                f"{window.resident_mib:.0f} MiB"
            )
        ended.set()
        await asyncio.gather(*tasks)
    return windows


def main(
    base_url: Annotated[str, typer.Option()] = "http://127.0.0.1:8000",
    minutes: Annotated[int, typer.Option(min=4)] = 20,
    concurrency: Annotated[int, typer.Option(min=1)] = 8,
    max_tokens: Annotated[int, typer.Option(min=2)] = 128,
    out: Annotated[Path, typer.Option(help="Prefix of the files written")] = Path("build/soak"),
) -> None:
    """Load the server and watch it."""
    windows = asyncio.run(soak(base_url, minutes, concurrency, max_tokens))
    table = Table()
    for name in ("minute", "requests", "tok/s", "ms per token", "tokens per step", "MiB"):
        table.add_column(name, justify="right")
    for minute, window in enumerate(windows, 1):
        table.add_row(
            str(minute),
            str(window.requests),
            f"{window.tokens / 60:.1f}",
            f"{1e3 * statistics.median(window.per_token_s or [0]):.1f}",
            f"{window.acceptance_length:.2f}",
            f"{window.resident_mib:.0f}",
        )
    console.print(table)
    write(out, list(map(asdict, windows)), plot(windows))
    quarter = len(windows) // 4
    early = statistics.median(w.resident_mib for w in windows[quarter : 2 * quarter])
    late = statistics.median(w.resident_mib for w in windows[-quarter:])
    failed = sum(window.failed for window in windows)
    console.print(f"{failed} requests failed; resident memory {early:.0f} -> {late:.0f} MiB")
    raise typer.Exit(int(failed > 0 or late > GROWTH * early))


def plot(windows: list[Window]) -> Figure:
    panels = {
        "output tokens per second": [window.tokens / 60 for window in windows],
        "ms per token": [1e3 * statistics.median(w.per_token_s or [0]) for w in windows],
        "resident MiB": [window.resident_mib for window in windows],
    }
    figure = Figure(figsize=(6, 7))
    for axis, (label, values) in zip(
        figure.subplots(len(panels), sharex=True), panels.items(), strict=True
    ):
        axis.plot(range(1, len(windows) + 1), values)
        axis.set(xlabel="minute", ylabel=label, ylim=(0, None))
    return figure


if __name__ == "__main__":
    typer.run(main)
