"""Autoscaling under a load profile: how many replicas there were, what waited, what came out.

    python -m tests.benchmarks.autoscaling [--config configs/autoscale.yaml] [--tiny]

deploys the configuration on a Ray cluster of its own, follows the profile, and writes OUT.csv (a
line per second), OUT.json and OUT.png. Status 1 if a request failed. `--tiny` serves a random pair
of a few megabytes instead of the configured one, so that several replicas fit on a small machine.
"""

from __future__ import annotations

import asyncio
import csv
import json
import os
import tempfile
import time
from dataclasses import asdict, dataclass, field, fields
from pathlib import Path
from typing import Annotated, Any

# Once a second: every ten seconds, as is the default, would hide what happens.
os.environ.setdefault("RAY_SERVE_REPLICA_AUTOSCALING_METRIC_PUSH_INTERVAL_S", "1")
os.environ.setdefault("RAY_SERVE_HANDLE_AUTOSCALING_METRIC_PUSH_INTERVAL_S", "1")

import httpx
import typer
import yaml
from ray import serve
from ray.serve.context import _get_global_client
from ray.serve.schema import ServeDeploySchema
from rich.console import Console

from dflash_core.checkpoint import resolve
from tests.benchmarks.cluster import ROOT, cluster
from tests.benchmarks.report import Figure, write
from tests.serve.application import READY_TIMEOUT_S, Application
from tests.tiny import write_drafter, write_target

PROMPT = list(range(200, 232))
console = Console()


@dataclass
class Second:
    """One second of the experiment.

    Attributes:
        second: since its beginning.
        load: streams that were to run.
        verifiers, drafters: replicas that are connected.
        running, waiting: requests with and without a slot.
        tokens_per_s: output of all streams.
        token_s: median seconds between two chunks of a stream, in this second.
        failed: requests that failed so far.
    """

    second: int
    load: int
    verifiers: int = 0
    drafters: int = 0
    running: int = 0
    waiting: int = 0
    tokens_per_s: float = 0.0
    token_s: float = 0.0
    failed: int = 0


@dataclass
class Traffic:
    """As many streams as are wanted, each a request after the other."""

    client: httpx.AsyncClient
    max_tokens: int
    wanted: int = 0
    failed: int = 0
    finished: int = 0
    tokens: int = 0
    gaps: list[float] = field(default_factory=list)

    async def stream(self, index: int, ended: asyncio.Event) -> None:
        while not ended.is_set():
            if index >= self.wanted:
                await asyncio.sleep(0.1)
                continue
            try:
                await self._request()
                self.finished += 1
            except Exception as error:
                self.failed += 1
                console.print(f"failed: {error!r}", style="red")

    async def _request(self) -> None:
        body = {
            "prompt": PROMPT,
            "max_tokens": self.max_tokens,
            "temperature": 0,
            "ignore_eos": True,
            "stream": True,
            "return_token_ids": True,
        }
        last = None
        async with self.client.stream("POST", "/v1/completions", json=body) as response:
            response.raise_for_status()
            async for line in response.aiter_lines():
                if not line.startswith("data: {"):
                    continue
                chunk = json.loads(line.removeprefix("data: "))
                self.tokens += len(chunk["choices"][0]["token_ids"])
                now = time.monotonic()
                if last is not None:
                    self.gaps.append(now - last)
                last = now


def loads(profile: list[dict[str, float]]) -> list[int]:
    """Streams at once, for every second."""
    seconds = []
    for part in profile:
        count = int(part["seconds"])
        for i in range(count):
            share = i / max(1, count - 1)
            seconds.append(round(part["from"] + share * (part["to"] - part["from"])))
    return seconds


async def run(app: Application, profile: list[int], max_tokens: int) -> list[Second]:
    """Follow the profile and record every second of it."""
    record = []
    async with httpx.AsyncClient(base_url=app.base_url, timeout=600) as client:
        traffic, ended = Traffic(client, max_tokens), asyncio.Event()
        streams = [asyncio.create_task(traffic.stream(i, ended)) for i in range(max(profile))]
        began = time.monotonic()
        for second, load in enumerate(profile):
            traffic.wanted, traffic.tokens, traffic.gaps = load, 0, []
            since = time.monotonic()
            await asyncio.sleep(max(0.0, began + second + 1 - since))
            stats = (await client.get("/stats")).raise_for_status().json()
            gaps = sorted(traffic.gaps)
            record.append(
                Second(
                    second,
                    load,
                    verifiers=len(stats["verifiers"]),
                    drafters=len(stats["drafters"]),
                    **stats["requests"],
                    tokens_per_s=round(traffic.tokens / (time.monotonic() - since), 1),
                    token_s=round(gaps[len(gaps) // 2], 4) if gaps else 0.0,
                    failed=traffic.failed,
                )
            )
            if second % 10 == 0:
                console.print(record[-1])
        ended.set()
        await asyncio.gather(*streams)
        console.print(f"{traffic.finished} requests finished, {traffic.failed} failed")
        record[-1].failed = traffic.failed
    return record


def deploy(config: dict[str, Any]) -> Application:
    http = config["http_options"]
    schema = ServeDeploySchema.model_validate(config)
    _get_global_client().deploy_apps(schema, _blocking=False)
    app = Application("autoscale", f"http://{http['host']}:{http['port']}")
    deadline = time.monotonic() + READY_TIMEOUT_S
    while not ready(app):
        if time.monotonic() > deadline:
            raise TimeoutError(f"the application is not ready: {serve.status()}")
        time.sleep(0.5)
    return app


def ready(app: Application) -> bool:
    try:
        return app.http.get("/health").status_code == 200
    except httpx.HTTPError:
        return False


def tiny_pair(folder: Path, args: dict[str, Any]) -> dict[str, Any]:
    """The arguments with a tiny random pair for the configured one."""
    target = write_target(
        folder / "target", tokenizer_from=resolve(args["target"]["model"]), vocab_size=49152
    )
    block_size = args["speculation"]["num_speculative_tokens"] + 1
    drafter = write_drafter(folder / "drafter", target, block_size=block_size)
    models = {
        "target": args["target"] | {"model": str(target)},
        "speculation": args["speculation"] | {"drafter": str(drafter)},
    }
    return args | models | {"dtype": "float32", "max_model_len": 512}


def main(
    config: Annotated[Path, typer.Option(exists=True)] = ROOT / "configs/autoscale.yaml",
    profile: Annotated[Path, typer.Option(exists=True)] = Path(__file__).with_name(
        "load-profile.yaml"
    ),
    out: Annotated[Path, typer.Option(help="Prefix of the files written")] = Path(
        "build/autoscaling"
    ),
    max_tokens: Annotated[int, typer.Option(min=1, help="per request")] = 200,
    tiny: Annotated[bool, typer.Option("--tiny", help="a random pair of a few megabytes")] = False,
) -> None:
    """Run the experiment."""
    description = yaml.safe_load(config.read_text())
    [application] = description["applications"]
    with tempfile.TemporaryDirectory() as folder, cluster() as port:
        description["http_options"] = {"host": "127.0.0.1", "port": port}
        if tiny:
            application["args"] = tiny_pair(Path(folder), application["args"])
        app = deploy(description)
        record = asyncio.run(run(app, loads(yaml.safe_load(profile.read_text())), max_tokens))
    write(out, list(map(asdict, record)), plot(record))
    with out.with_suffix(".csv").open("w", newline="") as file:
        lines = csv.DictWriter(file, [item.name for item in fields(Second)])
        lines.writeheader()
        lines.writerows(map(asdict, record))
    raise typer.Exit(1 if record[-1].failed else 0)


def plot(record: list[Second]) -> Figure:
    panels = [
        ("replicas", ("verifiers", "drafters")),
        ("requests", ("load", "running", "waiting")),
        ("tokens per second", ("tokens_per_s",)),
        ("s between chunks", ("token_s",)),
    ]
    figure = Figure(figsize=(7, 8))
    axes = figure.subplots(len(panels), sharex=True)
    seconds = [entry.second for entry in record]
    for axis, (label, names) in zip(axes, panels, strict=True):
        for name in names:
            style = "steps-post" if label == "replicas" else "default"
            values = [getattr(entry, name) for entry in record]
            axis.plot(seconds, values, label=name, drawstyle=style)
        axis.set(ylabel=label, ylim=(0, None))
        if len(names) > 1:
            axis.legend()
    axes[-1].set(xlabel="seconds")
    return figure


if __name__ == "__main__":
    typer.run(main)
