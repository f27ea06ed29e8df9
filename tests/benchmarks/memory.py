"""What the processes of the models hold in memory, beside their weights and caches.

    python -m tests.benchmarks.memory [--config configs/local.yaml] [--requests 2000]

deploys the configuration, puts short requests to it, and looks at every rank of both models after
the start and after each fiftieth part of the requests. The limit is weights + caches + 300 MB, the
first two computed from the shapes of what is served. RSS counts every resident page, also those
that other processes share (libraries, and the shared memory of Ray's channels); USS those that
would be free again if the process ended. "Imports" is a process that has imported what a worker
imports and loaded nothing. Written: a table, OUT.json and OUT.png. Status 1 if a process is above
its limit.
"""

from __future__ import annotations

import json
import statistics
import subprocess
import sys
from collections.abc import Callable
from contextlib import ExitStack
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Annotated

import psutil
import typer
from rich.console import Console
from rich.table import Table

from deployments.app_args import AppArgs
from dflash_core.checkpoint import load_drafter_config, load_target_config, resolve
from dflash_core.graphs.capture import simulated_group
from dflash_core.graphs.catalogue import Graph, drafter_graphs, target_graphs
from dflash_core.graphs.footprint import Footprint, footprint
from dflash_core.parallel import TensorParallel
from dflash_core.runtime import DTYPES
from tests.benchmarks.cluster import LOCAL, ROOT, application_args, cluster
from tests.benchmarks.prompts import conversation_prompts
from tests.benchmarks.report import Figure, write
from tests.serve.application import Application, application

MB = 1e6
ALLOWED_MB = 300.0
LOOKS = 50
PARTS = ("anonymous", "shared memory", "checkpoint", "libraries")
IMPORTS = """
import json, psutil, deployments.workers
memory = psutil.Process().memory_full_info()
print(json.dumps([memory.rss / 1e6, memory.uss / 1e6]))
"""


@dataclass
class Rank:
    """A model's process, in megabytes.

    Attributes:
        weights, caches: by the shapes.
        rss, uss: after the start and then along the requests.
        parts: of the last RSS: anonymous memory, shared memory, files (checkpoint, libraries).
    """

    name: str
    pid: int
    weights: float
    caches: float
    rss: list[float] = field(default_factory=list)
    uss: list[float] = field(default_factory=list)
    parts: dict[str, float] = field(default_factory=dict)

    @property
    def limit(self) -> float:
        return self.weights + self.caches + ALLOWED_MB

    @property
    def growth(self) -> float:
        """Of the median RSS, from the first quarter of the requests to the last."""
        after = self.rss[1:]
        quarter = max(1, len(after) // 4)
        return statistics.median(after[-quarter:]) - statistics.median(after[:quarter])

    def look(self) -> None:
        memory = psutil.Process(self.pid).memory_full_info()
        self.rss.append(memory.rss / MB)
        self.uss.append(memory.uss / MB)


def footprints(args: AppArgs) -> dict[str, Footprint]:
    """What a rank of each model has to hold."""
    dtype = DTYPES[args.dtype]
    target = load_target_config(resolve(args.target.model, revision=args.target.revision))
    speculation, drafter, taps = args.speculation, None, ()
    if speculation is not None:
        drafter = load_drafter_config(resolve(speculation.drafter, revision=speculation.revision))
        taps = drafter.target_layer_ids

    def verifier_graphs(tp: TensorParallel) -> list[Graph]:
        return target_graphs(target, args.shapes(args.max_num_seqs), taps, dtype=dtype, tp=tp)

    held = {"verifier": of_rank(verifier_graphs, args.target.tensor_parallel_size)}
    if speculation is not None and drafter is not None:
        shapes = args.shapes(args.max_num_seqs * speculation.verifiers_per_drafter)

        def own_graphs(tp: TensorParallel) -> list[Graph]:
            return drafter_graphs(drafter, target, shapes, dtype=dtype, tp=tp)

        held["drafter"] = of_rank(own_graphs, speculation.tensor_parallel_size)
    return held


def of_rank(make: Callable[[TensorParallel], list[Graph]], ranks: int) -> Footprint:
    with simulated_group(0, ranks) as tp:
        steps = list({id(graph.step): graph.step for graph in make(tp)}.values())
    return footprint(steps, 0)


def ranks_of(app: Application, held: dict[str, Footprint]) -> list[Rank]:
    stats, ranks = app.stats(), []
    for kind, own in held.items():
        for replica in stats[f"{kind}s"].values():
            for number, pid in enumerate(replica["replica"]["worker_pids"]):
                weights, caches = own.parameters / MB, own.caches / MB
                ranks.append(Rank(f"{kind}, rank {number}", pid, weights, caches))
    return ranks


def parts(pid: int) -> dict[str, float]:
    """The resident size of a process by what it is of."""
    sizes = dict.fromkeys(PARTS, 0.0)
    for mapping in psutil.Process(pid).memory_maps(grouped=True):
        if not mapping.path.startswith("/"):
            kind = "anonymous"
        elif mapping.path.startswith("/dev/shm"):
            kind = "shared memory"
        else:
            kind = "checkpoint" if mapping.path.endswith(".safetensors") else "libraries"
        sizes[kind] += mapping.rss / MB
    return sizes


def imports() -> tuple[float, float]:
    """RSS and USS, in megabytes, of a worker that has loaded nothing."""
    python = [sys.executable, "-c", IMPORTS]
    rss, uss = json.loads(subprocess.check_output(python, cwd=ROOT, text=True))
    return rss, uss


def main(
    config: Annotated[Path, typer.Option(exists=True)] = LOCAL,
    out: Annotated[Path, typer.Option(help="Prefix of the files written")] = Path("build/memory"),
    requests: Annotated[int, typer.Option(min=LOOKS)] = 2000,
    concurrency: Annotated[int, typer.Option(min=1)] = 8,
    max_tokens: Annotated[int, typer.Option(min=1)] = 16,
) -> None:
    """Measure the memory of CONFIG's models under REQUESTS requests."""
    args = application_args(config)
    held, empty = footprints(AppArgs(**args)), imports()
    prompts = conversation_prompts(requests)
    with cluster() as port, ExitStack() as stack:
        app = stack.enter_context(application("memory", port, args))
        ranks = ranks_of(app, held)
        for rank in ranks:
            rank.look()
        for number in range(LOOKS):
            part = prompts[number * requests // LOOKS : (number + 1) * requests // LOOKS]
            app.many_token_ids(part, concurrency=concurrency, max_tokens=max_tokens)
            for rank in ranks:
                rank.look()
        for rank in ranks:
            rank.parts = parts(rank.pid)
    show(ranks, empty, requests)
    figures = {
        "args": args,
        "requests": requests,
        "imports_rss_uss": empty,
        "ranks": [asdict(rank) | {"limit": rank.limit, "growth": rank.growth} for rank in ranks],
    }
    write(out, figures, plot(ranks, requests))
    raise typer.Exit(int(any(max(rank.rss) > rank.limit for rank in ranks)))


def show(ranks: list[Rank], empty: tuple[float, float], requests: int) -> None:
    table = Table("MB", title=f"After the start -> after {requests} requests")
    for rank in ranks:
        table.add_column(rank.name, justify="right")
    table.add_column("imports", justify="right")

    def add(label: str, figure: Callable[[Rank], str], imported: str = "") -> None:
        table.add_row(label, *map(figure, ranks), imported)

    add("weights", lambda rank: f"{rank.weights:.0f}")
    add("caches", lambda rank: f"{rank.caches:.0f}")
    add(f"limit (both + {ALLOWED_MB:.0f})", lambda rank: f"{rank.limit:.0f}")
    add("RSS", lambda rank: f"{rank.rss[0]:.0f} -> {rank.rss[-1]:.0f}", f"{empty[0]:.0f}")
    add("most RSS - limit", lambda rank: f"{max(rank.rss) - rank.limit:+.0f}")
    add("growth, first to last quarter", lambda rank: f"{rank.growth:+.1f}")
    add("USS", lambda rank: f"{rank.uss[0]:.0f} -> {rank.uss[-1]:.0f}", f"{empty[1]:.0f}")
    for part in PARTS:
        add(f"{part} in RSS", lambda rank, part=part: f"{rank.parts[part]:.0f}")
    Console().print(table)


def plot(ranks: list[Rank], requests: int) -> Figure:
    figure = Figure(figsize=(6, 4))
    axes = figure.subplots()
    for index, rank in enumerate(ranks):
        done = [number * requests / (len(rank.rss) - 1) for number in range(len(rank.rss))]
        axes.plot(done, rank.rss, color=f"C{index}", label=f"{rank.name}: RSS")
        axes.plot(done, rank.uss, color=f"C{index}", linestyle=":", label="USS")
        axes.axhline(rank.limit, color=f"C{index}", linestyle="--", label="limit")
    axes.set(xlabel="requests", ylabel="MB", ylim=(0, None))
    axes.legend()
    return figure


if __name__ == "__main__":
    typer.run(main)
