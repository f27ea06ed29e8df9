"""How full the pipeline is: the period of verify steps beside what the steps take.

    python -m tests.benchmarks.pipeline [--config configs/local.yaml] [--out build/pipeline]

serves CONFIG with all K drafts in every step and each model on a core of its own, and reads
`/trace` after several requests have decoded. Where verifying one half of them and drafting for the
other overlap fully, a verify step begins as soon as the slower model is done with the step before.
Written: a table, OUT.json, OUT.png, and OUT-trace.json, the trace for ui.perfetto.dev.
"""

from __future__ import annotations

import itertools
import json
import os
import time
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Annotated, Any

import typer
from rich.console import Console
from rich.table import Table

from deployments.priority import put_models_first
from tests.benchmarks.answer import ask_together
from tests.benchmarks.cluster import LOCAL, application_args, cluster
from tests.benchmarks.prompts import PROMPTS
from tests.benchmarks.report import Figure, quartiles, shown, write
from tests.serve.application import application

Spread = tuple[float, float, float]


@dataclass
class Row:
    """Milliseconds, quartiles: from one verify step to the next, and of the models alone."""

    concurrency: int
    period_ms: Spread
    verify_ms: Spread
    draft_ms: Spread

    @property
    def ratio(self) -> float:
        """Medians: the period to the slower of the two models."""
        return self.period_ms[1] / max(self.verify_ms[1], self.draft_ms[1])


def row(concurrency: int, events: list[dict[str, Any]]) -> Row:
    """What a trace's events say of the steps while nothing was being prefilled."""
    steps = sorted(
        (event for event in events if event["name"] in ("verify", "prefill", "draft")),
        key=lambda event: event["ts"],
    )
    decoding = [event for event in steps if event["name"] != "draft"]
    pairs = [
        (one, next_one)
        for one, next_one in itertools.pairwise(decoding)
        if one["name"] == next_one["name"] == "verify"
    ]
    return Row(
        concurrency,
        period_ms=quartiles([(after["ts"] - before["ts"]) / 1e3 for before, after in pairs]),
        verify_ms=quartiles([before["dur"] / 1e3 for before, _ in pairs]),
        draft_ms=quartiles([event["dur"] / 1e3 for event in steps if event["name"] == "draft"]),
    )


def main(
    config: Annotated[Path, typer.Option(exists=True)] = LOCAL,
    out: Annotated[Path, typer.Option(help="Prefix of the files written")] = Path("build/pipeline"),
    concurrency: Annotated[list[int] | None, typer.Option(help="Repeat for several")] = None,
    max_tokens: Annotated[int, typer.Option(min=2)] = 128,
) -> None:
    """Measure the pipeline of CONFIG."""
    args, cores, rows = application_args(config), sorted(os.sched_getaffinity(0)), []
    if len(cores) < 2:
        raise typer.BadParameter("each model needs a core of its own; there is only one")
    args["target"] |= {"num_threads": 1, "cpu_cores": str(cores[0])}
    args["speculation"] |= {"num_threads": 1, "cpu_cores": str(cores[1]), "adaptive": False}
    prompts = itertools.cycle(PROMPTS.values())
    with cluster() as port, application("pipeline", port, args) as app:
        put_models_first()  # as `make serve` does
        for at_once in concurrency or [2, 4, 8]:
            since = 1e6 * time.monotonic()  # the clock of the trace
            ask_together(app, list(itertools.islice(prompts, at_once)), max_tokens)
            trace = app.http.get("/trace").raise_for_status().json()
            events = [event for event in trace["traceEvents"] if event.get("ts", 0) >= since]
            rows.append(row(at_once, events))
    show(rows)
    results = [asdict(each) | {"ratio": each.ratio} for each in rows]
    write(out, {"args": args, "results": results}, plot(rows))
    out.with_name(f"{out.name}-trace.json").write_text(json.dumps(trace))


def show(rows: list[Row]) -> None:
    table = Table(title="Milliseconds, medians (quartiles)")
    for name in ("at once", "period", "verify", "draft", "period / slower model"):
        table.add_column(name, justify="right")
    for each in rows:
        spreads = [each.period_ms, each.verify_ms, each.draft_ms]
        table.add_row(str(each.concurrency), *(shown(s, 1) for s in spreads), f"{each.ratio:.2f}")
    Console().print(table)


def plot(rows: list[Row]) -> Figure:
    figure = Figure(figsize=(6, 4))
    axes = figure.subplots()
    labels = [str(each.concurrency) for each in rows]
    for name in ("period", "verify", "draft"):
        spreads = [getattr(each, f"{name}_ms") for each in rows]
        axes.plot(labels, [spread[1] for spread in spreads], marker="o", label=name)
    axes.set(xlabel="concurrent requests", ylabel="ms", ylim=(0, None))
    axes.legend()
    return figure


if __name__ == "__main__":
    typer.run(main)
