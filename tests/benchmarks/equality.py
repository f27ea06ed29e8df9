"""Is the served greedy output the same with speculation as without?

    python -m tests.benchmarks.equality [--config configs/local.yaml] [--prompts 200]

deploys the configuration three times: without speculation, with as many drafts as seem fastest
(`adaptive`), and with all K drafts in every step. All get the same prompts, in turns, several at a
time, and their token ids are compared. Written: a table, OUT.json and OUT.png. Status 1 if a token
differs.
"""

from __future__ import annotations

from contextlib import ExitStack
from pathlib import Path
from typing import Annotated

import typer
from rich.console import Console
from rich.table import Table

from tests.benchmarks.cluster import LOCAL, application_args, cluster
from tests.benchmarks.prompts import conversation_prompts
from tests.benchmarks.report import Figure, write
from tests.serve.application import Application, application

BASELINE = "baseline"
SHOWN = 10  # differing prompts
TURN = 40  # prompts
Outputs = dict[str, list[list[int]]]


def main(
    config: Annotated[Path, typer.Option(exists=True)] = LOCAL,
    out: Annotated[Path, typer.Option(help="Prefix of the files written")] = Path("build/equality"),
    prompts: Annotated[int, typer.Option(min=1)] = 200,
    max_tokens: Annotated[int, typer.Option(min=1)] = 64,
    concurrency: Annotated[int, typer.Option(min=1)] = 8,
) -> None:
    """Compare the output of CONFIG with its baseline's."""
    args = application_args(config)
    speculation = args["speculation"]
    variants = {
        BASELINE: args | {"speculation": None},
        "adaptive": args | {"speculation": speculation | {"adaptive": True}},
        "fixed": args | {"speculation": speculation | {"adaptive": False}},
    }
    texts = conversation_prompts(prompts)
    with cluster() as port, ExitStack() as stack:
        apps = {
            name: stack.enter_context(application(name, port, variant))
            for name, variant in variants.items()
        }
        outputs = generate(apps, texts, max_tokens, concurrency)
        lengths = {name: tokens_per_step(app) for name, app in apps.items()}
    differing = {
        name: differences(outputs[BASELINE], outputs[name]) for name in outputs if name != BASELINE
    }
    show(differing, lengths, texts, max_tokens)
    figures = {
        "args": args,
        "prompts": texts,
        "outputs": outputs,
        "tokens_per_step": lengths,
        "first_differing_position": differing,
    }
    write(out, figures, plot(differing, len(texts), max_tokens))
    raise typer.Exit(int(any(differing.values())))


def generate(
    apps: dict[str, Application], prompts: list[list[int]], max_tokens: int, concurrency: int
) -> Outputs:
    outputs: Outputs = {name: [] for name in apps}
    for start in range(0, len(prompts), TURN):
        for name, app in apps.items():
            outputs[name] += app.many_token_ids(
                prompts[start : start + TURN],
                concurrency=concurrency,
                max_tokens=max_tokens,
                ignore_eos=True,
            )
    return outputs


def tokens_per_step(app: Application) -> float:
    counted = app.stats()["speculation"]
    return counted["num_decode_tokens"] / counted["num_decode_steps"]


def differences(expected: list[list[int]], outputs: list[list[int]]) -> dict[int, int]:
    """Prompt number -> position of the first token that differs, for the outputs that do."""
    found = {}
    for number, (one, other) in enumerate(zip(expected, outputs, strict=True)):
        if one != other:
            equal = [a == b for a, b in zip(one, other, strict=False)]
            found[number] = equal.index(False) if False in equal else len(equal)
    return found


def show(
    differing: dict[str, dict[int, int]],
    lengths: dict[str, float],
    prompts: list[list[int]],
    max_tokens: int,
) -> None:
    table = Table(title=f"Equal to the baseline's {max_tokens} tokens")
    for name in ("speculation", "tokens per step", "equal", "first difference: prompt @ position"):
        table.add_column(name)
    for name, found in differing.items():
        shown = [f"{number} @ {position}" for number, position in list(found.items())[:SHOWN]]
        table.add_row(
            name,
            f"{lengths[name]:.2f}",
            f"{len(prompts) - len(found)} of {len(prompts)}",
            ", ".join(shown),
        )
    Console().print(table)


def plot(differing: dict[str, dict[int, int]], prompts: int, max_tokens: int) -> Figure:
    figure = Figure(figsize=(6, 4))
    axes = figure.subplots()
    for name, found in differing.items():
        equal = [
            prompts - sum(first < length for first in found.values())
            for length in range(max_tokens + 1)
        ]
        axes.step(range(max_tokens + 1), equal, where="post", label=name)
    axes.set(xlabel="tokens", ylabel="outputs that are the baseline's so far", ylim=(0, None))
    axes.legend()
    return figure


if __name__ == "__main__":
    typer.run(main)
