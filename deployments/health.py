"""What the application can do at the moment."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal


@dataclass(frozen=True)
class Health:
    """Attributes:

    status: "degraded" = everything is answered, but without speculation.
    reason: what is missing, unless it is ready.
    """

    status: Literal["ready", "degraded", "unavailable"]
    reason: str | None = None
