"""What the card of a trained drafter says about its run."""

from __future__ import annotations

import time
from pathlib import Path

from dflash_core.training.project import Project
from dflash_core.training.replay import replay
from dflash_core.training.trainer import Trainer


class Facts:
    """What the model card says about the run so far."""

    def __init__(self, project: Project, answer_tokens: int, conversations: int) -> None:
        self.project = project
        self.answer_tokens = answer_tokens
        self.conversations = conversations
        self.digest = project.target_digest()
        self.began = time.monotonic()

    def export(self, trainer: Trainer, *, measure: bool = False) -> Path:
        weights = trainer.optimizer.result
        lengths = {}
        if measure:
            trainer.optimizer.publish(weights)
        for name, greedy in (("greedy", True), ("temperature 1", False)) if measure else ():
            answers = self.project.held_out_answers(greedy=greedy)
            statistics = replay(trainer.model, trainer.vocabulary, answers)
            if statistics.num_drafts:
                lengths[name] = statistics.acceptance_length
        run = trainer.settings
        return self.project.export(
            weights,
            {
                "target file, SHA-256": self.digest,
                "training set": f"{self.conversations} conversations, "
                f"{self.answer_tokens} tokens of answers",
                "steps": f"{trainer.step} of {run.steps}",
                "seed": run.seed,
                "minutes of this process": round((time.monotonic() - self.began) / 60, 1),
                **{
                    f"held-out acceptance length, {name} (replayed)": f"{length:.3f}"
                    for name, length in lengths.items()
                },
            },
        )
