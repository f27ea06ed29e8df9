"""The drafter's loss, fused with the borrowed head and computed in chunks.

Head and softmax over the vocabulary would cost more than the drafter itself, in time and above all
in memory traffic. So (a) the head takes part with a subset of the vocabulary only: the most
frequent tokens, all labels of the batch and a random sample of the rest; (b) loss and gradient are
computed together, chunk by chunk, so that no logits outlive their chunk (as in Liger Kernel,
arXiv 2410.10989; the head is frozen, so the gradient of the hidden states is all there is).

Shape legend: M predicted tokens, H hidden, V subset of the vocabulary.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

CHUNK = 256  # rows; their float32 logits fit into the processor's cache


class DistilledCrossEntropy(torch.autograd.Function):
    """Mean over rows of weight * cross entropy against a mixture of label and teacher.

    Arguments of `apply`: hidden `[M, H]`; teacher `[M, H]`, the target's hidden states for the same
    positions (None without distillation); head `[V, H]`; labels int64 `[M]`, indices into the head;
    weights float32 `[M]`, summing to 1; the share of the teacher. Returns (loss, correct): a
    float32 scalar and bool `[M]`, whether the argmax is the label.
    """

    @staticmethod
    def forward(
        ctx: Any,
        hidden: Tensor,
        teacher: Tensor | None,
        head: Tensor,
        labels: Tensor,
        weights: Tensor,
        share: float,
    ) -> tuple[Tensor, Tensor]:
        loss = torch.zeros((), dtype=torch.float32)
        correct = torch.empty(len(labels), dtype=torch.bool)
        gradient = torch.empty_like(hidden)
        for begin in range(0, len(labels), CHUNK):
            rows = slice(begin, begin + CHUNK)
            wanted, weight = labels[rows, None], weights[rows, None]
            logits = (hidden[rows] @ head.T).float()
            correct[rows] = logits.argmax(-1) == wanted[:, 0]
            logits -= torch.logsumexp(logits, -1, keepdim=True)
            hard = logits.gather(1, wanted)
            difference = logits.exp()
            if teacher is None:
                loss -= (weight * hard).sum()
                difference.scatter_add_(1, wanted, torch.full_like(hard, -1.0))
            else:
                soft = torch.softmax((teacher[rows] @ head.T).float(), -1)
                soft_loss = torch.linalg.vecdot(soft, logits)[:, None]
                loss -= (weight * ((1 - share) * hard + share * soft_loss)).sum()
                difference.sub_(soft, alpha=share)
                difference.scatter_add_(1, wanted, torch.full_like(hard, share - 1.0))
            torch.mm((difference * weight).to(head.dtype), head, out=gradient[rows])
        ctx.save_for_backward(gradient)
        ctx.mark_non_differentiable(correct)
        return loss, correct

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Tensor | None, ...]:
        (gradient,) = ctx.saved_tensors
        return gradient * gradients[0].to(gradient.dtype), None, None, None, None, None


class LossVocabulary:
    """The subset of the vocabulary that takes part in a step.

    Args:
        counts: int64 `[vocab]`, how often each token occurs in the training set's answers.
        frequent: how many of the most frequent tokens always take part.
        sampled: how many of the others are added at random in each step.
    """

    def __init__(self, counts: Tensor, *, frequent: int, sampled: int) -> None:
        self.size = len(counts)
        self.sampled = sampled
        self.frequent = counts.argsort(descending=True, stable=True)[:frequent]

    def choose(self, labels: Tensor, generator: torch.Generator) -> tuple[Tensor, Tensor]:
        """(ids, labels as indices into ids) for the labels of one step."""
        others = torch.randint(self.size, (self.sampled,), generator=generator)
        ids = torch.cat((self.frequent, others, labels)).unique()
        index = torch.full((self.size,), -1)
        index[ids] = torch.arange(len(ids))
        return ids, index[labels]


def position_weights(block_size: int, decay: float) -> Tensor:
    """exp(-(k - 1) / decay) for the drafts k = 1 .. block_size - 1 (DFlash, arXiv 2602.06036): a
    wrong draft makes all later ones of its block useless."""
    return torch.exp(-torch.arange(block_size - 1) / decay)
