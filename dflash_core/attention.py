"""Attention over a static cache: of a block of tokens per sequence, with rotary positions.

Shape legend: B batch, L block length, R rows (B * L), C keys, H hidden, N query heads, G key/value
heads, M query heads per key/value head, D head dimension (N and G are this rank's share).
"""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from dflash_core.config import DrafterConfig, TargetConfig
from dflash_core.cpu.rounding import MIN_ATTENTION_ROWS, rounding_differs
from dflash_core.kv_cache import KVCache
from dflash_core.norm import RMSNorm
from dflash_core.parallel import TensorParallel
from dflash_core.rope import RotaryEmbedding, rotate


class Block(NamedTuple):
    """Where the tokens of one forward pass are, and which keys each of them sees.

    Attributes:
        positions_BL: int32.
        places_BL: int64, the cache row that each token's key and value go to (`KVCache.rows`).
        slots_B: int32.
        first_BL, end_BL: int32: a token sees the keys first <= position < end. first None: all
            from 0.
        context_len: keys that are looked at; a static bucket >= every end.
    """

    positions_BL: Tensor
    places_BL: Tensor
    slots_B: Tensor
    first_BL: Tensor | None
    end_BL: Tensor
    context_len: int


class AttentionInputs(NamedTuple):
    """A block as the layers' attention needs it; made once for all layers."""

    rotary: tuple[Tensor, Tensor]  # each [B, L, 1, D]
    places_R: Tensor  # int64
    slots_B: Tensor  # int64
    mask: Tensor  # [B, 1, M * L, C], additive


class Attention(nn.Module):
    """Projections, rotary attention over the cache, output projection.

    Args:
        config: of the target or the drafter.
        layer: which layer's keys and values of the cache are its own.
        qk_norm: queries and keys are normalised before they are rotated (Qwen3).
    """

    def __init__(
        self,
        config: TargetConfig | DrafterConfig,
        layer: int,
        tp: TensorParallel,
        *,
        qk_norm: bool = False,
    ) -> None:
        super().__init__()
        self.layer = layer
        self.head_dim = config.head_dim
        q_size = config.num_heads * config.head_dim
        kv_size = config.num_kv_heads * config.head_dim
        bias, kv_heads = config.attention_bias, config.num_kv_heads
        self.q_proj = tp.layers.ColumnParallelLinear(config.hidden_size, q_size, bias, tp=tp)
        self.k_proj, self.v_proj = (
            tp.layers.ColumnParallelLinear(
                config.hidden_size, kv_size, bias, tp=tp, shards=kv_heads
            )
            for _ in range(2)
        )
        self.o_proj = tp.layers.RowParallelLinear(q_size, config.hidden_size, bias, tp=tp)
        eps = config.rms_norm_eps
        self.q_norm = RMSNorm(config.head_dim, eps) if qk_norm else None
        self.k_norm = RMSNorm(config.head_dim, eps) if qk_norm else None
        # Of this rank; where key/value heads are replicated over ranks, a group is smaller.
        self.num_heads = len(self.q_proj.weight) // self.head_dim
        self.num_kv_heads = len(self.k_proj.weight) // self.head_dim

    @property
    def heads_per_group(self) -> int:
        return self.num_heads // self.num_kv_heads

    def forward(self, x_BLH: Tensor, inputs: AttentionInputs, cache: KVCache) -> Tensor:
        """`[B, L, H]` -> `[B, L, H]`; the cache gains the keys and values of the block."""
        q_BLND, k_BLGD, v_BLGD = self.project(x_BLH, inputs.rotary)
        cache.write(self.layer, inputs.places_R, k_BLGD.flatten(0, 1), v_BLGD.flatten(0, 1))
        k_BCGD, v_BCGD = cache.read(self.layer, inputs.slots_B, inputs.mask.shape[-1])
        return self.o_proj(grouped_attention(q_BLND, k_BCGD, v_BCGD, inputs.mask))

    def project(self, x: Tensor, rotary: tuple[Tensor, Tensor]) -> tuple[Tensor, Tensor, Tensor]:
        """`[..., H]` -> rotated queries `[..., N, D]` and keys, and values, each `[..., G, D]`."""
        queries = self.q_proj(x).view(*x.shape[:-1], -1, self.head_dim)
        if self.q_norm is not None:
            queries = self.q_norm(queries)
        return rotate(queries, rotary), *self.keys_values(x, rotary)

    def keys_values(self, x: Tensor, rotary: tuple[Tensor, Tensor]) -> tuple[Tensor, Tensor]:
        """`[..., H]` -> rotated keys and values, each `[..., G, D]`."""
        heads = (*x.shape[:-1], -1, self.head_dim)
        keys, values = self.k_proj(x).view(heads), self.v_proj(x).view(heads)
        if self.k_norm is not None:
            keys = self.k_norm(keys)
        return rotate(keys, rotary), values


def attention_inputs(
    block: Block, rotary: RotaryEmbedding, dtype: torch.dtype, heads_per_group: int
) -> AttentionInputs:
    """What the attention layers of a model need to know of a block; the same for all of them."""
    keys_C = torch.arange(block.context_len, device=block.slots_B.device, dtype=torch.int32)
    visible_BLC = keys_C < block.end_BL[..., None]
    if block.first_BL is not None:
        visible_BLC = visible_BLC & (keys_C >= block.first_BL[..., None])
    return AttentionInputs(
        rotary=rotary(block.positions_BL, dtype),
        places_R=block.places_BL.flatten(),
        slots_B=block.slots_B.long(),
        mask=attention_mask(visible_BLC, dtype, heads_per_group),
    )


def attention_mask(visible_BLC: Tensor, dtype: torch.dtype, heads_per_group: int) -> Tensor:
    """bool (True = may attend) -> additive mask for `grouped_attention`, `[B, 1, rows, C]`.

    Built once per forward pass. Its negative value is finite: a fully masked row stays free of
    NaN, which -inf would not. Rows are M * L, or more where `grouped_attention` is to pad them.
    """
    B, L, C = visible_BLC.shape
    mask_BLC = torch.where(visible_BLC, 0.0, torch.finfo(dtype).min / 2).to(dtype)
    mask = mask_BLC[:, None].expand(B, heads_per_group, L, C).reshape(B, 1, -1, C)
    padding = MIN_ATTENTION_ROWS - heads_per_group * L
    if padding > 0 and rounding_differs(dtype, mask.device):
        mask = F.pad(mask, (0, 0, 0, padding))
    return mask


def grouped_attention(q_BLND: Tensor, k_BCGD: Tensor, v_BCGD: Tensor, mask: Tensor) -> Tensor:
    """Attention with N query heads on G key/value heads and an explicit additive mask.

    The M = N / G query heads of a group are laid beside the L rows, so keys and values are never
    repeated in memory. Returns `[B, L, N * D]`.
    """
    B, L, N, D = q_BLND.shape
    G = k_BCGD.shape[2]
    rows = N // G * L
    q = q_BLND.view(B, L, G, N // G, D).permute(0, 2, 3, 1, 4).reshape(B, G, rows, D)
    if mask.shape[2] > rows:
        q = F.pad(q, (0, 0, 0, mask.shape[2] - rows))
    out = F.scaled_dot_product_attention(
        q, k_BCGD.transpose(1, 2), v_BCGD.transpose(1, 2), attn_mask=mask
    )
    out = out[:, :, :rows].unflatten(2, (N // G, L))
    return out.permute(0, 3, 1, 2, 4).reshape(B, L, N * D)
