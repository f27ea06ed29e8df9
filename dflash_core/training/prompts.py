"""How a user's words become a prompt of the target: its chat template, taken apart."""

from __future__ import annotations

import json
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from dflash_core.training.errors import TrainingError

PLACEHOLDER = "\u2042question\u2042"  # a text that no template contains


@dataclass(frozen=True)
class ChatTemplate:
    """Token ids around the user's words.

    Attributes:
        head: what precedes them (the system prompt and the opening of the user's turn).
        bridge: what follows them, up to where the answer begins; its first token ends a question.
    """

    head: tuple[int, ...]
    bridge: tuple[int, ...]

    @classmethod
    def of(cls, tokenizer: Any) -> ChatTemplate:
        """Raises TrainingError: there is no template, or one that changes the user's words."""
        if not getattr(tokenizer, "chat_template", None):
            raise TrainingError(
                "the target's tokenizer has no chat template, so prompts cannot be made from it; "
                "use an instruction-tuned model, or add chat_template.jinja to the target's folder"
            )
        text = tokenizer.apply_chat_template(
            [{"role": "user", "content": PLACEHOLDER}], add_generation_prompt=True, tokenize=False
        )
        if text.count(PLACEHOLDER) != 1:
            raise TrainingError(
                "the target's chat template does not show the user's message exactly once, "
                "unchanged; use a template that does"
            )
        head, bridge = (
            tuple(tokenizer.encode(part, add_special_tokens=False))
            for part in text.split(PLACEHOLDER)
        )
        if not head or not bridge:
            raise TrainingError("the target's chat template puts nothing around the user's message")
        return cls(head, bridge)

    def prompt(self, question: tuple[int, ...]) -> tuple[int, ...]:
        return self.head + question + self.bridge


def read_prompts(path: Path) -> Iterator[str]:
    """User messages from a file: one per line, or for *.jsonl the field `prompt` of each line.

    Raises TrainingError, naming the line.
    """
    with path.open(encoding="utf-8") as file:
        for number, line in enumerate(file, start=1):
            if not line.strip():
                continue
            if path.suffix != ".jsonl":
                yield line.strip()
                continue
            try:
                prompt = json.loads(line)["prompt"]
            except (ValueError, KeyError, TypeError) as error:
                raise TrainingError(
                    f'{path}, line {number}: is not an object with the field "prompt"'
                ) from error
            if not isinstance(prompt, str) or not prompt:
                raise TrainingError(f"{path}, line {number}: prompt is {prompt!r}, not a text")
            yield prompt
