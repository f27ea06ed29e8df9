"""Rotary position embedding in real arithmetic, from tables computed once per model.

Shape legend: B batch, L block length, N heads, D head dimension, P positions.
"""

from __future__ import annotations

import math

import torch
from torch import Tensor, nn

from dflash_core.config import LinearScaling, Llama3Scaling, RopeConfig


def inverse_frequencies(rope: RopeConfig, head_dim: int) -> Tensor:
    """float32 `[D / 2]`, after the checkpoint's scaling.

    The llama3 rule keeps short wavelengths, divides long ones by `factor` and blends in between
    (Llama 3.1 model card; transformers `modeling_rope_utils`).
    """
    exponent = torch.arange(0, head_dim, 2, dtype=torch.float32) / head_dim
    frequencies = 1.0 / rope.theta**exponent
    match rope.scaling:
        case None:
            return frequencies
        case LinearScaling(factor=factor):
            return frequencies / factor
        case Llama3Scaling() as scaling:
            wavelength = 2 * math.pi / frequencies
            original = scaling.original_max_position_embeddings
            blend = (original / wavelength - scaling.low_freq_factor) / (
                scaling.high_freq_factor - scaling.low_freq_factor
            )
            blend = blend.clamp(0.0, 1.0)
            return frequencies * (blend + (1.0 - blend) / scaling.factor)
    raise ValueError(f"rope scaling {rope.scaling!r} is not supported")


class RotaryEmbedding(nn.Module):
    """Cosine and sine tables `[P, D]` for the positions 0..max_positions-1, kept in float32."""

    def __init__(self, rope: RopeConfig, head_dim: int, max_positions: int) -> None:
        super().__init__()
        with torch.device("cpu"):
            positions = torch.arange(max_positions, dtype=torch.float32)
            angles = torch.outer(positions, inverse_frequencies(rope, head_dim))
            angles_PD = torch.cat((angles, angles), dim=-1)
            self.register_buffer("cos_PD", angles_PD.cos(), persistent=False)
            first, second = angles_PD.sin().chunk(2, dim=-1)
            self.register_buffer("sin_PD", torch.cat((-first, second), dim=-1), persistent=False)

    def forward(self, positions: Tensor, dtype: torch.dtype) -> tuple[Tensor, Tensor]:
        """int positions `[...]` -> (cos, sin), each `[..., 1, D]` for heads to broadcast over.

        The first half of sin has its sign changed, as `rotate` needs it.
        """
        index = positions.long()
        cos = self.cos_PD[index].to(dtype).unsqueeze(-2)
        sin = self.sin_PD[index].to(dtype).unsqueeze(-2)
        return cos, sin


def rotate(x_BLND: Tensor, rotary: tuple[Tensor, Tensor]) -> Tensor:
    """Apply rotary embedding (half-split layout) to queries or keys."""
    cos, sin = rotary
    first, second = x_BLND.chunk(2, dim=-1)
    return x_BLND * cos + torch.cat((second, first), dim=-1) * sin
