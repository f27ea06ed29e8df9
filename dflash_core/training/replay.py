"""Acceptance without decoding: replay answers that the target has already given.

The drafts of all positions of an answer are computed at once; then the accept/reject loop walks
over it. For a greedy answer that counts exactly what decoding would. It does for an answer sampled
at temperature 1 as well: rejection sampling accepts a draft with the probability that the target
gives it, which is the probability that a token sampled from the target equals it.

Shape legend: B conversations (1), S positions, A anchors, L block length, K drafts, H hidden.
"""

from __future__ import annotations

from collections.abc import Iterable

import torch
from torch import Tensor

from dflash_core.drafter import DFlashDrafter, TargetVocabulary
from dflash_core.statistics import AcceptanceStatistics
from dflash_core.training.conversations import Conversation
from dflash_core.training.forward import draft_hidden

ANCHORS_AT_A_TIME = 32


@torch.inference_mode()
def replay(
    model: DFlashDrafter,
    vocabulary: TargetVocabulary,
    answers: Iterable[tuple[Conversation, Tensor]],
) -> AcceptanceStatistics:
    """Counters over all answers.

    Args:
        answers: conversations, each with its features bfloat16 `[S, F]`.
    """
    total = AcceptanceStatistics()
    K = model.config.block_size - 1
    for conversation, features_SF in answers:
        tokens, anchor = conversation.tokens, conversation.answer
        drafts_AK = all_drafts(model, vocabulary, conversation, features_SF)
        # The first token of an answer comes out of the prefill; every step after it is a block.
        while anchor < len(tokens) - 1:
            wanted = tokens[anchor + 1 : anchor + 1 + K]
            drafts = drafts_AK[anchor - conversation.answer][: len(wanted)]
            accepted = 0
            while accepted < len(drafts) and drafts[accepted] == wanted[accepted]:
                accepted += 1
            # As in the engine: the last step needs no bonus, so it drafts one token less.
            proposed = min(K, len(tokens) - 2 - anchor)
            accepted = min(accepted, proposed)
            total.record(proposed=proposed, accepted=accepted, emitted=accepted + 1)
            anchor += accepted + 1
    return total


def all_drafts(
    model: DFlashDrafter,
    vocabulary: TargetVocabulary,
    conversation: Conversation,
    features_SF: Tensor,
) -> list[list[int]]:
    """The K drafts after every token of the answer but the last."""
    anchors_BA = torch.arange(conversation.answer, len(conversation.tokens) - 1)[None]
    tokens_BAL = torch.full(
        (*anchors_BA.shape, model.config.block_size), model.config.mask_token_id
    )
    tokens_BAL[..., 0] = torch.tensor(conversation.tokens)[anchors_BA]
    x_BALH = vocabulary.embed_tokens(tokens_BAL)
    hidden_BALH = draft_hidden(model, features_SF[None].to(x_BALH.dtype), x_BALH, anchors_BA)
    hidden_AKH = hidden_BALH[0, :, 1:].contiguous()  # else the product copies the head per anchor
    # Piece by piece: the logits of all anchors at once would be a hundred megabytes.
    return [
        drafts
        for piece in hidden_AKH.split(ANCHORS_AT_A_TIME)
        for drafts in vocabulary.logits(piece, model.norm).max(-1).indices.tolist()
    ]
