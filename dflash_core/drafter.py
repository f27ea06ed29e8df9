"""The DFlash drafter: block-diffusion draft model whose context is the target's hidden states.

Two operations (design: KV injection, draft; source: DFlash, z-lab/dflash `dflash/model.py`):
`inject` projects features of committed tokens into the drafter's key/value cache, `draft` predicts
all masked positions of a block in one pass over that cache. Parameter names equal the z-lab
checkpoint's. Embedding and head are the target's, loaded from the target's checkpoint.

Shape legend: B sequences, L block length (1 + drafts), R context rows, C context length, H hidden,
F feature width (tapped layers * H), N query heads, G key/value heads, D head dimension, Vr
vocabulary slice.
"""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from dflash_core.config import DrafterConfig
from dflash_core.fused import FusedLinear, fused_columns
from dflash_core.kv_cache import KVCache
from dflash_core.layers import (
    ProjectedAttention,
    RMSNorm,
    SwiGLU,
    attention_mask,
    grouped_attention,
)
from dflash_core.parallel import (
    SINGLE,
    ColumnParallelLinear,
    TensorParallel,
    VocabParallelEmbedding,
)
from dflash_core.rope import RotaryEmbedding, rotate

Rotary = tuple[Tensor, Tensor]


class BlockInputs(NamedTuple):
    """What every layer of one draft pass shares."""

    rotary: Rotary  # each [B, L, 1, D]
    rows_R: Tensor  # int64: cache row of each token of the blocks, R = B * L
    slots_B: Tensor  # int64
    masks: list[Tensor]  # per layer [B, 1, M * L, C + L], additive


class DraftAttention(ProjectedAttention):
    def __init__(self, config: DrafterConfig, tp: TensorParallel) -> None:
        super().__init__(config, tp)
        self.q_norm = RMSNorm(config.head_dim, config.rms_norm_eps)
        self.k_norm = RMSNorm(config.head_dim, config.rms_norm_eps)
        self.kv_proj: FusedLinear | None = None

    def fuse(self, packed: bool) -> None:
        """Replace the loaded layers by fused ones; of context tokens only k and v are computed."""
        self.kv_proj = fused_columns(self.k_proj, self.v_proj, packed=packed)
        super().fuse(packed)

    def keys_values(self, x: Tensor, rotary: Rotary) -> tuple[Tensor, Tensor]:
        """`[..., H]` -> rotated keys and values, each `[..., G, D]`."""
        heads = (*x.shape[:-1], -1, self.head_dim)
        if self.kv_proj is None:
            keys, values = self.k_proj(x).view(heads), self.v_proj(x).view(heads)
        else:
            keys, values = self.kv_proj(x).view(heads).chunk(2, dim=-2)
        return rotate(self.k_norm(keys), rotary), values

    def forward(self, x_BLH: Tensor, inputs: BlockInputs, layer: int, cache: KVCache) -> Tensor:
        """What the heads attend to, before the output projection."""
        q_BLND, k_BLGD, v_BLGD = self.project(x_BLH)
        q_BLND = rotate(self.q_norm(q_BLND), inputs.rotary)
        k_BLGD = rotate(self.k_norm(k_BLGD), inputs.rotary)
        cache.write(layer, inputs.rows_R, k_BLGD.flatten(0, 1), v_BLGD.flatten(0, 1))
        mask = inputs.masks[layer]
        k_BCGD, v_BCGD = cache.read(layer, inputs.slots_B, mask.shape[-1])
        return grouped_attention(q_BLND, k_BCGD, v_BCGD, mask)


class DraftLayer(nn.Module):
    def __init__(self, config: DrafterConfig, tp: TensorParallel) -> None:
        super().__init__()
        self.input_layernorm = RMSNorm(config.hidden_size, config.rms_norm_eps)
        self.self_attn = DraftAttention(config, tp)
        self.post_attention_layernorm = RMSNorm(config.hidden_size, config.rms_norm_eps)
        self.mlp = SwiGLU(config.hidden_size, config.intermediate_size, False, tp)

    def forward(self, x_BLH: Tensor, inputs: BlockInputs, layer: int, cache: KVCache) -> Tensor:
        attended = self.self_attn(self.input_layernorm(x_BLH), inputs, layer, cache)
        x_BLH = self.self_attn.output(attended, x_BLH)
        return self.mlp(self.post_attention_layernorm(x_BLH), x_BLH)


class DFlashDrafter(nn.Module):
    """The weights of a z-lab DFlash checkpoint: `fc`, `hidden_norm`, `layers`, `norm`.

    `fc` is replicated on every rank; the attention and MLP layers are tensor parallel.
    """

    def __init__(
        self, config: DrafterConfig, *, max_model_len: int, tp: TensorParallel = SINGLE
    ) -> None:
        super().__init__()
        self.config = config
        width = len(config.target_layer_ids) * config.hidden_size
        self.fc = nn.Linear(width, config.hidden_size, bias=False)
        self.feature_size = width
        self.hidden_norm = RMSNorm(config.hidden_size, config.rms_norm_eps)
        self.layers = nn.ModuleList(DraftLayer(config, tp) for _ in range(config.num_layers))
        self.heads_per_group = self.layers[0].self_attn.heads_per_group
        self.norm = RMSNorm(config.hidden_size, config.rms_norm_eps)
        # A block may reach beyond the longest sequence: its last drafts are then of no use.
        self.rotary = RotaryEmbedding(
            config.rope, config.head_dim, max_model_len + config.block_size
        )

    def fuse(self, packed: bool) -> None:
        """Pack the weight of `fc`."""
        self.fc = FusedLinear([self.fc.weight], packed=packed)

    def inject(
        self, features_RF: Tensor, rows_R: Tensor, positions_R: Tensor, cache: KVCache
    ) -> None:
        """Write the keys and values of R context tokens into the cache.

        Args:
            features_RF: target hidden states, `[R, F]`, model dtype.
            rows_R: int64 cache rows (`KVCache.rows`).
            positions_R: int32 positions of these tokens.
        """
        context_RH = self.hidden_norm(self.fc(features_RF))
        rotary = self.rotary(positions_R, context_RH.dtype)
        for index, layer in enumerate(self.layers):
            cache.write(index, rows_R, *layer.self_attn.keys_values(context_RH, rotary))

    def forward(
        self,
        x_BLH: Tensor,
        slots_B: Tensor,
        starts_B: Tensor,
        context_starts_B: Tensor,
        cache: KVCache,
        context_len: int,
    ) -> Tensor:
        """Hidden states of a block, `[B, L, H]` after the final norm.

        Args:
            x_BLH: embeddings of `[newest accepted token, mask, mask, ...]`.
            slots_B: int32 `[B]`.
            starts_B: int32 `[B]`, position s of the newest accepted token; the context is < s.
            context_starts_B: int32 `[B]`, first position that has been injected.
            cache: the block's keys and values go to the positions s..s+K, which are dead: no
                block sees a position of the context that was not injected before, and injecting
                overwrites them. So it needs room for a block after the longest context.
            context_len: a static bucket >= max(starts).
        """
        L = x_BLH.shape[1]
        device, dtype = x_BLH.device, x_BLH.dtype
        positions_BL = starts_B[:, None] + torch.arange(L, device=device, dtype=torch.int32)
        keys_C = torch.arange(context_len + L, device=device, dtype=torch.int32)
        known_BC = (keys_C >= context_starts_B[:, None]) & (keys_C < starts_B[:, None] + L)
        distance_BLC = positions_BL[..., None] - keys_C
        masks: dict[tuple[int | None, bool], Tensor] = {}
        kinds = list(zip(self.config.windows, self.config.causal, strict=True))
        for window, causal in dict.fromkeys(kinds):
            visible_BLC = known_BC[:, None].expand(-1, L, -1)
            if causal:
                visible_BLC = visible_BLC & (distance_BLC >= 0)
            if window is not None:
                visible_BLC = visible_BLC & (distance_BLC.abs() < window)
            masks[window, causal] = attention_mask(visible_BLC, dtype, self.heads_per_group)
        inputs = BlockInputs(
            rotary=self.rotary(positions_BL, dtype),
            rows_R=cache.rows(slots_B[:, None], positions_BL).flatten(),
            slots_B=slots_B.long(),
            masks=[masks[kind] for kind in kinds],
        )
        for index, layer in enumerate(self.layers):
            x_BLH = layer(x_BLH, inputs, index, cache)
        return self.norm(x_BLH)


class TargetVocabulary(nn.Module):
    """The target's embedding and head, which the drafter borrows.

    Parameter names equal the target checkpoint's without the leading "model.".
    """

    def __init__(
        self,
        vocab_size: int,
        hidden_size: int,
        tie_word_embeddings: bool,
        tp: TensorParallel = SINGLE,
    ) -> None:
        super().__init__()
        self.embed_tokens = VocabParallelEmbedding(vocab_size, hidden_size, tp=tp)
        if tie_word_embeddings:
            self.lm_head = None
        else:
            self.lm_head = ColumnParallelLinear(hidden_size, vocab_size, tp=tp)
        self.fused_head: FusedLinear | None = None

    def fuse(self, packed: bool) -> None:
        """Pack the head; a tied embedding keeps its plain table for looking tokens up."""
        if packed:
            head = self.embed_tokens if self.lm_head is None else self.lm_head
            self.fused_head = FusedLinear([head.weight], packed=True)
            self.lm_head = None

    def logits(self, hidden: Tensor) -> Tensor:
        """`[..., H]` -> this rank's vocabulary slice of the logits, `[..., Vr]`."""
        if self.fused_head is not None:
            return self.fused_head(hidden)
        head = self.embed_tokens if self.lm_head is None else self.lm_head
        return F.linear(hidden, head.weight)
