"""What moving things costs: plans to the workers, features from the Verifier to the Drafter.

    python -m tests.benchmarks.transfer [--out build/transfer]

runs the two compiled graphs of a pair as the Router does, with workers that sleep in the place of
their models, at the feature width of the packaged pair and of Llama-3.1-8B's. Written: a table,
OUT.json and OUT.png. "verify" and "draft" are the milliseconds of a step that are not the model's;
for a drafter that includes the copy of the features into its own memory.
"""

from __future__ import annotations

import os
import time
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Annotated

os.environ.setdefault("RAY_worker_niceness", "0")

import numpy as np
import ray
import typer
from ray.dag import DAGContext
from rich.console import Console
from rich.table import Table

from deployments import channel_wait
from deployments.graph import STEP_TIMEOUT_S, ModelGraph
from deployments.worker_group import NAMESPACE
from dflash_core.messages import DraftPlan, DraftResult, Features, Span, VerifyPlan, VerifyResult
from tests.benchmarks.cluster import ROOT
from tests.benchmarks.report import Figure, quartiles, shown, write

WIDTHS = {"SmolLM2-135M": 5 * 576, "Llama-3.1-8B": 5 * 4096}  # tapped layers * hidden size
PROMPT = 2048
BYTES = 2  # bfloat16


@ray.remote
class Source:
    """A Verifier's worker without a model."""

    def __init__(self, max_bytes: int, model_s: float) -> None:
        channel_wait.install()
        DAGContext.get_current().buffer_size_bytes = max_bytes
        self.model_s = model_s
        self.features = np.ones(max_bytes, dtype=np.uint8)

    def verify(self, plan: VerifyPlan) -> VerifyResult:
        began = time.monotonic()
        time.sleep(self.model_s)
        rows, width = plan.tokens.shape[1], int(plan.slots[0])  # the plan's slot is of no use here
        data = self.features[: rows * width * BYTES]
        features = Features(data, rows, width, "bfloat16")
        return VerifyResult([[0] * rows], features, Span(began, time.monotonic()))


@ray.remote
class Sink:
    """A Drafter's worker without a model."""

    def __init__(self, max_bytes: int, model_s: float) -> None:
        channel_wait.install()
        DAGContext.get_current().buffer_size_bytes = 1 << 20
        self.model_s = model_s
        self.memory = np.empty(max_bytes, dtype=np.uint8)

    def draft(self, plan: DraftPlan) -> DraftResult:
        began = time.monotonic()
        time.sleep(self.model_s)
        model_ended = time.monotonic()
        self.memory[: plan.features.data.nbytes] = plan.features.data
        return DraftResult([[0] * plan.num_drafts], Span(began, model_ended))


@dataclass
class Figures:
    """Steps of so many rows: quartiles of the milliseconds beside the model's, and the rate."""

    model: str
    rows: int
    megabytes: float
    verify_ms: tuple[float, float, float]
    draft_ms: tuple[float, float, float]

    @property
    def both_ms(self) -> float:
        """Medians of both ways."""
        return self.verify_ms[1] + self.draft_ms[1]

    @property
    def gigabytes_per_s(self) -> float:
        return self.megabytes / self.both_ms


def measure(source: ModelGraph, sink: ModelGraph, model: str, rows: int, steps: int) -> Figures:
    width = WIDTHS[model]
    one, zeros = np.array([width], dtype=np.int32), np.zeros(rows, dtype=np.int32)
    plan = VerifyPlan(
        tokens=zeros[None],
        slots=one,
        starts=one,
        lengths=np.array([rows], dtype=np.int32),
        prefill=False,
        with_features=True,
    )
    verify, draft = [], []
    for _ in range(steps):
        began = time.monotonic()
        result = source.run(plan, STEP_TIMEOUT_S)
        features, span = result.features, result.span
        features = Features(np.array(features.data), rows, width, "bfloat16")
        del result
        drafting = time.monotonic()
        verify.append(drafting - began - span.seconds)
        answer = sink.run(
            DraftPlan(features, zeros, zeros, one, one, one, one, num_drafts=9), STEP_TIMEOUT_S
        )
        draft.append(time.monotonic() - drafting - answer.span.seconds)
    return Figures(
        model,
        rows,
        rows * width * BYTES / 1e6,
        quartiles([1e3 * seconds for seconds in verify]),
        quartiles([1e3 * seconds for seconds in draft]),
    )


def main(
    out: Annotated[Path, typer.Option(help="Prefix of the files written")] = Path("build/transfer"),
    model_ms: Annotated[float, typer.Option(min=0, help="the workers sleep so long")] = 30.0,
    steps: Annotated[int, typer.Option(min=2)] = 100,
    chunk: Annotated[int, typer.Option(min=1, max=PROMPT, help="prompt tokens per step")] = 256,
) -> None:
    """Measure the transfer of plans, results and features."""
    ray.init(
        num_cpus=2,
        namespace=NAMESPACE,
        include_dashboard=False,
        log_to_driver=False,
        runtime_env={"env_vars": {"PYTHONPATH": str(ROOT)}},
    )
    max_bytes = chunk * max(WIDTHS.values()) * BYTES + (1 << 20)
    workers = [
        Source.options(name="source").remote(max_bytes, model_ms / 1e3),
        Sink.options(name="sink").remote(max_bytes, model_ms / 1e3),
    ]
    source = ModelGraph[VerifyResult](("source",), "verify", channel_bytes=1 << 20)
    sink = ModelGraph[DraftResult](("sink",), "draft", channel_bytes=max_bytes)
    try:
        figures = [
            measure(source, sink, model, rows, steps)
            for model in WIDTHS
            for rows in (1, 8, 10, chunk)
        ]
    finally:
        source.close()
        sink.close()
        del workers
        ray.shutdown()
    show(figures, model_ms, steps, chunk)
    write(out, [asdict(each) for each in figures], plot(figures))


def show(figures: list[Figures], model_ms: float, steps: int, chunk: int) -> None:
    table = Table(
        title=f"Transfer, beside {model_ms:g} ms of model ({steps} steps, medians and quartiles)"
    )
    for name in ("model", "rows", "MB", "verify, ms", "draft, ms", "GB/s", f"{PROMPT} tokens, ms"):
        table.add_column(name, justify="right")
    for each in figures:
        table.add_row(
            each.model,
            str(each.rows),
            f"{each.megabytes:.2f}",
            shown(each.verify_ms, 2),
            shown(each.draft_ms, 2),
            f"{each.gigabytes_per_s:.2f}",
            f"{each.both_ms * PROMPT / chunk:.0f}" if each.rows == chunk else "",
        )
    Console().print(table)


def plot(figures: list[Figures]) -> Figure:
    figure = Figure(figsize=(6, 4))
    axes = figure.subplots()
    for model in WIDTHS:
        own = [each for each in figures if each.model == model]
        axes.plot(
            [each.megabytes for each in own],
            [each.both_ms for each in own],
            marker="o",
            label=model,
        )
    axes.set(xlabel="MB of features in a step", ylabel="ms, both ways", xscale="log", yscale="log")
    axes.legend()
    return figure


if __name__ == "__main__":
    typer.run(main)
