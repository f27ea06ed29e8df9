"""The target: a Llama decoder with a static, slot-addressed KV cache and tapped features.

Parameter names equal the checkpoint's without the leading "model.".

Shape legend: B sequences, L block length, R rows (B * L), C context length, H hidden, N query
heads, G key/value heads, D head dimension, F features (tapped layers * H), Vr vocabulary slice.
"""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from dflash_core.config import TargetConfig
from dflash_core.cpu_rounding import attention_length
from dflash_core.fused import FusedLinear
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


class LayerInputs(NamedTuple):
    """What every layer of one forward pass shares."""

    rotary: tuple[Tensor, Tensor]  # each [B, L, 1, D]
    rows_R: Tensor  # int64: cache row that each token's key and value go to
    slots_B: Tensor  # int64
    mask: Tensor  # [B, 1, M * L, C], additive


class Attention(ProjectedAttention):
    def __init__(self, config: TargetConfig, layer: int, tp: TensorParallel) -> None:
        super().__init__(config, tp)
        self.layer = layer

    def forward(
        self, x_BLH: Tensor, residual_BLH: Tensor, inputs: LayerInputs, cache: KVCache
    ) -> Tensor:
        """residual + attention(x)."""
        q_BLND, k_BLGD, v_BLGD = self.rotated(x_BLH, inputs.rotary)
        cache.write(self.layer, inputs.rows_R, k_BLGD.flatten(0, 1), v_BLGD.flatten(0, 1))
        k_BCGD, v_BCGD = cache.read(self.layer, inputs.slots_B, inputs.mask.shape[-1])
        attended = grouped_attention(q_BLND, k_BCGD, v_BCGD, inputs.mask)
        return self.output(attended, residual_BLH)

    def rotated(self, x_BLH: Tensor, rotary: tuple[Tensor, Tensor]) -> tuple[Tensor, ...]:
        """Queries and keys, rotated, and values."""
        if self.qkv_proj is None:
            q_BLND, k_BLGD, v_BLGD = self.project(x_BLH)
            return rotate(q_BLND, rotary), rotate(k_BLGD, rotary), v_BLGD
        qkv = self.qkv_proj(x_BLH).view(*x_BLH.shape[:2], -1, self.head_dim)
        qk, v_BLGD = qkv.split((self.num_heads + self.num_kv_heads, self.num_kv_heads), dim=2)
        q_BLND, k_BLGD = rotate(qk, rotary).split((self.num_heads, self.num_kv_heads), dim=2)
        return q_BLND, k_BLGD, v_BLGD


class DecoderLayer(nn.Module):
    def __init__(self, config: TargetConfig, layer: int, tp: TensorParallel) -> None:
        super().__init__()
        self.input_layernorm = RMSNorm(config.hidden_size, config.rms_norm_eps)
        self.self_attn = Attention(config, layer, tp)
        self.post_attention_layernorm = RMSNorm(config.hidden_size, config.rms_norm_eps)
        self.mlp = SwiGLU(config.hidden_size, config.intermediate_size, config.mlp_bias, tp)

    def forward(self, x_BLH: Tensor, inputs: LayerInputs, cache: KVCache) -> Tensor:
        x_BLH = self.self_attn(self.input_layernorm(x_BLH), x_BLH, inputs, cache)
        return self.mlp(self.post_attention_layernorm(x_BLH), x_BLH)


class LlamaTarget(nn.Module):
    """Llama causal language model for verification.

    Args:
        config: the normalised checkpoint configuration.
        max_model_len: longest sequence, in tokens; sizes the rotary tables.
        tapped_layers: decoder layers whose *output* is a feature (`dflash_config.target_layer_ids`
            of a z-lab checkpoint; the last layer's output is taken before the final norm).
        tp: this rank's place in the tensor-parallel group.
    """

    def __init__(
        self,
        config: TargetConfig,
        *,
        max_model_len: int,
        tapped_layers: tuple[int, ...] = (),
        tp: TensorParallel = SINGLE,
    ) -> None:
        super().__init__()
        self.config = config
        self.tp = tp
        self.tapped_layers = tapped_layers
        self.embed_tokens = VocabParallelEmbedding(config.vocab_size, config.hidden_size, tp=tp)
        self.layers = nn.ModuleList(
            DecoderLayer(config, layer, tp) for layer in range(config.num_layers)
        )
        self.heads_per_group = self.layers[0].self_attn.heads_per_group
        self.norm = RMSNorm(config.hidden_size, config.rms_norm_eps)
        # The cache may be a little longer than the longest sequence.
        self.rotary = RotaryEmbedding(config.rope, config.head_dim, attention_length(max_model_len))
        if config.tie_word_embeddings:
            self.lm_head = None
        else:
            self.lm_head = ColumnParallelLinear(config.hidden_size, config.vocab_size, tp=tp)
        self.fused_head: FusedLinear | None = None

    def fuse(self, packed: bool) -> None:
        """Pack the head; a tied embedding keeps its plain table for looking tokens up."""
        if packed:
            head = self.embed_tokens if self.lm_head is None else self.lm_head
            self.fused_head = FusedLinear([head.weight], packed=True)
            self.lm_head = None

    def forward(
        self,
        tokens_BL: Tensor,
        slots_B: Tensor,
        starts_B: Tensor,
        lengths_B: Tensor,
        cache: KVCache,
        context_len: int,
    ) -> tuple[Tensor, Tensor]:
        """Run a block of tokens per sequence and extend the cache.

        Args:
            tokens_BL: int32 `[B, L]`; row b holds `lengths_B[b]` valid tokens, then padding.
            slots_B: int32 `[B]`, cache slot of each sequence (the scratch slot for padding).
            starts_B: int32 `[B]`, position of the first token of each row.
            lengths_B: int32 `[B]`.
            cache: written in place for the valid tokens.
            context_len: keys attended to; a static bucket >= max(starts + lengths).

        Returns:
            (hidden, features): `[B, L, H]` before the final norm, and `[B, L, F]` (F = 0 without
            tapped layers). Rows of padding tokens are meaningless.
        """
        B, L = tokens_BL.shape
        offsets_L = torch.arange(L, device=tokens_BL.device, dtype=torch.int32)
        positions_BL = starts_B[:, None] + offsets_L
        valid_BL = (offsets_L < lengths_B[:, None]) & (positions_BL < cache.max_len)
        positions_BL = positions_BL.clamp(max=cache.max_len - 1)
        x_BLH = self.embed_tokens(tokens_BL)
        keys_C = torch.arange(context_len, device=tokens_BL.device, dtype=torch.int32)
        inputs = LayerInputs(
            rotary=self.rotary(positions_BL, x_BLH.dtype),
            rows_R=cache.rows(slots_B[:, None], positions_BL, valid_BL).flatten(),
            slots_B=slots_B.long(),
            mask=attention_mask(
                keys_C <= positions_BL[..., None], x_BLH.dtype, self.heads_per_group
            ),
        )
        taps: dict[int, Tensor] = {}
        for index, layer in enumerate(self.layers):
            x_BLH = layer(x_BLH, inputs, cache)
            if index in self.tapped_layers:
                taps[index] = x_BLH
        if not taps:
            return x_BLH, x_BLH.new_empty((B, L, 0))
        return x_BLH, torch.cat([taps[index] for index in self.tapped_layers], dim=-1)

    def logits(self, hidden: Tensor) -> Tensor:
        """`[..., H]` -> this rank's vocabulary slice of the logits, `[..., Vr]`."""
        hidden = self.norm(hidden)
        if self.fused_head is not None:
            return self.fused_head(hidden)
        head = self.embed_tokens if self.lm_head is None else self.lm_head
        return F.linear(hidden, head.weight)
