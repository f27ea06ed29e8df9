"""Speculation against the baseline: the same server twice on one machine, measured in turns.

`python -m tests.benchmarks.speedup [--config configs/local.yaml] [--out build/speedup]` deploys the
configuration and its `speculation: null` twin side by side. Each prompt is put to both, one right
after the other, so that a machine that slows down slows both; an idle application uses no CPU.
Written: a table, OUT.json and OUT.png.
"""

from __future__ import annotations

import copy
import json
import os
import socket
import statistics
import time
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Any

import matplotlib

matplotlib.use("Agg")
os.environ.setdefault("RAY_worker_niceness", "0")
os.environ.setdefault("HF_HUB_OFFLINE", "1")

import matplotlib.pyplot as plt
import ray
import typer
import yaml
from ray import serve
from rich.console import Console
from rich.table import Table

from deployments.priority import put_models_first
from tests.benchmarks.prompts import PROMPTS
from tests.serve.application import Application, application

ROOT = Path(__file__).parents[2]


@dataclass(frozen=True)
class Answer:
    """One streamed answer: tokens, seconds to the first and to the last, tokens per step."""

    text: str
    tokens: int
    first_s: float
    total_s: float
    acceptance_length: float

    @property
    def tokens_per_s(self) -> float:
        """Decode speed: tokens after the first, over the time after the first."""
        return (self.tokens - 1) / (self.total_s - self.first_s)


def ask(app: Application, prompt: str, max_tokens: int) -> Answer:
    body = {
        "messages": [{"role": "user", "content": prompt}],
        "temperature": 0,
        "max_tokens": max_tokens,
        "ignore_eos": True,
        "stream": True,
        "stream_options": {"include_usage": True},
    }
    began, first, text, tokens, acceptance = time.perf_counter(), 0.0, "", 0, 0.0
    with app.http.stream("POST", "/v1/chat/completions", json=body) as response:
        response.raise_for_status()
        for line in response.iter_lines():
            if not line.startswith("data: {"):
                continue
            chunk = json.loads(line.removeprefix("data: "))
            if chunk["choices"]:
                first = first or time.perf_counter() - began
                text += chunk["choices"][0]["delta"].get("content") or ""
                if metrics := chunk.get("metrics"):
                    steps = max(1, metrics["num_decode_steps"])
                    acceptance = metrics["num_decode_tokens"] / steps
            else:
                tokens = chunk["usage"]["completion_tokens"]
    return Answer(text, tokens, first, time.perf_counter() - began, acceptance)


def measure(
    apps: dict[str, Application], concurrency: int, rounds: int, max_tokens: int
) -> dict[str, Any]:
    """Medians over rounds of all prompts, at a concurrency; the two servers take turns."""
    prompts = list(PROMPTS.values())
    rates: dict[str, list[float]] = {name: [] for name in apps}
    first: dict[str, list[float]] = {name: [] for name in apps}
    lengths: list[float] = []
    groups = [prompts[i : i + concurrency] for i in range(0, len(prompts), concurrency)]
    for round_number in range(rounds):
        for group in groups:
            texts = {}
            order = list(apps) if round_number % 2 == 0 else list(apps)[::-1]
            for name in order:
                app = apps[name]
                began = time.perf_counter()
                with ThreadPoolExecutor(concurrency) as pool:
                    answers = list(pool.map(lambda p, a=app: ask(a, p, max_tokens), group))
                elapsed = time.perf_counter() - began
                if concurrency == 1:
                    rates[name].append(answers[0].tokens_per_s)
                else:
                    rates[name].append(sum(answer.tokens for answer in answers) / elapsed)
                first[name] += [answer.first_s for answer in answers]
                texts[name] = [answer.text for answer in answers]
                if name == "dflash":
                    lengths += [answer.acceptance_length for answer in answers]
            same = sum(a == b for a, b in zip(*texts.values(), strict=True))
            if same < len(group):
                print(f"note: {len(group) - same} of {len(group)} texts differ (bf16 rounding)")
    speedups = [d / b for d, b in zip(rates["dflash"], rates["baseline"], strict=True)]
    return {
        "concurrency": concurrency,
        "baseline_tokens_per_s": statistics.median(rates["baseline"]),
        "dflash_tokens_per_s": statistics.median(rates["dflash"]),
        "speedup": statistics.median(speedups),
        "speedup_quartiles": statistics.quantiles(speedups, n=4) if len(speedups) > 1 else speedups,
        "acceptance_length": statistics.mean(lengths),
        "baseline_first_token_s": statistics.median(first["baseline"]),
        "dflash_first_token_s": statistics.median(first["dflash"]),
    }


def main(
    config: Annotated[Path, typer.Option(exists=True)] = ROOT / "configs/local.yaml",
    out: Annotated[Path, typer.Option(help="Prefix of the files written")] = Path("build/speedup"),
    rounds: Annotated[int, typer.Option(min=1)] = 3,
    max_tokens: Annotated[int, typer.Option(min=2)] = 128,
    concurrency: Annotated[list[int] | None, typer.Option(help="Repeat for several")] = None,
) -> None:
    """Measure the speedup of CONFIG over its baseline."""
    args = yaml.safe_load(config.read_text())["applications"][0]["args"]
    baseline = copy.deepcopy(args) | {"speculation": None}
    with socket.socket() as listener:
        listener.bind(("127.0.0.1", 0))
        port = listener.getsockname()[1]
    ray.init(
        num_cpus=16,
        include_dashboard=False,
        log_to_driver=False,
        runtime_env={"env_vars": {"PYTHONPATH": str(ROOT), "HF_HUB_OFFLINE": "1"}},
    )
    serve.start(proxy_location="HeadOnly", http_options={"host": "127.0.0.1", "port": port})
    with ExitStack() as stack:
        apps = {
            "baseline": stack.enter_context(application("baseline", port, baseline)),
            "dflash": stack.enter_context(application("dflash", port, args)),
        }
        for app in apps.values():
            ask(app, "Hello", 8)
        put_models_first()  # as `make serve` does
        results = [measure(apps, c, rounds, max_tokens) for c in concurrency or [1, 2, 4, 8]]
    serve.shutdown()
    out.parent.mkdir(parents=True, exist_ok=True)
    out.with_suffix(".json").write_text(json.dumps({"args": args, "results": results}, indent=2))
    show(results)
    plot(results, out.with_suffix(".png"))


def show(results: list[dict[str, Any]]) -> None:
    table = Table(title="Speculation against the baseline (medians)")
    for name in ("concurrency", "baseline tok/s", "DFlash tok/s", "speedup", "tokens per step"):
        table.add_column(name, justify="right")
    table.add_column("first token, baseline / DFlash", justify="right")
    for result in results:
        table.add_row(
            str(result["concurrency"]),
            f"{result['baseline_tokens_per_s']:.1f}",
            f"{result['dflash_tokens_per_s']:.1f}",
            f"{result['speedup']:.2f}",
            f"{result['acceptance_length']:.2f}",
            f"{1e3 * result['baseline_first_token_s']:.0f} / "
            f"{1e3 * result['dflash_first_token_s']:.0f} ms",
        )
    Console().print(table)


def plot(results: list[dict[str, Any]], path: Path) -> None:
    figure, axes = plt.subplots(figsize=(6, 4))
    concurrency = [str(result["concurrency"]) for result in results]
    for name, label in (("baseline", "baseline"), ("dflash", "DFlash")):
        axes.plot(
            concurrency, [r[f"{name}_tokens_per_s"] for r in results], marker="o", label=label
        )
    axes.set(xlabel="concurrent requests", ylabel="output tokens per second", ylim=(0, None))
    axes.legend()
    figure.tight_layout()
    figure.savefig(path, dpi=150)


if __name__ == "__main__":
    typer.run(main)
