"""Speculation against the baseline: the same server twice on one machine, measured in turns.

`python -m tests.benchmarks.speedup [--config configs/local.yaml] [--out build/speedup]` deploys the
configuration and its `speculation: null` twin side by side. Each prompt is put to both, one right
after the other, so that a machine that slows down slows both; an idle application uses no CPU.
Written: a table, OUT.json and OUT.png.
"""

from __future__ import annotations

import copy
import statistics
from contextlib import ExitStack
from pathlib import Path
from typing import Annotated, Any

import typer
from rich.console import Console
from rich.table import Table

from deployments.priority import put_models_first
from tests.benchmarks.answer import ask, ask_together
from tests.benchmarks.cluster import LOCAL, application_args, cluster
from tests.benchmarks.prompts import PROMPTS
from tests.benchmarks.report import Figure, quartiles, shown, write
from tests.serve.application import Application, application


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
                answers, together = ask_together(apps[name], group, max_tokens)
                rates[name].append(answers[0].tokens_per_s if concurrency == 1 else together)
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
        "speedup_quartiles": quartiles(speedups),
        "baseline_quartiles": quartiles(rates["baseline"]),
        "dflash_quartiles": quartiles(rates["dflash"]),
        "acceptance_length": statistics.mean(lengths),
        "baseline_first_token_s": statistics.median(first["baseline"]),
        "dflash_first_token_s": statistics.median(first["dflash"]),
    }


def main(
    config: Annotated[Path, typer.Option(exists=True)] = LOCAL,
    out: Annotated[Path, typer.Option(help="Prefix of the files written")] = Path("build/speedup"),
    rounds: Annotated[int, typer.Option(min=1)] = 3,
    max_tokens: Annotated[int, typer.Option(min=2)] = 128,
    concurrency: Annotated[list[int] | None, typer.Option(help="Repeat for several")] = None,
) -> None:
    """Measure the speedup of CONFIG over its baseline."""
    args = application_args(config)
    baseline = copy.deepcopy(args) | {"speculation": None}
    with cluster() as port, ExitStack() as stack:
        apps = {
            "baseline": stack.enter_context(application("baseline", port, baseline)),
            "dflash": stack.enter_context(application("dflash", port, args)),
        }
        for app in apps.values():
            ask(app, "Hello", 8)
        put_models_first()  # as `make serve` does
        results = [measure(apps, c, rounds, max_tokens) for c in concurrency or [1, 2, 4, 8]]
    show(results)
    write(out, {"args": args, "results": results}, plot(results))


def show(results: list[dict[str, Any]]) -> None:
    table = Table(title="Speculation against the baseline: medians (quartiles)")
    for name in ("at once", "baseline tok/s", "DFlash tok/s", "speedup", "tokens per step"):
        table.add_column(name, justify="right")
    table.add_column("first token, ms", justify="right")
    for result in results:
        table.add_row(
            str(result["concurrency"]),
            f"{result['baseline_tokens_per_s']:.1f}",
            f"{result['dflash_tokens_per_s']:.1f}",
            shown(result["speedup_quartiles"], 2),
            f"{result['acceptance_length']:.2f}",
            f"{1e3 * result['baseline_first_token_s']:.0f} / "
            f"{1e3 * result['dflash_first_token_s']:.0f}",
        )
    Console().print(table)


def plot(results: list[dict[str, Any]]) -> Figure:
    figure = Figure(figsize=(6, 4))
    axes = figure.subplots()
    concurrency = [str(result["concurrency"]) for result in results]
    for name, label in (("baseline", "baseline"), ("dflash", "DFlash")):
        low, middle, high = zip(*(r[f"{name}_quartiles"] for r in results), strict=True)
        axes.plot(concurrency, middle, marker="o", label=label)
        axes.fill_between(concurrency, low, high, alpha=0.2)
    axes.set(xlabel="concurrent requests", ylabel="output tokens per second", ylim=(0, None))
    axes.legend()
    return figure


if __name__ == "__main__":
    typer.run(main)
