"""Layers that the target and the drafter have in common.

Shape legend: B batch, L block length, C keys, H hidden, N query heads, G key/value heads, M query
heads per key/value head, D head dimension (N and G are this rank's share).
"""

from __future__ import annotations

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from dflash_core.parallel import SINGLE, ColumnParallelLinear, RowParallelLinear, TensorParallel


class RMSNorm(nn.Module):
    """x / rms(x) * weight, with the statistics in float32 whatever the dtype of x."""

    def __init__(self, size: int, eps: float) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.empty(size))
        self.eps = eps

    def forward(self, x: Tensor) -> Tensor:
        return F.rms_norm(x, (x.shape[-1],), self.weight, self.eps)


class SwiGLU(nn.Module):
    """down(silu(gate(x)) * up(x)), the MLP of Llama and Qwen3."""

    def __init__(
        self, hidden_size: int, intermediate_size: int, bias: bool, tp: TensorParallel = SINGLE
    ) -> None:
        super().__init__()
        self.gate_proj = ColumnParallelLinear(hidden_size, intermediate_size, bias, tp=tp)
        self.up_proj = ColumnParallelLinear(hidden_size, intermediate_size, bias, tp=tp)
        self.down_proj = RowParallelLinear(intermediate_size, hidden_size, bias, tp=tp)

    def forward(self, x: Tensor) -> Tensor:
        return self.down_proj(F.silu(self.gate_proj(x)) * self.up_proj(x))


def heads_per_group(attention: nn.Module) -> int:
    """Query heads per key/value head of this rank (fewer than in all where the latter are
    replicated over ranks)."""
    return attention.q_proj.weight.shape[0] // attention.k_proj.weight.shape[0]


def attention_mask(visible_BLC: Tensor, dtype: torch.dtype, heads_per_group: int) -> Tensor:
    """bool (True = may attend) -> additive mask for `grouped_attention`, `[B, 1, M * L, C]`.

    Built once per forward pass. Its negative value is finite: a fully masked row stays free of
    NaN, which -inf would not.
    """
    B, L, C = visible_BLC.shape
    mask_BLC = torch.where(visible_BLC, 0.0, torch.finfo(dtype).min / 2).to(dtype)
    return mask_BLC[:, None].expand(B, heads_per_group, L, C).reshape(B, 1, -1, C)


def grouped_attention(q_BLND: Tensor, k_BCGD: Tensor, v_BCGD: Tensor, mask: Tensor) -> Tensor:
    """Attention with N query heads on G key/value heads and an explicit additive mask.

    The M = N / G query heads of a group are laid beside the L rows, so keys and values are never
    repeated in memory. Returns `[B, L, N * D]`.
    """
    B, L, N, D = q_BLND.shape
    G = k_BCGD.shape[2]
    q = q_BLND.view(B, L, G, N // G, D).permute(0, 2, 3, 1, 4).reshape(B, G, -1, D)
    out = F.scaled_dot_product_attention(
        q, k_BCGD.transpose(1, 2), v_BCGD.transpose(1, 2), attn_mask=mask
    )
    return out.view(B, G, N // G, L, D).permute(0, 3, 1, 2, 4).reshape(B, L, N * D)
