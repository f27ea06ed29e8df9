"""`python -m deployments.check_graphs CONFIG`: is a configuration fit for Trainium?

It needs no device.

Lists every graph that its server would compile, checks each against the rules in
`dflash_core.graphs.rules`, and says what a rank holds in the memory of its core.
"""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer
import yaml
from pydantic import ValidationError
from rich.console import Console

from deployments.app_args import AppArgs
from dflash_core.checkpoint import load_drafter_config, load_target_config, resolve
from dflash_core.errors import CheckpointError, PairingError
from dflash_core.graphs.catalogue import drafter_graphs, target_graphs
from dflash_core.graphs.footprint import GIB, core_bytes
from dflash_core.graphs.lint import CheckedGraph, CheckedModel, lint
from dflash_core.pairing import validate_pair
from dflash_core.runtime import DTYPES

MIB = 1 << 20
app = typer.Typer(add_completion=False)


@app.command()
def main(
    config: Annotated[Path, typer.Argument(exists=True, dir_okay=False, help="Ray Serve YAML")],
    target: Annotated[
        str | None, typer.Option(help="In place of its target: a folder with a config.json will do")
    ] = None,
    drafter: Annotated[str | None, typer.Option(help="In place of its drafter, likewise")] = None,
) -> None:
    """Check the graphs of CONFIG; exit status 1 if one is not fit, or the memory too small."""
    try:
        fit = _check(config, target, drafter)
    except (CheckpointError, PairingError, ValidationError) as error:
        typer.echo(str(error))
        fit = False
    raise typer.Exit(0 if fit else 1)


def _check(config: Path, target: str | None, drafter: str | None) -> bool:
    [application] = yaml.safe_load(config.read_text(encoding="utf-8"))["applications"]
    args = AppArgs.model_validate(application["args"])
    console = Console(soft_wrap=True, highlight=False)

    def show(graph: CheckedGraph) -> None:
        verdict = "[red]FAIL[/]" if graph.violations else "[green]OK[/]  "
        console.print(
            f"{verdict} {graph.name:<24} {graph.operators:>6,} operators "
            f"{graph.activations / MIB:>8,.1f} MiB  {graph.inputs}",
            markup=True,
        )

    target_config = load_target_config(resolve(target or args.target.model))
    speculation, drafter_config, taps = args.speculation, None, ()
    if speculation is not None:
        drafter_config = load_drafter_config(resolve(drafter or speculation.drafter))
        taps = drafter_config.target_layer_ids
    validate_pair(
        target_config,
        drafter_config,
        num_speculative_tokens=args.num_drafts,
        target_tp=args.target.tensor_parallel_size,
        drafter_tp=speculation.tensor_parallel_size if speculation else 1,
        max_model_len=args.max_model_len,
    )
    dtype = DTYPES[args.dtype]
    ranks = args.target.tensor_parallel_size
    console.print(f"Target, rank 0 of {ranks}: [bold]{target or args.target.model}[/]")
    models = [
        lint(
            lambda tp: target_graphs(
                target_config, args.shapes(args.max_num_seqs), taps, dtype=dtype, tp=tp
            ),
            ranks,
            on_graph=show,
        )
    ]
    fits = [_show_memory(console, models[0], args.logical_nc_config)]
    if speculation is not None and drafter_config is not None:
        shapes = args.shapes(args.max_num_seqs * speculation.verifiers_per_drafter)
        ranks = speculation.tensor_parallel_size
        console.print(f"Drafter, rank 0 of {ranks}: [bold]{drafter or speculation.drafter}[/]")
        models.append(
            lint(
                lambda tp: drafter_graphs(
                    drafter_config, target_config, shapes, dtype=dtype, tp=tp
                ),
                ranks,
                on_graph=show,
            )
        )
        fits.append(_show_memory(console, models[1], args.logical_nc_config))
    violations = [violation for model in models for violation in model.violations]
    for violation in violations:
        console.print(f"  {violation}", markup=False)
    graphs = sum(len(model.graphs) for model in models)
    console.print(f"{graphs} graphs, {len(violations)} violations")
    return not violations and all(fits)


def _show_memory(console: Console, model: CheckedModel, logical_nc_config: int) -> bool:
    """Print what a rank holds; whether it fits a logical core."""
    held, room = model.footprint, core_bytes(logical_nc_config)
    fits = held.total <= room
    console.print(
        f"  per core: weights {held.parameters / GIB:.2f} GiB, keys and values "
        f"{held.caches / MIB:.1f} MiB, tables {held.tables / MIB:.1f} MiB, intermediate results "
        f"at most {held.activations / MIB:.1f} MiB: {held.total / GIB:.2f} of {room / GIB:.0f} GiB "
        f"({held.total / room:.0%}){'' if fits else ': too much'}"
    )
    return fits


if __name__ == "__main__":
    app()
