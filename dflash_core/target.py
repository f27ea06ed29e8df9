"""The target: a Llama decoder with a static, slot-addressed KV cache and tapped features.

Parameter names equal the checkpoint's without the leading "model.".

Shape legend: B sequences, L block length, R rows (B * L), C context length, H hidden, N query
heads, G key/value heads, D head dimension, F features (tapped layers * H), Vr vocabulary slice.
"""

from __future__ import annotations

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from dflash_core.attention import Block, attention_inputs
from dflash_core.config import TargetConfig
from dflash_core.cpu import kernels
from dflash_core.cpu.packing import PackedEmbedding, packed_decoder, packed_weight
from dflash_core.cpu.rounding import attention_length
from dflash_core.decoder_layer import DecoderLayer
from dflash_core.kv_cache import KVCache
from dflash_core.norm import RMSNorm
from dflash_core.parallel import SINGLE, TensorParallel
from dflash_core.rope import RotaryEmbedding


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
        self.embed_tokens = tp.layers.VocabParallelEmbedding(
            config.vocab_size, config.hidden_size, tp=tp
        )
        self.layers = nn.ModuleList(
            DecoderLayer(config, layer, tp, mlp_bias=config.mlp_bias)
            for layer in range(config.num_layers)
        )
        self.norm = RMSNorm(config.hidden_size, config.rms_norm_eps)
        # The cache may be a little longer than the longest sequence.
        self.rotary = RotaryEmbedding(config.rope, config.head_dim, attention_length(max_model_len))
        if config.tie_word_embeddings:
            self.lm_head = None
        else:
            self.lm_head = tp.layers.ColumnParallelLinear(
                config.hidden_size, config.vocab_size, tp=tp
            )
        self.num_kv_heads = self.layers[0].self_attn.num_kv_heads
        self.heads_per_group = self.layers[0].self_attn.heads_per_group
        self.packed_layers: kernels.Decoder | None = None
        self.packed_head: kernels.Weight | None = None

    def pack(self) -> None:
        """Lay the weights out for the CPU kernels."""
        self.packed_layers = packed_decoder(self.layers, self.tapped_layers)
        self.packed_head = packed_weight(self.lm_head or self.embed_tokens)
        if self.lm_head is None:
            self.embed_tokens = PackedEmbedding(self.packed_head)
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
        block = Block(
            positions_BL=positions_BL,
            places_BL=cache.rows(slots_B[:, None], positions_BL, valid_BL),
            slots_B=slots_B,
            first_BL=None,
            end_BL=positions_BL + 1,
            context_len=context_len,
        )
        if self.packed_layers is not None:
            rows = kernels.Rows(self.rotary, *block[:-1])
            features_BLF = self.packed_layers.run(x_BLH, [rows], cache.packed)
            return x_BLH, features_BLF
        inputs = attention_inputs(block, self.rotary, x_BLH.dtype, self.heads_per_group)
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
        if self.packed_head is not None:
            return kernels.linear(hidden, self.packed_head, (self.norm.weight, self.norm.eps))
        head = self.embed_tokens if self.lm_head is None else self.lm_head
        return F.linear(self.norm(hidden), head.weight)
