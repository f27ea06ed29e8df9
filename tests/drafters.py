"""Drafters with a behaviour that a test wants, plugged in through `speculation.runner`."""

from __future__ import annotations

import json
import time
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np

from dflash_core.drafter_runner import DrafterRunner
from dflash_core.messages import DraftPlan, DraftResult, Span
from dflash_core.shapes import StaticShapes

REPLAY_FILE = "replay.json"
RECORD_FILE = "drafts-{}.jsonl"  # by prefill chunk
SLOW_SECONDS = 2.0


def record_drafts(drafter: DrafterRunner) -> list[list[int]]:
    """What this drafter proposes from now on, in this process: the list grows."""
    drafts, draft = [], drafter.draft

    def recording(plan: DraftPlan) -> DraftResult:
        result = draft(plan)
        drafts.extend(result.tokens)
        return result

    drafter.draft = recording
    return drafts


class SlowDrafter(DrafterRunner):
    """The real drafter, two seconds late whenever it drafts."""

    def draft(self, plan: DraftPlan) -> DraftResult:
        if len(plan.tokens) and plan.slots[0] < self.shapes.num_slots:
            time.sleep(SLOW_SECONDS)
        return super().draft(plan)


class RecordingDrafter(DrafterRunner):
    """The real drafter, which also writes down what it proposes: one JSON list per line."""

    @classmethod
    def load(cls, folder: Path, *args: Any, **options: Any) -> DrafterRunner:
        runner = super().load(folder, *args, **options)
        runner.record = folder / RECORD_FILE.format(runner.shapes.prefill_chunk)
        return runner

    def draft(self, plan: DraftPlan) -> DraftResult:
        result = super().draft(plan)
        if len(plan.tokens) and plan.slots[0] < self.shapes.num_slots:
            with self.record.open("a") as file:
                file.writelines(json.dumps(drafts) + "\n" for drafts in result.tokens)
        return result


class NonsenseDrafter(DrafterRunner):
    """Proposes tokens that do not exist."""

    def draft(self, plan: DraftPlan) -> DraftResult:
        result = super().draft(plan)
        if len(plan.tokens) and plan.slots[0] < self.shapes.num_slots:
            nonsense = [[10**6] * plan.num_drafts for _ in result.tokens]
            return replace(result, tokens=nonsense)
        return result


class ReplayDrafter:
    """Proposes what the baseline is known to say: every draft is right.

    The folder of the drafter holds `replay.json`, a list of whole sequences (prompt and output),
    whose prompts differ in length. A sequence is recognised by the position and the token of its
    first draft, and then followed by its slot.
    """

    def __init__(self, sequences: list[list[int]], prompt_lengths: list[int], shapes: StaticShapes):
        self.shapes = shapes
        self.known = dict(zip(prompt_lengths, sequences, strict=True))
        assert len(self.known) == len(sequences), "prompts must differ in length"
        self.following: dict[int, list[int]] = {}

    @classmethod
    def load(
        cls, folder: Path, target_folder: Path, shapes: StaticShapes, **_: Any
    ) -> ReplayDrafter:
        replay = json.loads((folder / REPLAY_FILE).read_text())
        return cls(replay["sequences"], replay["prompt_lengths"], shapes)

    def warm_up(self) -> None:
        pass

    def draft(self, plan: DraftPlan) -> DraftResult:
        began = time.monotonic()
        for slot, position in zip(plan.row_slots, plan.row_positions, strict=True):
            if position == 0:
                self.following.pop(int(slot), None)
        drafts = []
        for slot, start, token in zip(plan.slots, plan.starts, plan.tokens, strict=True):
            sequence = self.following.setdefault(int(slot), self.known.get(int(start), []))
            known = sequence[start : start + plan.num_drafts + 1]
            assert not known or known[0] == token, "the served output left the baseline's"
            guess = np.zeros(plan.num_drafts, dtype=np.int32)
            guess[: len(known[1:])] = known[1:]
            drafts.append(guess.tolist())
        return DraftResult(drafts, Span(began, time.monotonic()))
