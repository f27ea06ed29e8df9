"""The drafter's two graphs: inject context, and draft (which injects first). Tensors in and out.

Shape legend: B sequences, L block length (1 + K drafts), R context rows, F feature width, H hidden.
"""

from __future__ import annotations

import torch
from torch import Tensor, nn

from dflash_core.drafter import DFlashDrafter, TargetVocabulary
from dflash_core.kv_cache import KVCache
from dflash_core.parallel import TensorParallel, parallel_argmax


class InjectStep(nn.Module):
    """Write the keys and values of context tokens: rows that pad R go to the scratch slot.

    Args:
        model: this rank's share of the drafter.
        cache: its keys and values.
    """

    def __init__(self, model: DFlashDrafter, cache: KVCache) -> None:
        super().__init__()
        self.model = model
        self.cache = cache

    def forward(self, features_RF: Tensor, row_slots_R: Tensor, row_positions_R: Tensor) -> None:
        """
        Args:
            features_RF: target hidden states, model dtype.
            row_slots_R, row_positions_R: int32, where each row goes.
        """
        rows_R = self.cache.rows(row_slots_R, row_positions_R)
        self.model.inject(features_RF, rows_R, row_positions_R, self.cache)


class DraftStep(nn.Module):
    """Inject, run the block, and take the argmax at the mask positions.

    Args:
        model: this rank's share of the drafter.
        vocabulary: this rank's share of the target's embedding and head.
        cache: the drafter's keys and values.
        num_drafts: K.
        tp: this rank's place in the drafter's tensor-parallel group.
    """

    def __init__(
        self,
        model: DFlashDrafter,
        vocabulary: TargetVocabulary,
        cache: KVCache,
        num_drafts: int,
        tp: TensorParallel,
    ) -> None:
        super().__init__()
        self.inject = InjectStep(model, cache)
        self.model = model
        self.vocabulary = vocabulary
        self.cache = cache
        self.num_drafts = num_drafts
        self.tp = tp

    def forward(
        self,
        features_RF: Tensor,
        row_slots_R: Tensor,
        row_positions_R: Tensor,
        tokens_B: Tensor,
        slots_B: Tensor,
        starts_B: Tensor,
        context_starts_B: Tensor,
        context_len: int,
    ) -> Tensor:
        """Drafts, int32 `[B, K]`, equal on every rank.

        Args:
            features_RF, row_slots_R, row_positions_R: as `InjectStep.forward`.
            tokens_B: int32, the newest accepted token of each sequence.
            slots_B, starts_B, context_starts_B: int32, as `DFlashDrafter.forward`.
            context_len: a static bucket >= max(starts).
        """
        self.inject(features_RF, row_slots_R, row_positions_R)
        masks_BK = torch.full(
            (len(tokens_B), self.num_drafts),
            self.model.config.mask_token_id,
            dtype=torch.int32,
            device=tokens_B.device,
        )
        block_BL = torch.cat((tokens_B[:, None], masks_BK), dim=1)
        hidden_BLH = self.model(
            self.vocabulary.embed_tokens(block_BL),
            slots_B,
            starts_B,
            context_starts_B,
            self.cache,
            context_len,
        )
        logits_BKVr = self.vocabulary.logits(hidden_BLH[:, 1:], self.model.norm)
        return parallel_argmax(logits_BKVr, self.tp)
