"""Times and traffic of one stage (verify or draft), as the Router sees them."""

from __future__ import annotations

from dataclasses import asdict, dataclass
from typing import Any

from dflash_core.messages import Span


@dataclass
class StageTimes:
    """Sums over the steps of one model replica.

    Attributes:
        steps: plans executed.
        rows: tokens run (verify) or features injected (draft).
        model_seconds: inside the worker.
        send_seconds: from handing a plan over until the worker begins.
        receive_seconds: from the worker's end until the Router has the result.
        feature_bytes: hidden states moved, out of the target or into the drafter.
    """

    steps: int = 0
    rows: int = 0
    model_seconds: float = 0.0
    send_seconds: float = 0.0
    receive_seconds: float = 0.0
    feature_bytes: int = 0

    def record(
        self, *, span: Span, began: float, received: float, rows: int, feature_bytes: int
    ) -> None:
        """Count one step: handed over at `began`, answered at `received`."""
        self.steps += 1
        self.rows += rows
        self.model_seconds += span.seconds
        self.send_seconds += span.began - began
        self.receive_seconds += received - span.ended
        self.feature_bytes += feature_bytes

    def add(self, other: StageTimes) -> None:
        """Add the sums of `other` to these."""
        for name, value in asdict(other).items():
            setattr(self, name, getattr(self, name) + value)

    @property
    def transfer_seconds(self) -> float:
        return self.send_seconds + self.receive_seconds

    def as_dict(self) -> dict[str, Any]:
        """The sums, and milliseconds per step, ready for JSON."""
        steps = max(1, self.steps)
        return asdict(self) | {
            "model_ms_per_step": 1e3 * self.model_seconds / steps,
            "transfer_ms_per_step": 1e3 * self.transfer_seconds / steps,
        }
