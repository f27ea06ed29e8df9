"""What every benchmark does with its figures: quartiles, a JSON file, a PNG."""

from __future__ import annotations

import json
import statistics
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from matplotlib.figure import Figure


def quartiles(values: Sequence[float]) -> tuple[float, float, float]:
    """Lower quartile, median, upper quartile; of a single value three times that one."""
    if len(values) == 1:
        return values[0], values[0], values[0]
    low, middle, high = statistics.quantiles(values, n=4, method="inclusive")
    return low, middle, high


def shown(spread: Sequence[float], digits: int) -> str:
    """The median and, in brackets, the quartiles around it."""
    low, middle, high = spread
    return f"{middle:.{digits}f} ({low:.{digits}f}-{high:.{digits}f})"


def write(out: Path, figures: Any, plot: Figure) -> None:
    """OUT.json and OUT.png."""
    out.parent.mkdir(parents=True, exist_ok=True)
    out.with_suffix(".json").write_text(json.dumps(figures, indent=1))
    plot.tight_layout()
    plot.savefig(out.with_suffix(".png"), dpi=150)
