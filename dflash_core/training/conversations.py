"""The training set: one conversation per line of a JSONL file, as token ids.

Append-only. A process killed in the middle of a line leaves a line without its newline; the next
writer cuts it off and every reader ignores it, so nothing that was completed is ever lost.
"""

from __future__ import annotations

import json
import os
from collections.abc import Iterator
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from dflash_core.training.errors import TrainingError


@dataclass(frozen=True)
class Conversation:
    """A prompt in the target's chat template and the target's own answer.

    Attributes:
        tokens: prompt and answer.
        answer: index of the first token of the answer.
        greedy: the answer is the target's greedy continuation (else sampled).
    """

    tokens: tuple[int, ...]
    answer: int
    greedy: bool

    @property
    def prompt(self) -> tuple[int, ...]:
        return self.tokens[: self.answer]

    @classmethod
    def parse(cls, line: str) -> Conversation:
        """Raises ValueError."""
        raw = json.loads(line)
        if not isinstance(raw, dict) or raw.keys() != {"tokens", "answer", "greedy"}:
            raise ValueError("not an object with exactly the fields tokens, answer, greedy")
        tokens, answer, greedy = raw["tokens"], raw["answer"], raw["greedy"]
        if not isinstance(tokens, list) or not all(_is_id(token) for token in tokens):
            raise ValueError("tokens is not a list of token ids")
        if not _is_id(answer) or not 1 <= answer < len(tokens):
            raise ValueError(f"answer = {answer!r} is not within 1..{len(tokens) - 1}")
        if not isinstance(greedy, bool):
            raise ValueError(f"greedy = {greedy!r} is not true or false")
        return cls(tuple(tokens), answer, greedy)

    def line(self) -> str:
        return json.dumps(asdict(self), separators=(",", ":")) + "\n"


def read_conversations(path: Path) -> Iterator[Conversation]:
    """All complete lines. Raises TrainingError on a line that is complete but wrong."""
    with path.open(encoding="utf-8") as file:
        for number, line in enumerate(file, start=1):
            if not line.endswith("\n"):
                return
            try:
                yield Conversation.parse(line)
            except ValueError as error:
                raise TrainingError(
                    f"{path}, line {number}: {error}; correct or delete this line"
                ) from error


class ConversationWriter:
    """Appends conversations to a file, after repairing what a killed writer left behind."""

    def __init__(self, path: Path) -> None:
        path.parent.mkdir(parents=True, exist_ok=True)
        self.path = path
        self._file: Any = path.open("ab", buffering=0)
        complete = _length_of_complete_lines(path)
        if complete < path.stat().st_size:
            self._file.truncate(complete)

    def append(self, conversations: list[Conversation]) -> None:
        """Write whole lines and hand them to the system. Raises TrainingError on a full disk."""
        data = "".join(conversation.line() for conversation in conversations).encode()
        try:
            while data:
                data = data[self._file.write(data) :]
        except OSError as error:
            raise TrainingError(
                f"{self.path}: cannot be written ({os.strerror(error.errno or 0)}); all complete "
                "lines are kept: make room and run the same command again"
            ) from error

    def __enter__(self) -> ConversationWriter:
        return self

    def __exit__(self, *exception: object) -> None:
        self._file.close()


def _is_id(value: object) -> bool:
    return isinstance(value, int) and not isinstance(value, bool) and value >= 0


def _length_of_complete_lines(path: Path) -> int:
    length = 0
    with path.open("rb") as file:
        for line in file:
            if line.endswith(b"\n"):
                length += len(line)
    return length
