"""One streamed answer of a served application, timed."""

from __future__ import annotations

import json
import time
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass

from tests.serve.application import Application


@dataclass(frozen=True)
class Answer:
    """Tokens, seconds to the first and to the last, tokens per step."""

    text: str
    tokens: int
    first_s: float
    total_s: float
    acceptance_length: float

    @property
    def tokens_per_s(self) -> float:
        """Decode speed: tokens after the first, over the time after the first."""
        return (self.tokens - 1) / (self.total_s - self.first_s)


def ask(app: Application, prompt: str, max_tokens: int) -> Answer:
    body = {
        "messages": [{"role": "user", "content": prompt}],
        "temperature": 0,
        "max_tokens": max_tokens,
        "ignore_eos": True,
        "stream": True,
        "stream_options": {"include_usage": True},
    }
    began, first, text, tokens, acceptance = time.perf_counter(), 0.0, "", 0, 0.0
    with app.http.stream("POST", "/v1/chat/completions", json=body) as response:
        response.raise_for_status()
        for line in response.iter_lines():
            if not line.startswith("data: {"):
                continue
            chunk = json.loads(line.removeprefix("data: "))
            if chunk["choices"]:
                first = first or time.perf_counter() - began
                text += chunk["choices"][0]["delta"].get("content") or ""
                if metrics := chunk.get("metrics"):
                    steps = max(1, metrics["num_decode_steps"])
                    acceptance = metrics["num_decode_tokens"] / steps
            else:
                tokens = chunk["usage"]["completion_tokens"]
    return Answer(text, tokens, first, time.perf_counter() - began, acceptance)


def ask_together(
    app: Application, prompts: Sequence[str], max_tokens: int
) -> tuple[list[Answer], float]:
    """The answers to prompts that come at once, and their tokens per second, all together."""
    began = time.perf_counter()
    with ThreadPoolExecutor(len(prompts)) as pool:
        answers = list(pool.map(lambda prompt: ask(app, prompt, max_tokens), prompts))
    elapsed = time.perf_counter() - began
    return answers, sum(answer.tokens for answer in answers) / elapsed
