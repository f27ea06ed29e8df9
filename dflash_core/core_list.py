"""Cores as a configuration names them: "0-7,16-63"."""

from __future__ import annotations

import re

RANGE = re.compile(r"(\d+)(?:-(\d+))?")


def core_list(text: str, field: str) -> list[int]:
    """The numbers of comma-separated cores and ranges, ascending.

    Raises:
        ValueError: it is something else; the message begins with the field's name.
    """
    cores: list[int] = []
    for part in text.split(","):
        found = RANGE.fullmatch(part.strip())
        if found is None:
            raise ValueError(
                f"{field} = {text!r}: {part!r} is neither a core number nor a range; write them "
                'like "0-7,16-63"'
            )
        first, last = int(found[1]), int(found[2] or found[1])
        if last < first or (cores and first <= cores[-1]):
            raise ValueError(f"{field} = {text!r} must ascend, each core named once")
        cores += range(first, last + 1)
    return cores
