"""Acceptance of a drafter in the real decode loop, per kind of prompt, and its plot."""

from __future__ import annotations

import time
import zlib
from collections.abc import Iterator
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import torch
from rich.table import Table

from dflash_core.drafter_runner import DrafterRunner
from dflash_core.engine import generate
from dflash_core.request import GenerationRequest
from dflash_core.sampling import GREEDY, SamplingParams
from dflash_core.shapes import StaticShapes
from dflash_core.statistics import AcceptanceStatistics
from dflash_core.stopping import Stopping
from dflash_core.target_runner import TargetRunner
from dflash_core.training.errors import TrainingError

# Ten prompts of different kinds, written by hand; the drafter has seen none of them.
HAND_WRITTEN = {
    "code": "Write a Python function that checks whether a string is a palindrome.",
    "list": "List ten things to pack for a week of camping in the mountains.",
    "story": "Tell me a short story about a lighthouse keeper who finds a message in a bottle.",
    "maths": "A train travels 180 km in 2.5 hours. What is its average speed? Explain each step.",
    "translation": "Translate into French: The library opens at nine and closes at six.",
    "explanation": "Explain to a ten-year-old why the sky is blue.",
    "letter": "Write a polite email to my landlord asking to repair the heating.",
    "summary": "Summarise the story of Romeo and Juliet in three sentences.",
    "comparison": "What are the differences between a virus and a bacterium?",
    "advice": "How can I learn to play the guitar as an adult with little free time?",
}


@dataclass(frozen=True)
class Evaluation:
    """Attributes:
    name: of the set of prompts.
    prompts: how many.
    statistics: summed over them.
    seconds: of wall time, prefill included.
    temperature: 0 for greedy decoding.
    """

    name: str
    prompts: int
    statistics: AcceptanceStatistics
    seconds: float
    temperature: float = 0.0

    def as_dict(self) -> dict[str, Any]:
        statistics = self.statistics.as_dict()
        steps = max(1, self.statistics.num_steps)
        return {
            "name": self.name,
            "prompts": self.prompts,
            "seconds": round(self.seconds, 2),
            "temperature": self.temperature,
            "tokens_per_step": self.statistics.num_tokens / steps,
            **statistics,
        }


class Evaluator:
    """Target and drafter as they are served, in this process.

    Args:
        target_folder, drafter_folder: checkpoints.
        tokenizer: the target's.
        num_drafts: K.
        max_tokens: of each answer.
        slots: prompts at a time; acceptance does not depend on it.
        longest_prompt: in tokens.
        dtype: that both run in.
        sampling: how tokens are chosen. Each prompt gets a seed of its own.
    """

    def __init__(
        self,
        target_folder: Path,
        drafter_folder: Path,
        tokenizer: Any,
        *,
        num_drafts: int,
        max_tokens: int,
        slots: int,
        longest_prompt: int,
        dtype: torch.dtype = torch.bfloat16,
        sampling: SamplingParams = GREEDY,
    ) -> None:
        shapes = StaticShapes.create(
            num_slots=slots, max_model_len=longest_prompt + max_tokens, num_drafts=num_drafts
        )
        self.tokenizer = tokenizer
        self.max_tokens = max_tokens
        self.sampling = sampling
        self.drafter = DrafterRunner.load(drafter_folder, target_folder, shapes, dtype=dtype)
        config = self.drafter.config
        if num_drafts >= config.block_size:
            raise TrainingError(
                f"{num_drafts} drafts do not fit into the drafter's block_size {config.block_size}"
            )
        self.target = TargetRunner.load(
            target_folder, shapes, tapped_layers=config.target_layer_ids, dtype=dtype
        )

    def run(self, sets: dict[str, list[list[int]]]) -> Iterator[Evaluation]:
        """Evaluate named sets of prompts (token ids), one after the other."""
        for name, prompts in sets.items():
            begin = time.monotonic()
            generations = generate(self.target, self.drafter, prompts, self._stopping)
            total = AcceptanceStatistics()
            for generation in generations:
                total.add(generation.statistics)
            seconds = time.monotonic() - begin
            yield Evaluation(name, len(prompts), total, seconds, self.sampling.temperature)

    def _stopping(self, prompt: list[int]) -> Stopping:
        sampling = replace(
            self.sampling, seed=self.sampling.seed + zlib.crc32(repr(prompt).encode())
        )
        return Stopping(
            self.tokenizer,
            GenerationRequest("evaluation", prompt, self.max_tokens, sampling=sampling),
            eos_token_ids=self.target.config.eos_token_ids,
            max_model_len=self.target.shapes.max_model_len,
        )


def together(name: str, parts: list[Evaluation]) -> Evaluation:
    """The sum of several sets, as one."""
    total = AcceptanceStatistics()
    for part in parts:
        total.add(part.statistics)
    prompts, seconds = sum(p.prompts for p in parts), sum(p.seconds for p in parts)
    return Evaluation(name, prompts, total, seconds, parts[0].temperature)


def as_table(evaluations: list[Evaluation]) -> Table:
    """Per set: acceptance length, tokens per step, and the share of steps that accept draft i."""
    table = Table("prompts", "number", "acceptance length", "tokens per step", "per position")
    for evaluation in evaluations:
        values: dict[str, Any] = evaluation.as_dict()
        drafts = max(1, values["num_drafts"])
        table.add_row(
            evaluation.name,
            str(evaluation.prompts),
            f"{values['acceptance_length']:.3f}",
            f"{values['tokens_per_step']:.3f}",
            " ".join(f"{count / drafts:.2f}" for count in values["num_accepted_tokens_per_pos"]),
        )
    return table


def plot(evaluations: list[Evaluation], path: Path) -> None:
    """Acceptance per draft position, one line per set, as a PNG. Raises TrainingError."""
    try:
        from matplotlib.backends.backend_agg import FigureCanvasAgg
        from matplotlib.figure import Figure
    except ImportError as error:
        raise TrainingError("plotting needs matplotlib: pip install -e '.[bench]'") from error
    figure = Figure(figsize=(7, 4), layout="constrained")
    FigureCanvasAgg(figure)
    axes = figure.subplots()
    for evaluation in evaluations:
        statistics = evaluation.statistics
        drafts = max(1, statistics.num_drafts)
        rates = [accepted / drafts for accepted in statistics.accepted_per_position]
        label = f"{evaluation.name}: {statistics.acceptance_length:.2f} tokens per step"
        axes.plot(range(1, len(rates) + 1), rates, marker="o", label=label)
    axes.set_xlabel("draft position")
    axes.set_ylabel("share of steps that accept it")
    axes.set_ylim(0, 1)
    axes.grid(alpha=0.3)
    axes.legend(frameon=False)
    figure.savefig(path, dpi=130)
