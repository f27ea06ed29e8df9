"""Request bodies made from the OpenAPI schema: mostly plausible, often wrong, sometimes absurd."""

from __future__ import annotations

import random
from typing import Any

ODD = (None, True, False, 0, -1, 1, 2**31, 2**63, 2**70, -0.5, 1e308, "", "5", "a" * 5000, [], {},
       [[]], [None], {"": None}, "\x00", "\ud800", "😀", [0] * 300)  # fmt: skip
LONG_OUTPUT = {"max_tokens", "max_completion_tokens", "n", "min_tokens"}


class Fuzzer:
    """Args:

    schema: of the whole API (`/openapi.json`).
    seed: the same seed, the same bodies.
    wrong: share of values that have nothing to do with the schema.
    """

    def __init__(self, schema: dict[str, Any], seed: int, wrong: float = 0.02) -> None:
        self.schema = schema
        self.chance = random.Random(seed)
        self.wrong = wrong

    def body(self, path: str) -> Any:
        """A body for `POST path`."""
        content = self.schema["paths"][path]["post"]["requestBody"]["content"]
        return self.value(content["application/json"]["schema"], "")

    def value(self, schema: dict[str, Any], name: str, depth: int = 0) -> Any:
        if self.chance.random() < self.wrong or depth > 6:
            return self.chance.choice(ODD)
        if "$ref" in schema:
            return self.value(self._resolve(schema["$ref"]), name, depth)
        if "anyOf" in schema:
            return self.value(self.chance.choice(schema["anyOf"]), name, depth)
        for fixed in ("const", "default"):
            if fixed in schema and self.chance.random() < 0.5:
                return schema[fixed]
        make = getattr(self, "_" + schema.get("type", "any"), self._any)
        return make(schema, name, depth)

    def _resolve(self, reference: str) -> dict[str, Any]:
        found: Any = self.schema
        for part in reference.removeprefix("#/").split("/"):
            found = found[part]
        return found

    def _object(self, schema: dict[str, Any], name: str, depth: int) -> dict[str, Any]:
        required = schema.get("required", ())
        made = {
            key: self.value(part, key, depth + 1)
            for key, part in schema.get("properties", {}).items()
            if self.chance.random() < (0.98 if key in required else 0.06)
        }
        if schema.get("additionalProperties") and self.chance.random() < 0.15:
            key = self.chance.choice(("7", "49151", "99999", "-1", "x", "tools", "suffix", "echo"))
            made[key] = self.chance.choice(ODD)
        return made

    def _array(self, schema: dict[str, Any], name: str, depth: int) -> list[Any]:
        items = schema.get("items", {})
        length = self.chance.choice((0, 1, 1, 1, 2, 2, 3))
        return [self.value(items, name, depth + 1) for _ in range(length)]

    def _string(self, schema: dict[str, Any], name: str, depth: int) -> str:
        return self.chance.choice(
            ("a", "Hi there", "user", "assistant", "text", "\n", "é😀", "x" * 40)
        )

    def _integer(self, schema: dict[str, Any], name: str, depth: int) -> int:
        if name in LONG_OUTPUT:
            return self.chance.choice((0, 1, 1, 2, 2, 3, 5))
        return self.chance.choice((-1, 0, 0, 1, 1, 2, 2, 5, 20, 49151, 49152))

    def _number(self, schema: dict[str, Any], name: str, depth: int) -> float:
        return self.chance.choice((-0.1, 0.0, 1e-6, 0.1, 0.5, 0.9, 1.0, 1.5, 2.1))

    def _boolean(self, schema: dict[str, Any], name: str, depth: int) -> bool:
        return self.chance.random() < 0.5

    def _any(self, schema: dict[str, Any], name: str, depth: int) -> Any:
        return self.chance.choice(ODD)
