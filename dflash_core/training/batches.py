"""What one training step sees: a function of the seed and the step number alone.

So a killed run resumes with the same data in the same order, without any state of its own.

Shape legend: B conversations, S positions (context), A anchors per conversation, L block length,
K = L - 1 drafts, W feature width.
"""

from __future__ import annotations

from dataclasses import dataclass, fields

import numpy as np
import torch
from torch import Tensor

from dflash_core.training.conversations import Conversation
from dflash_core.training.features import FeatureFile

POOL = 32  # batches whose conversations are sorted by length together, so that little is padding


@dataclass(frozen=True)
class Batch:
    """Blocks to predict, and everything they may look at.

    Attributes:
        features_BSW: bfloat16; rows beyond a conversation's end are zero.
        anchors_BA: int64 positions of the blocks' first tokens.
        anchor_tokens_BA: int64.
        labels_BAK: int64 tokens at anchor + 1 .. anchor + K (0 where there is none).
        valid_BAK: bool, where there is a label.
    """

    features_BSW: Tensor
    anchors_BA: Tensor
    anchor_tokens_BA: Tensor
    labels_BAK: Tensor
    valid_BAK: Tensor

    def part(self, rows: slice) -> Batch:
        """Some of its conversations."""
        return Batch(*(getattr(self, each.name)[rows] for each in fields(self)))


class BatchSource:
    """Batches of random anchors inside the answers.

    Args:
        conversations: those with an answer of at least two tokens take part.
        features: theirs.
        width: W.
        batch_size: B.
        anchors: A; fewer where all answers of a batch are shorter.
        block_size: L.
        short: share of the steps that have blocks of half as many drafts.
        seed: of order, anchors and block lengths.
    """

    def __init__(
        self,
        conversations: list[Conversation],
        features: FeatureFile,
        *,
        width: int,
        batch_size: int,
        anchors: int,
        block_size: int,
        short: float = 0.0,
        seed: int,
    ) -> None:
        self.conversations = conversations
        self.features = features
        self.width = width
        self.batch_size = batch_size
        self.anchors = anchors
        self.block_size = block_size
        self.short = short
        self.seed = seed
        self.usable = np.array(
            [i for i, c in enumerate(conversations) if len(c.tokens) - c.answer >= 2]
        )
        self.batches_per_epoch = len(self.usable) // batch_size
        self._epoch = -1
        self._order: list[np.ndarray] = []

    def batch(self, step: int) -> Batch:
        """The batch of a step (from 0)."""
        epoch, index = divmod(step, self.batches_per_epoch)
        if epoch != self._epoch:
            self._epoch, self._order = epoch, self._shuffled(epoch)
        random = np.random.default_rng((self.seed, 1, step))
        chosen = self._order[index]
        conversations = [self.conversations[i] for i in chosen]
        S = max(len(c.tokens) for c in conversations)
        A = min(self.anchors, max(len(c.tokens) - c.answer - 1 for c in conversations))
        features_BSW = torch.zeros((len(chosen), S, self.width), dtype=torch.bfloat16)
        anchors = np.empty((len(chosen), A), dtype=np.int64)
        tokens = np.zeros((len(chosen), S + self.block_size), dtype=np.int64)
        lengths = np.array([len(c.tokens) for c in conversations])
        for row, (i, c) in enumerate(zip(chosen, conversations, strict=True)):
            self.features.read(int(i), features_BSW[row])
            places = np.arange(c.answer, len(c.tokens) - 1)
            anchors[row] = np.sort(random.choice(places, A, replace=len(places) < A))
            tokens[row, : len(c.tokens)] = c.tokens
        drafts = self.block_size - 1
        if random.random() < self.short:
            drafts = -(-drafts // 2)
        positions = anchors[..., None] + np.arange(1, 1 + drafts)
        rows = np.arange(len(chosen))
        return Batch(
            features_BSW,
            torch.from_numpy(anchors),
            torch.from_numpy(tokens[rows[:, None], anchors]),
            torch.from_numpy(tokens[rows[:, None, None], positions]),
            torch.from_numpy(positions < lengths[:, None, None]),
        )

    def _shuffled(self, epoch: int) -> list[np.ndarray]:
        random = np.random.default_rng((self.seed, 0, epoch))
        count = self.batches_per_epoch * self.batch_size
        order = random.permutation(self.usable)[:count]
        lengths = np.array([len(c.tokens) for c in self.conversations])
        batches = []
        for begin in range(0, count, POOL * self.batch_size):
            pool = order[begin : begin + POOL * self.batch_size]
            pool = pool[np.argsort(lengths[pool], kind="stable")]
            batches += np.split(pool, len(pool) // self.batch_size)
        random.shuffle(batches)
        return batches
