"""Training steps and their checkpoints.

Shape legend: B conversations, S positions, A anchors, L block length, K = L - 1 drafts, M predicted
tokens (B * A * K), H hidden, F feature width, W = F + H.
"""

from __future__ import annotations

import json
import os
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import torch
from torch import Tensor, nn

from dflash_core.drafter import DFlashDrafter, TargetVocabulary
from dflash_core.training.batches import Batch, BatchSource
from dflash_core.training.errors import TrainingError
from dflash_core.training.forward import draft_hidden
from dflash_core.training.loss import (
    DistilledCrossEntropy,
    LossVocabulary,
    StepVocabulary,
    position_weights,
)
from dflash_core.training.optimizer import MasterWeights
from dflash_core.training.settings import OptimizationSettings
from dflash_core.training.workers import Workers


@dataclass(frozen=True)
class StepReport:
    """Attributes:
    step: from 0.
    loss: weighted by position.
    accuracy: of each draft position, regardless of the ones before it.
    length: expected tokens per step, 1 + drafts right up to the first wrong one.
    gradient_norm: before clipping.
    """

    step: int
    loss: float
    accuracy: tuple[float, ...]
    length: float
    gradient_norm: float


class Trainer:
    """Args:

    model: the drafter to train, in its compute dtype; its weights are overwritten.
    masters: float32 weights to start from, by name.
    vocabulary: the target's embedding and head, frozen.
    batches: data.
    counts: int64 `[vocab]`, frequency of each token in the answers.
    settings: of this run.
    workers: share the conversations of a step.
    """

    def __init__(
        self,
        model: DFlashDrafter,
        masters: dict[str, Tensor],
        vocabulary: TargetVocabulary,
        batches: BatchSource,
        counts: Tensor,
        settings: OptimizationSettings,
        workers: Workers,
    ) -> None:
        self.model = model.requires_grad_(True)
        self.workers = workers
        self.vocabulary = vocabulary
        self.batches = batches
        self.settings = settings
        self.optimizer = MasterWeights(model, masters, settings)
        self.loss_vocabulary = LossVocabulary(
            head_weight(vocabulary), counts, frequent=settings.frequent, sampled=settings.sampled
        )
        self.weights_K = position_weights(model.config.block_size, settings.decay)
        self.step = 0

    def run_step(self) -> StepReport:
        """One optimizer step on the next batch."""
        batch = self.batches.batch(self.step)
        random = torch.Generator().manual_seed(self.settings.seed * 1_000_003 + self.step)
        vocabulary = self.loss_vocabulary.choose(batch.labels_BAK, random)
        parameters = list(self.optimizer.parameters.values())

        def run(rows: slice) -> tuple[Tensor, Tensor, tuple[Tensor, ...]]:
            loss, correct_BAK = self.loss(batch.part(rows), vocabulary)
            return loss.detach(), correct_BAK, torch.autograd.grad(loss, parameters)

        parts = self.workers.map(run, self.workers.split(len(batch.anchors_BA)))
        losses, correct, gradients = zip(*parts, strict=True)
        norm = self.optimizer.step(self.step, list(gradients))
        loss = torch.stack(losses).mean()
        report = _report(self.step, loss, torch.cat(correct), batch.valid_BAK, norm)
        self.step += 1
        return report

    def loss(self, batch: Batch, vocabulary: StepVocabulary) -> tuple[Tensor, Tensor]:
        """(loss, correct bool `[B, A, K]`)."""
        H = self.model.config.hidden_size
        features_BSW = batch.features_BSW.to(head_weight(self.vocabulary).dtype)
        features_BSF, final_BSH = features_BSW.split((features_BSW.shape[-1] - H, H), -1)
        hidden_BAKH = self._draft(features_BSF, batch)[:, :, 1:]
        valid = batch.valid_BAK
        share = self.settings.teacher
        teacher_MH = None
        if share > 0:
            # The target's state at position p gives its distribution of the token at p + 1.
            offsets_K = torch.arange(valid.shape[-1])
            before_BAK = (batch.anchors_BA[..., None] + offsets_K).clamp(max=final_BSH.shape[1] - 1)
            rows_B11 = torch.arange(len(final_BSH))[:, None, None]
            teacher_MH = final_BSH[rows_B11, before_BAK].flatten(0, 2)
        loss, correct_M = DistilledCrossEntropy.apply(
            hidden_BAKH.flatten(0, 2),
            teacher_MH,
            vocabulary.head_VH,
            vocabulary.index[batch.labels_BAK.flatten()],
            (self.weights_K[: valid.shape[-1]] * valid).flatten(0, 1),
            share,
            self.settings.chain,
        )
        return loss, correct_M.view_as(valid) & valid

    def _draft(self, features_BSF: Tensor, batch: Batch) -> Tensor:
        B, A, K = batch.labels_BAK.shape
        tokens_BAL = torch.full((B, A, 1 + K), self.model.config.mask_token_id)
        tokens_BAL[..., 0] = batch.anchor_tokens_BA
        x_BALH = self.vocabulary.embed_tokens(tokens_BAL)
        hidden_BALH = draft_hidden(self.model, features_BSF, x_BALH, batch.anchors_BA)
        return self.model.norm(hidden_BALH)

    def save(self, path: Path, fingerprint: dict[str, object]) -> None:
        """Write the state atomically. Raises TrainingError; the checkpoint before it stays."""
        state = {"step": self.step, "fingerprint": fingerprint, **self.optimizer.state_dict()}
        temporary = path.with_suffix(".tmp")
        try:
            with temporary.open("wb") as file:
                torch.save(state, file)
                file.flush()
                os.fsync(file.fileno())
        except (OSError, RuntimeError) as error:
            temporary.unlink(missing_ok=True)
            raise TrainingError(
                f"{path}: cannot be written ({error}); the checkpoint before it is kept: make room "
                "and run the same command again"
            ) from error
        temporary.replace(path)

    def resume(self, path: Path, fingerprint: dict[str, object]) -> None:
        """Go on where a checkpoint ends. Raises TrainingError if it is of another run."""
        state = torch.load(path, weights_only=True)
        if state["fingerprint"] != fingerprint:
            changed = sorted(
                name
                for name in fingerprint.keys() | state["fingerprint"].keys()
                if fingerprint.get(name) != state["fingerprint"].get(name)
            )
            raise TrainingError(
                f"{path}: was written with other settings ({', '.join(changed)}); restore them, or "
                "give this run a folder of its own"
            )
        self.optimizer.load_state_dict(state)
        self.step = state["step"]


def train(
    trainer: Trainer, checkpoint: Path, log: Path, fingerprint: dict[str, object]
) -> Iterator[StepReport]:
    """Resume if there is a checkpoint, and run to the end, saving now and then.

    One JSON line per step goes to `log`; after a resumption, steps may occur twice there.
    """
    if checkpoint.exists():
        trainer.resume(checkpoint, fingerprint)
    with log.open("a", encoding="utf-8") as file:
        while trainer.step < trainer.settings.steps:
            report = trainer.run_step()
            file.write(json.dumps(vars(report)) + "\n")
            file.flush()
            if trainer.step % trainer.settings.save_every == 0:
                trainer.save(checkpoint, fingerprint)
            yield report
    trainer.save(checkpoint, fingerprint)


def head_weight(vocabulary: TargetVocabulary) -> Tensor:
    """The head `[vocab, H]`, which for many targets is the embedding."""
    head: nn.Module = vocabulary.lm_head or vocabulary.embed_tokens
    return head.weight


def _report(
    step: int, loss: Tensor, correct_BAK: Tensor, valid_BAK: Tensor, norm: float
) -> StepReport:
    right = correct_BAK.float().cumprod(-1).sum() / valid_BAK[..., 0].sum()
    accuracy = correct_BAK.sum((0, 1)) / valid_BAK.sum((0, 1)).clamp(min=1)
    return StepReport(
        step,
        round(loss.item(), 5),
        tuple(round(value, 4) for value in accuracy.tolist()),
        round(1 + right.item(), 4),
        round(norm, 4),
    )
