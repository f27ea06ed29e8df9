"""One request at a time, in one process, beside others' engines on the same cores and checkpoints.

    python -m tests.benchmarks.peers [--rounds 3] [--engine NAME]... [--out build/peers]

Engines, each in a process of its own: this project's without and with its drafter; vLLM's CPU build
(in an environment that is made on the first run) without and with the same drafter; z-lab's own
`dflash`, again with that drafter; and transformers' `generate`, plain and with drafts looked up in
the prompt. They take turns, prompt by prompt, so that a machine that slows down slows them all.
What is compared has no server around it; `tests.benchmarks.speedup` measures the served
application. Written: a table, OUT.json and OUT.png.
"""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Annotated, Any

import typer
from rich.console import Console
from rich.table import Table

from dflash_core.checkpoint import resolve
from tests.benchmarks.engines import ENGINES, TARGET, Engine
from tests.benchmarks.prompts import PROMPTS
from tests.benchmarks.report import Figure, quartiles, shown, write
from tests.benchmarks.vllm_bench import prepare

Measured = dict[str, list[dict[str, float]]]


def main(
    rounds: Annotated[int, typer.Option(min=1)] = 3,
    max_tokens: Annotated[int, typer.Option(min=2)] = 128,
    drafts: Annotated[int, typer.Option(min=1, help="K")] = 7,
    out: Annotated[Path, typer.Option(help="Prefix of the files written")] = Path("build/peers"),
    environment: Annotated[Path, typer.Option(help="for vLLM; made if it is not there")] = Path(
        "~/.cache/dflash/vllm-bench"
    ),
    engines: Annotated[list[str] | None, typer.Option("--engine", help="Repeat for some")] = None,
) -> None:
    """Measure them in turns."""
    from dflash_core.tokenizer import load_tokenizer

    names = engines or list(ENGINES)
    if unknown := set(names) - set(ENGINES):
        raise typer.BadParameter(f"--engine {', '.join(unknown)}: there are {', '.join(ENGINES)}")
    out.parent.mkdir(parents=True, exist_ok=True)
    vllm = any(ENGINES[name].is_vllm for name in names)
    vllm_python = prepare(environment.expanduser()) if vllm else None
    tokenizer = load_tokenizer(resolve(TARGET))
    prompts = [
        tokenizer.apply_chat_template(
            [{"role": "user", "content": text}], add_generation_prompt=True, return_dict=False
        )
        for text in PROMPTS.values()
    ]
    running: list[Engine] = []
    measured: Measured = {name: [] for name in names}
    try:
        for name in names:
            log = out.with_name(f"{out.name}-{name.replace(' ', '-')}.log")
            python = vllm_python if ENGINES[name].is_vllm else Path(sys.executable)
            assert python is not None
            running.append(Engine(name, python, log, drafts=drafts, tokens=max_tokens))
        for number in range(rounds):
            for prompt in prompts:
                for engine in running[:: 1 if number % 2 == 0 else -1]:
                    measured[engine.name].append(engine.ask(prompt))
    finally:
        for engine in running:
            engine.process.kill()
            engine.process.wait()
    summary = summarise(measured)
    show(summary)
    figures = {"max_tokens": max_tokens, "drafts": drafts, "summary": summary, "answers": measured}
    write(out, figures, plot(measured))


def summarise(measured: Measured) -> list[dict[str, Any]]:
    """Quartiles; ratios are of the same prompt, which all engines got in turn."""
    rates = {name: [r["tokens"] / r["seconds"] for r in measured[name]] for name in measured}
    steps = {name: [1e3 * r["seconds"] / r["steps"] for r in measured[name]] for name in measured}
    summary = []
    for name, results in measured.items():
        row: dict[str, Any] = {
            "engine": name,
            "tokens_per_s": quartiles(rates[name]),
            "step_ms": quartiles(steps[name]),
            "tokens_per_step": sum(r["tokens"] - 1 for r in results)
            / sum(r["steps"] for r in results),
        }
        ours = ENGINES[name].ours
        if ours in measured and ours != name:
            row["ours"] = ours
            row["ours_to_theirs_tokens_per_s"] = quartiles(ratios(rates[ours], rates[name]))
            row["ours_to_theirs_step_ms"] = quartiles(ratios(steps[ours], steps[name]))
        summary.append(row)
    return summary


def ratios(ours: list[float], theirs: list[float]) -> list[float]:
    return [a / b for a, b in zip(ours, theirs, strict=True)]


def show(summary: list[dict[str, Any]]) -> None:
    title = "Medians (quartiles); the prompt's time is in all of them"
    table = Table("engine", "tokens/s", "ms per step", "tokens per step", title=title)
    for row in summary:
        table.add_row(
            row["engine"],
            shown(row["tokens_per_s"], 1),
            shown(row["step_ms"], 1),
            f"{row['tokens_per_step']:.2f}",
        )
    compared = Table("ours / theirs", "tokens/s", "time per step")
    for row in summary:
        if "ours" in row:
            compared.add_row(
                f"{row['ours']} / {row['engine']}",
                shown(row["ours_to_theirs_tokens_per_s"], 2),
                shown(row["ours_to_theirs_step_ms"], 2),
            )
    Console().print(table, compared)


def plot(measured: Measured) -> Figure:
    figure = Figure(figsize=(8, 4))
    axes = figure.subplots()
    rates = [
        [each["tokens"] / each["seconds"] for each in results] for results in measured.values()
    ]
    axes.boxplot(rates, tick_labels=[name.replace(" ", "\n", 1) for name in measured])
    axes.set(ylabel="output tokens per second", ylim=(0, None))
    return figure


if __name__ == "__main__":
    typer.run(main)
