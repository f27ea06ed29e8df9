"""`python -m dflash_core.checkpoint MODEL...`: is every named model there and usable?"""

from __future__ import annotations

import logging
import math
from typing import Annotated

import typer
from rich.console import Console
from rich.text import Text

from dflash_core.checkpoint import Checkpoint, load_drafter_config, load_target_config, resolve
from dflash_core.errors import CheckpointError


def describe(model: str) -> str:
    """`folder (kind, parameters, dtype)` of a model, fetched if need be. Raises CheckpointError."""
    folder = resolve(model)
    checkpoint = Checkpoint(folder)
    raw = checkpoint.config
    if "DFlash" in str(raw.get("architectures")) or "speculators_model_type" in raw:
        kind, config = "drafter", load_drafter_config(folder)
    else:
        kind, config = "target", load_target_config(folder)
    parameters = sum(math.prod(checkpoint.shape(name)) for name in checkpoint.names())
    return f"{folder} ({kind}, {parameters / 1e6:,.1f} M parameters, {config.torch_dtype})"


def report(
    models: Annotated[list[str], typer.Argument(help="Hub ids, folders or package:// names")],
) -> None:
    """Fetch each MODEL if need be and report on it; exit status 1 if any cannot be used."""
    logging.basicConfig(level=logging.WARNING, format="%(message)s")
    console = Console(soft_wrap=True, highlight=False)
    failures = 0
    for model in models:
        try:
            console.print(Text.assemble(("OK", "green"), f"  {model} -> {describe(model)}"))
        except CheckpointError as error:
            failures += 1
            console.print(Text.assemble(("FAIL", "red"), f"  {error}"))
    raise typer.Exit(1 if failures else 0)


def main() -> None:
    typer.run(report)
