"""Prompts: ten hand-written ones of different kinds, and many from the packaged conversations."""

from __future__ import annotations

import lzma
from pathlib import Path

from dflash_core.training.conversations import Conversation
from dflash_core.training.corpus import PARTS

PROMPTS = {
    "code": "Write a Python function that returns the n-th Fibonacci number.",
    "list": "List ten animals that live in the sea.",
    "story": "Tell a short story about a lighthouse keeper and a lost ship.",
    "maths": "A train travels 60 miles in 1.5 hours. What is its average speed? Explain.",
    "translation": "Translate into French: Good morning, how are you today?",
    "explanation": "Explain why the sky is blue.",
    "email": "Write a polite email asking a colleague to move a meeting to Friday.",
    "summary": "Summarise the plot of Romeo and Juliet in three sentences.",
    "advice": "How can I sleep better at night?",
    "facts": "What are the planets of the solar system, in order?",
}

CONVERSATIONS = Path(__file__).parents[2] / "dflash_core/drafters/smollm2-135m-dflash/conversations"


def conversation_prompts(count: int) -> list[list[int]]:
    """Different prompts as token ids, from the packaged drafter's held-out and training sets.

    Raises ValueError: there are not so many.
    """
    prompts: dict[tuple[int, ...], None] = {}
    for part in reversed(PARTS):
        for line in lzma.decompress((CONVERSATIONS / f"{part}.jsonl.xz").read_bytes()).splitlines():
            if len(prompts) == count:
                return list(map(list, prompts))
            prompts[Conversation.parse(line.decode()).prompt] = None
    raise ValueError(f"{count} prompts wanted, but the packaged conversations have {len(prompts)}")
