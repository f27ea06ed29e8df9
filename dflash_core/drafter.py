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

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from dflash_core.attention import Block, attention_inputs
from dflash_core.config import DrafterConfig
from dflash_core.cpu import kernels
from dflash_core.cpu.packing import (
    PackedEmbedding,
    packed_decoder,
    packed_injection,
    packed_weight,
)
from dflash_core.decoder_layer import DecoderLayer
from dflash_core.kv_cache import KVCache
from dflash_core.norm import RMSNorm
from dflash_core.parallel import SINGLE, TensorParallel
from dflash_core.rope import RotaryEmbedding


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
        self.layers = nn.ModuleList(
            DecoderLayer(config, layer, tp, qk_norm=True) for layer in range(config.num_layers)
        )
        # Layers that see the same keys of a block have a kind in common.
        looks = list(zip(config.windows, config.causal, strict=True))
        self.looks = list(dict.fromkeys(looks))
        self.kinds = [self.looks.index(look) for look in looks]
        self.num_kv_heads = self.layers[0].self_attn.num_kv_heads
        self.heads_per_group = self.layers[0].self_attn.heads_per_group
        self.norm = RMSNorm(config.hidden_size, config.rms_norm_eps)
        # A block may reach beyond the longest sequence: its last drafts are then of no use.
        self.rotary = RotaryEmbedding(
            config.rope, config.head_dim, max_model_len + config.block_size
        )
        self.packed_injection: kernels.Injection | None = None
        self.packed_layers: kernels.Decoder | None = None

    def pack(self) -> None:
        """Lay the weights out for the CPU kernels."""
        self.packed_injection = packed_injection(self.fc, self.hidden_norm, self.layers)
        self.packed_layers = packed_decoder(self.layers, kinds=self.kinds)
        self.fc = None

    def inject(
        self, features_RF: Tensor, rows_R: Tensor, positions_R: Tensor, cache: KVCache
    ) -> None:
        """Write the keys and values of R context tokens into the cache.

        Args:
            features_RF: target hidden states, `[R, F]`, model dtype.
            rows_R: int64 cache rows (`KVCache.rows`).
            positions_R: int32 positions of these tokens.
        """
        if self.packed_injection is not None:
            block = kernels.Rows(self.rotary, positions_R[None], rows_R[None])
            return self.packed_injection.run(features_RF, block, cache.packed)
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
        """Hidden states of a block, `[B, L, H]` before the final norm.

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
        end_BL = (starts_B[:, None] + L).expand(-1, L)
        first_BL = context_starts_B[:, None].expand(-1, L)
        places_BL = cache.rows(slots_B[:, None], positions_BL)
        blocks = []
        for window, causal in self.looks:
            first, end = first_BL, end_BL
            if causal:
                end = torch.minimum(end, positions_BL + 1)
            if window is not None:
                first = torch.maximum(first, positions_BL - (window - 1))
                end = torch.minimum(end, positions_BL + window)
            blocks.append(Block(positions_BL, places_BL, slots_B, first, end, context_len + L))
        if self.packed_layers is not None:
            rows = [kernels.Rows(self.rotary, *block[:-1]) for block in blocks]
            self.packed_layers.run(x_BLH, rows, cache.packed)
            return x_BLH
        inputs = [attention_inputs(b, self.rotary, dtype, self.heads_per_group) for b in blocks]
        for kind, layer in zip(self.kinds, self.layers, strict=True):
            x_BLH = layer(x_BLH, inputs[kind], cache)
        return x_BLH


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
        self.embed_tokens = tp.layers.VocabParallelEmbedding(vocab_size, hidden_size, tp=tp)
        if tie_word_embeddings:
            self.lm_head = None
        else:
            self.lm_head = tp.layers.ColumnParallelLinear(hidden_size, vocab_size, tp=tp)
        self.packed_head: kernels.Weight | None = None

    def pack(self) -> None:
        """Lay the head out for the CPU kernels."""
        self.packed_head = packed_weight(self.lm_head or self.embed_tokens)
        if self.lm_head is None:
            self.embed_tokens = PackedEmbedding(self.packed_head)
        self.lm_head = None

    def logits(self, hidden: Tensor, norm: RMSNorm) -> Tensor:
        """Of norm(hidden): `[..., H]` -> this rank's slice of the logits, `[..., Vr]`."""
        if self.packed_head is not None:
            return kernels.linear(hidden, self.packed_head, (norm.weight, norm.eps))
        head = self.embed_tokens if self.lm_head is None else self.lm_head
        return F.linear(norm(hidden), head.weight)
