"""Layers that the target and the drafter have in common.

Shape legend: B batch, L block length, C keys, H hidden, N query heads, G key/value heads, M query
heads per key/value head, D head dimension (N and G are this rank's share).
"""

from __future__ import annotations

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from dflash_core.config import DrafterConfig, TargetConfig
from dflash_core.cpu_rounding import MIN_ATTENTION_ROWS, rounding_differs
from dflash_core.fused import FusedLinear, FusedRows, fused_columns
from dflash_core.parallel import SINGLE, ColumnParallelLinear, RowParallelLinear, TensorParallel


class RMSNorm(nn.Module):
    """x / rms(x) * weight, with the statistics in float32 whatever the dtype of x."""

    def __init__(self, size: int, eps: float) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.empty(size))
        self.eps = eps
        self.register_buffer("mirrored_weight", None, persistent=False)

    def fuse(self, packed: bool) -> None:
        """Use one kernel where there is one (packed: bf16 on the CPU).

        PyTorch's CPU has none for an RMS norm, which then is a dozen operations, but one for a
        layer norm; and the layer norm of (x, -x), whose mean is 0, begins with the RMS norm of x.
        """
        if packed:
            self.mirrored_weight = torch.cat((self.weight, self.weight)).detach()

    def forward(self, x: Tensor) -> Tensor:
        size = x.shape[-1]
        if self.mirrored_weight is None or torch.compiler.is_compiling():
            return F.rms_norm(x, (size,), self.weight, self.eps)
        mirrored = torch.cat((x, -x), dim=-1)
        y = torch.layer_norm(mirrored, (2 * size,), self.mirrored_weight, None, self.eps)
        return y[..., :size]


class SwiGLU(nn.Module):
    """down(silu(gate(x)) * up(x)), the MLP of Llama and Qwen3."""

    def __init__(
        self, hidden_size: int, intermediate_size: int, bias: bool, tp: TensorParallel = SINGLE
    ) -> None:
        super().__init__()
        self.gate_proj = ColumnParallelLinear(hidden_size, intermediate_size, bias, tp=tp)
        self.up_proj = ColumnParallelLinear(hidden_size, intermediate_size, bias, tp=tp)
        self.down_proj = RowParallelLinear(intermediate_size, hidden_size, bias, tp=tp)
        self.gate_up_proj: FusedLinear | None = None

    def fuse(self, packed: bool) -> None:
        """Replace the loaded layers by fused ones."""
        self.gate_up_proj = fused_columns(self.gate_proj, self.up_proj, packed=packed)
        self.down_proj = FusedRows(self.down_proj, packed=packed)
        self.gate_proj = self.up_proj = None

    def forward(self, x: Tensor, residual: Tensor | None = None) -> Tensor:
        if self.gate_up_proj is None:
            y = self.down_proj(F.silu(self.gate_proj(x)) * self.up_proj(x))
            return y if residual is None else residual + y
        gate, up = self.gate_up_proj(x).chunk(2, dim=-1)
        return self.down_proj(F.silu(gate) * up, residual)


class ProjectedAttention(nn.Module):
    """The projections of an attention layer: queries, keys, values (by heads) and output."""

    def __init__(self, config: TargetConfig | DrafterConfig, tp: TensorParallel) -> None:
        super().__init__()
        self.head_dim = config.head_dim
        q_size = config.num_heads * config.head_dim
        kv_size = config.num_kv_heads * config.head_dim
        bias, kv_heads = config.attention_bias, config.num_kv_heads
        self.q_proj = ColumnParallelLinear(config.hidden_size, q_size, bias, tp=tp)
        self.k_proj, self.v_proj = (
            ColumnParallelLinear(config.hidden_size, kv_size, bias, tp=tp, shards=kv_heads)
            for _ in range(2)
        )
        self.o_proj = RowParallelLinear(q_size, config.hidden_size, bias, tp=tp)
        # Of this rank; where key/value heads are replicated over ranks, a group is smaller.
        self.num_heads = len(self.q_proj.weight) // self.head_dim
        self.num_kv_heads = len(self.k_proj.weight) // self.head_dim
        self.qkv_proj: FusedLinear | None = None

    @property
    def heads_per_group(self) -> int:
        return self.num_heads // self.num_kv_heads

    def fuse(self, packed: bool) -> None:
        """Replace the loaded layers by fused ones."""
        self.qkv_proj = fused_columns(self.q_proj, self.k_proj, self.v_proj, packed=packed)
        self.o_proj = FusedRows(self.o_proj, packed=packed)
        self.q_proj = self.k_proj = self.v_proj = None

    def output(self, attended: Tensor, residual: Tensor) -> Tensor:
        """residual + o_proj(attended)."""
        if self.qkv_proj is None:
            return residual + self.o_proj(attended)
        return self.o_proj(attended, residual)

    def project(self, x: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        """`[..., H]` -> queries `[..., N, D]`, keys and values `[..., G, D]`."""
        heads = (*x.shape[:-1], -1, self.head_dim)
        if self.qkv_proj is None:
            return tuple(each(x).view(heads) for each in (self.q_proj, self.k_proj, self.v_proj))
        sizes = (self.num_heads, self.num_kv_heads, self.num_kv_heads)
        return self.qkv_proj(x).view(heads).split(sizes, dim=-2)


def fuse(model: nn.Module, packed: bool) -> None:
    """Fuse every layer of a loaded model that can be fused, and pack the weights if asked to."""
    for module in list(model.modules()):
        if callable(getattr(module, "fuse", None)):
            module.fuse(packed)


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
