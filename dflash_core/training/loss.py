"""The drafter's loss, fused with the borrowed head and computed in chunks.

A draft counts only where all drafts before it are right. So the weight of a draft may depend, block
by block, on how the drafts before it fare (`chain`): the mean loss over all positions would spend
most of its effort on continuations that no verify step ever reaches.

Head and softmax over the vocabulary would cost more than the drafter itself, in time and above all
in memory traffic. So (a) the head takes part with a subset of the vocabulary only: the most
frequent tokens, all labels of the batch and a random sample of the rest; (b) loss and gradient are
computed together, chunk by chunk, so that no logits outlive their chunk (as in Liger Kernel,
arXiv 2410.10989; the head is frozen, so the gradient of the hidden states is all there is).

Shape legend: N blocks, K drafts of a block, M = N * K predicted tokens, block by block, H hidden, V
subset of the vocabulary.
"""

from __future__ import annotations

from typing import Any, NamedTuple

import torch
from torch import Tensor

CHUNK = 256  # rows at most; their float32 logits fit into the processor's cache


class DistilledCrossEntropy(torch.autograd.Function):
    """Weighted mean over drafts of the cross entropy against a mixture of label and teacher.

    Arguments of `apply`: hidden `[M, H]`; teacher `[M, H]`, the target's hidden states for the same
    positions (None without distillation); head `[V, H]`; labels int64 `[M]`, indices into the head;
    weights float32 `[N, K]`, 0 where there is no label; share of the teacher; chain (see
    `reached`). Returns (loss, correct): a float32 scalar and bool `[M]`, whether the argmax is the
    label.
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
        chain: float,
    ) -> tuple[Tensor, Tensor]:
        loss = torch.zeros((), dtype=torch.float32)
        total = torch.zeros((), dtype=torch.float32)
        correct = torch.empty(len(labels), dtype=torch.bool)
        gradient = torch.empty_like(hidden)
        K = weights.shape[1]
        blocks = max(1, CHUNK // K)
        for begin in range(0, len(weights), blocks):
            rows = slice(begin * K, (begin + blocks) * K)
            wanted = labels[rows, None]
            logits = (hidden[rows] @ head.T).float()
            correct[rows] = logits.argmax(-1) == wanted[:, 0]
            logits -= torch.logsumexp(logits, -1, keepdim=True)
            hard = logits.gather(1, wanted)
            reach = reached(hard.view(-1, K).exp(), correct[rows].view(-1, K), chain)
            weight = (weights[begin : begin + blocks] * reach).view(-1, 1)
            total += weight.sum()
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
        ctx.save_for_backward(gradient, total)
        ctx.mark_non_differentiable(correct)
        return loss / total, correct

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Tensor | None, ...]:
        gradient, total = ctx.saved_tensors
        scale = (gradients[0] / total).to(gradient.dtype)
        return gradient * scale, None, None, None, None, None, None


def reached(probability_NK: Tensor, correct_NK: Tensor, chain: float) -> Tensor:
    """How much each draft counts, `[N, K]`: 1 - chain + chain * (whether the verifier gets to it).

    It gets past a draft that is right; of a wrong one, its probability tells how far it is from
    being right.
    """
    passed_NK = torch.where(correct_NK, 1.0, probability_NK).cumprod(-1)
    before_NK = torch.cat((torch.ones_like(passed_NK[:, :1]), passed_NK[:, :-1]), -1)
    return 1 - chain + chain * before_NK


class StepVocabulary(NamedTuple):
    """The tokens that take part in a step.

    Attributes:
        ids: int64 `[V]`.
        index: int64 `[vocab]`, where a token is among them; -1 where it is not.
        head_VH: their rows of the head.
    """

    ids: Tensor
    index: Tensor
    head_VH: Tensor


class LossVocabulary:
    """The subset of the vocabulary that takes part in a step.

    Args:
        head: `[vocab, H]`.
        counts: int64 `[vocab]`, how often each token occurs in the training set's answers.
        frequent: how many of the most frequent tokens always take part.
        sampled: how many of the others are added at random in each step.
    """

    def __init__(self, head: Tensor, counts: Tensor, *, frequent: int, sampled: int) -> None:
        self.head = head
        self.sampled = sampled
        self.frequent = counts.argsort(descending=True, stable=True)[:frequent]

    def choose(self, labels: Tensor, generator: torch.Generator) -> StepVocabulary:
        """For the labels of one step, which are always among the tokens."""
        size = len(self.head)
        others = torch.randint(size, (self.sampled,), generator=generator)
        ids = torch.cat((self.frequent, others, labels.flatten())).unique()
        index = torch.full((size,), -1)
        index[ids] = torch.arange(len(ids))
        return StepVocabulary(ids, index, self.head[ids])


def position_weights(block_size: int, decay: float) -> Tensor:
    """exp(-(k - 1) / decay) for the drafts k = 1 .. block_size - 1 (DFlash, arXiv 2602.06036): a
    wrong draft makes all later ones of its block useless."""
    return torch.exp(-torch.arange(block_size - 1) / decay)
