"""A second, deliberately plain implementation of the drafter, straight from the design.

No cache, no batch, no masks, no parallelism: every draft is computed from all features anew, in
float32, with nothing but matrix products. What the served drafter says is compared with this.
"""

from __future__ import annotations

import math

import torch
from torch import Tensor

from dflash_core.config import DrafterConfig


def rms_norm(x: Tensor, weight: Tensor, eps: float) -> Tensor:
    return x / torch.sqrt((x * x).mean(-1, keepdim=True) + eps) * weight


def rope(x: Tensor, positions: Tensor, theta: float) -> Tensor:
    """x `[tokens, heads, D]`: rotate the pairs (i, i + D/2) by position * theta^(-2i/D)."""
    half = x.shape[-1] // 2
    angle = positions[:, None] * theta ** (-torch.arange(half) * 2.0 / x.shape[-1])
    cos, sin = angle.cos()[:, None], angle.sin()[:, None]
    a, b = x[..., :half], x[..., half:]
    return torch.cat((a * cos - b * sin, b * cos + a * sin), dim=-1)


def draft(
    weights: dict[str, Tensor],
    config: DrafterConfig,
    embedding: Tensor,
    head: Tensor,
    features: Tensor,
    token: int,
    start: int,
    num_drafts: int,
    first_context: int = 0,
) -> list[int]:
    """Greedy draft tokens for the positions start + 1 .. start + num_drafts.

    Args:
        weights: the z-lab checkpoint, float32.
        embedding, head: the target's, `[vocab, H]`.
        features: `[start, width]` of the positions 0..start-1.
        token: newest accepted token, at position `start`.
        first_context: positions before it were never injected.
    """
    eps, D = config.rms_norm_eps, config.head_dim
    group = config.num_heads // config.num_kv_heads
    positions_c = torch.arange(first_context, start)
    context = rms_norm(
        features[first_context:start] @ weights["fc.weight"].T, weights["hidden_norm.weight"], eps
    )
    positions_b = torch.arange(start, start + num_drafts + 1)
    positions = torch.cat((positions_c, positions_b))
    x = embedding[torch.tensor([token] + [config.mask_token_id] * num_drafts)]
    for i in range(config.num_layers):
        w = {
            name.removeprefix(f"layers.{i}."): tensor
            for name, tensor in weights.items()
            if name.startswith(f"layers.{i}.")
        }
        normed = rms_norm(x, w["input_layernorm.weight"], eps)
        source = torch.cat((context, normed))
        q = (normed @ w["self_attn.q_proj.weight"].T).view(-1, config.num_heads, D)
        k = (source @ w["self_attn.k_proj.weight"].T).view(-1, config.num_kv_heads, D)
        v = (source @ w["self_attn.v_proj.weight"].T).view(-1, config.num_kv_heads, D)
        q = rope(rms_norm(q, w["self_attn.q_norm.weight"], eps), positions_b, config.rope.theta)
        k = rope(rms_norm(k, w["self_attn.k_norm.weight"], eps), positions, config.rope.theta)
        out = torch.zeros(len(x), config.num_heads, D)
        for h in range(config.num_heads):
            scores = q[:, h] @ k[:, h // group].T / math.sqrt(D)
            distance = positions_b[:, None] - positions[None]
            if config.windows[i] is not None:
                scores[distance.abs() >= config.windows[i]] = -math.inf
            if config.causal[i]:
                scores[distance < 0] = -math.inf
            out[:, h] = scores.softmax(-1) @ v[:, h // group]
        x = x + out.flatten(1) @ w["self_attn.o_proj.weight"].T
        normed = rms_norm(x, w["post_attention_layernorm.weight"], eps)
        gate = normed @ w["mlp.gate_proj.weight"].T
        up = normed @ w["mlp.up_proj.weight"].T
        x = x + (gate * torch.sigmoid(gate) * up) @ w["mlp.down_proj.weight"].T
    logits = rms_norm(x, weights["norm.weight"], eps)[1:] @ head.T
    return logits.argmax(-1).tolist()
