"""Typed access to the fields of a config.json; every failure names the field and its value."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from dflash_core.errors import ConfigError


class Fields:
    """A raw config, or one object inside it. Null counts as absent. Methods raise ConfigError."""

    def __init__(self, raw: Mapping[str, Any], place: str = "config.json") -> None:
        self.raw = raw
        self.place = place

    def has(self, name: str) -> bool:
        return self.raw.get(name) is not None

    def integer(self, name: str, *, minimum: int = 1) -> int:
        value = self._required(name)
        if isinstance(value, bool) or not isinstance(value, int) or value < minimum:
            raise ConfigError(f"{self.place}: {name} is {value!r}, not an integer >= {minimum}")
        return value

    def number(self, name: str) -> float:
        value = self._required(name)
        if isinstance(value, bool) or not isinstance(value, int | float) or not value > 0:
            raise ConfigError(f"{self.place}: {name} is {value!r}, not a positive number")
        return float(value)

    def boolean(self, name: str, default: bool) -> bool:
        value = self.raw.get(name)
        if value is None:
            return default
        if not isinstance(value, bool):
            raise ConfigError(f"{self.place}: {name} is {value!r}, not true or false")
        return value

    def integers(self, name: str) -> tuple[int, ...]:
        value = self._required(name)
        if not isinstance(value, list) or not value:
            raise ConfigError(f"{self.place}: {name} is {value!r}, not a list of integers")
        for item in value:
            if isinstance(item, bool) or not isinstance(item, int) or item < 0:
                raise ConfigError(f"{self.place}: {name} contains {item!r}, not an integer >= 0")
        return tuple(value)

    def section(self, name: str) -> Fields | None:
        value = self.raw.get(name)
        if value is None:
            return None
        if not isinstance(value, Mapping):
            raise ConfigError(f"{self.place}: {name} is {value!r}, not an object")
        return Fields(value, f"{self.place}: {name}")

    def neutral(self, name: str, *allowed: Any) -> None:
        """Refuse a value that would change the computation; absent and null are fine."""
        value = self.raw.get(name)
        if value is not None and value not in allowed:
            raise ConfigError(
                f"{self.place}: {name} is {value!r}, which is not supported "
                f"(only {' or '.join(repr(item) for item in allowed) or 'its absence'})"
            )

    def _required(self, name: str) -> Any:
        value = self.raw.get(name)
        if value is None:
            raise ConfigError(f"{self.place}: required field {name} is missing")
        return value
