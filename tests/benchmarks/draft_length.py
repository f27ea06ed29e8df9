"""Automatic K against every K that could have been set instead, with a good and a useless drafter.

    python -m tests.benchmarks.draft_length [--concurrency 1 --concurrency 4] [--drafter shipped]

deploys CONFIG side by side with `adaptive: true`, without speculation (K = 0), and with K = 1, 3
and 7 in every step. In each round all of them get the same prompts at once, as many as the
concurrency says, in an order that rotates; an idle application uses no CPU. The useless drafter has
the shipped one's shapes and random weights, so it costs the same. Written: a table, OUT.json and
OUT.png. Status 1 if automatic K is slower than SHARE of the best of the others.
"""

from __future__ import annotations

import itertools
import statistics
import tempfile
from contextlib import ExitStack
from dataclasses import asdict, dataclass
from enum import StrEnum
from pathlib import Path
from typing import Annotated, Any

import typer
from rich.console import Console
from rich.table import Table

from deployments.priority import put_models_first
from dflash_core.checkpoint import load_drafter_config, resolve
from dflash_core.random_drafter import write_random_drafter
from tests.benchmarks.answer import ask_together
from tests.benchmarks.cluster import LOCAL, application_args, cluster
from tests.benchmarks.prompts import PROMPTS
from tests.benchmarks.report import Figure, quartiles, shown, write
from tests.serve.application import Application, application

FIXED = (1, 3, 7)
AUTOMATIC, PLAIN = "automatic", "K = 0"
SHARE = 0.97
MAX_NUM_SEQS = 32
MAX_MODEL_LEN = 512
console = Console()


class Drafter(StrEnum):
    SHIPPED = "shipped"
    USELESS = "useless"


@dataclass
class Row:
    """A drafter at a concurrency.

    Attributes:
        tokens_per_s: of each setting, round by round.
        tokens_per_step: of each setting, over all rounds.
    """

    drafter: Drafter
    concurrency: int
    tokens_per_s: dict[str, list[float]]
    tokens_per_step: dict[str, float]

    @property
    def best(self) -> str:
        """The fastest of the others: the one with the highest median."""
        medians = {name: statistics.median(rates) for name, rates in self.tokens_per_s.items()}
        del medians[AUTOMATIC]
        return max(medians, key=medians.__getitem__)

    def ratio(self, name: str) -> tuple[float, float, float]:
        """Quartiles of automatic / another setting, round by round."""
        pairs = zip(self.tokens_per_s[AUTOMATIC], self.tokens_per_s[name], strict=True)
        return quartiles([automatic / other for automatic, other in pairs])

    @property
    def missed(self) -> bool:
        return self.ratio(self.best)[1] < SHARE


def settings(args: dict[str, Any]) -> dict[str, dict[str, Any]]:
    """The arguments of each application."""
    args = args | {"max_num_seqs": MAX_NUM_SEQS, "max_model_len": MAX_MODEL_LEN}
    speculation = args["speculation"]
    fixed = {
        f"K = {drafts}": speculation | {"adaptive": False, "num_speculative_tokens": drafts}
        for drafts in FIXED
    }
    automatic = speculation | {"adaptive": True}
    every = {AUTOMATIC: automatic, PLAIN: None} | fixed
    return {name: args | {"speculation": own} for name, own in every.items()}


def useless(args: dict[str, Any], folder: Path) -> dict[str, Any]:
    """The arguments with a drafter of the same shapes that has learnt nothing."""
    config = load_drafter_config(resolve(args["speculation"]["drafter"]))
    drafter = write_random_drafter(
        resolve(args["target"]["model"]),
        folder / "useless",
        layers=config.num_layers,
        block_size=config.block_size,
        mask_token_id=config.mask_token_id,
        target_layer_ids=config.target_layer_ids,
    )
    return args | {"speculation": args["speculation"] | {"drafter": str(drafter)}}


def measure(
    apps: dict[str, Application], drafter: Drafter, concurrency: int, rounds: int, max_tokens: int
) -> Row:
    """`rounds` turns of every application, after one that does not count."""
    rates: dict[str, list[float]] = {name: [] for name in apps}
    lengths: dict[str, list[float]] = {name: [] for name in apps}
    prompts, names = itertools.cycle(PROMPTS.values()), list(apps)
    for number in range(-1, rounds):
        together = list(itertools.islice(prompts, concurrency))
        first = number % len(names)
        for name in names[first:] + names[:first]:
            answers, rate = ask_together(apps[name], together, max_tokens)
            if number >= 0:
                rates[name].append(rate)
                lengths[name] += [answer.acceptance_length for answer in answers]
    return Row(drafter, concurrency, rates, {n: statistics.mean(v) for n, v in lengths.items()})


def main(
    config: Annotated[Path, typer.Option(exists=True)] = LOCAL,
    out: Annotated[Path, typer.Option(help="Prefix of the files written")] = Path(
        "build/draft_length"
    ),
    concurrency: Annotated[list[int] | None, typer.Option(help="Repeat for several")] = None,
    drafter: Annotated[list[Drafter] | None, typer.Option(help="Repeat for both")] = None,
    rounds: Annotated[int, typer.Option(min=1)] = 10,
    max_tokens: Annotated[int, typer.Option(min=2)] = 128,
) -> None:
    """Measure automatic K."""
    args, rows = application_args(config), []
    with tempfile.TemporaryDirectory() as folder, cluster() as port:
        for each in drafter or list(Drafter):
            own = useless(args, Path(folder)) if each is Drafter.USELESS else args
            with ExitStack() as stack:
                apps = {
                    name: stack.enter_context(application(route(name), port, variant))
                    for name, variant in settings(own).items()
                }
                put_models_first()  # as `make serve` does
                for at_once in concurrency or [1, 4, 16, 32]:
                    rows.append(measure(apps, each, at_once, rounds, max_tokens))
                    console.print(f"{each}, {at_once}: {shown(rows[-1].ratio(rows[-1].best), 2)}")
    show(rows)
    results = [asdict(row) | {"best": row.best, "ratio": row.ratio(row.best)} for row in rows]
    write(out, {"args": args, "max_tokens": max_tokens, "results": results}, plot(rows))
    raise typer.Exit(int(any(row.missed for row in rows)))


def route(name: str) -> str:
    return name.replace(" = ", "")


def show(rows: list[Row]) -> None:
    table = Table(title="Output tokens per second, medians (quartiles)")
    for name in ("drafter", "at once", "setting", "tokens/s", "tokens per step", "automatic / it"):
        table.add_column(name)
    for row in rows:
        for name, rates in row.tokens_per_s.items():
            style = ("red" if row.missed else "bold") if name == row.best else ""
            table.add_row(
                row.drafter,
                str(row.concurrency),
                f"{name}, best" if name == row.best else name,
                shown(quartiles(rates), 1),
                f"{row.tokens_per_step[name]:.2f}",
                "" if name == AUTOMATIC else shown(row.ratio(name), 2),
                style=style,
            )
        table.add_section()
    console.print(table)
    console.print(f"aim: {SHARE} of the best")


def plot(rows: list[Row]) -> Figure:
    drafters = list(dict.fromkeys(row.drafter for row in rows))
    figure = Figure(figsize=(5 * len(drafters), 4))
    panels = figure.subplots(1, len(drafters), squeeze=False, sharey=True)[0]
    for axes, drafter in zip(panels, drafters, strict=True):
        own = [row for row in rows if row.drafter is drafter]
        labels = [str(row.concurrency) for row in own]
        for name in own[0].tokens_per_s:
            low, middle, high = zip(*(quartiles(r.tokens_per_s[name]) for r in own), strict=True)
            width = 2.5 if name == AUTOMATIC else 1
            axes.plot(labels, middle, marker="o", linewidth=width, label=name)
            axes.fill_between(labels, low, high, alpha=0.15)
        axes.set(title=f"{drafter} drafter", xlabel="concurrent requests", ylim=(0, None))
        axes.legend()
    panels[0].set_ylabel("output tokens per second")
    return figure


if __name__ == "__main__":
    typer.run(main)
