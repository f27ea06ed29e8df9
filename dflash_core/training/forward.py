"""The drafter's training forward pass: many blocks of many conversations at once.

It uses the served module's own layers and weights; only the attention is laid out for training.
A block at anchor s sees the context of the positions < s and itself, nothing else, as when served
(`DFlashDrafter.forward`). Instead of one masked attention over the context and all blocks, of which
a block may see but one, context and own block are two products under a common softmax.

Shape legend: B conversations, S context positions, A anchors, L block length, H hidden, F feature
width, N query heads, G key/value heads, D head dimension.
"""

from __future__ import annotations

import math

import torch
from torch import Tensor

from dflash_core.attention import Attention
from dflash_core.drafter import DFlashDrafter
from dflash_core.rope import rotate


def draft_hidden(
    model: DFlashDrafter, features_BSF: Tensor, x_BALH: Tensor, anchors_BA: Tensor
) -> Tensor:
    """Hidden states of all blocks before the final norm, `[B, A, L, H]`.

    Args:
        features_BSF: target features of the positions 0..S-1.
        x_BALH: embeddings of `[anchor token, mask, mask, ...]`.
        anchors_BA: int64 positions of the anchors, 1..S-1.
    """
    B, A, L, _ = x_BALH.shape
    S = features_BSF.shape[1]
    dtype = x_BALH.dtype
    context_BSH = model.hidden_norm(model.fc(features_BSF))
    positions_BAL = anchors_BA[..., None] + torch.arange(L)
    context_rotary = model.rotary(torch.arange(S), dtype)
    block_rotary = model.rotary(positions_BAL, dtype)
    hidden_BA1S = (torch.arange(S) >= anchors_BA[..., None])[:, :, None]
    for layer in model.layers:
        keys, values = layer.self_attn.keys_values(context_BSH, context_rotary)
        attended = _attention(
            layer.self_attn,
            layer.input_layernorm(x_BALH),
            block_rotary,
            keys,
            values,
            hidden_BA1S,
        )
        x_BALH = x_BALH + attended
        x_BALH = x_BALH + layer.mlp(layer.post_attention_layernorm(x_BALH))
    return x_BALH


def _attention(
    module: Attention,
    x_BALH: Tensor,
    rotary: tuple[Tensor, Tensor],
    keys_BSGD: Tensor,
    values_BSGD: Tensor,
    hidden_BA1S: Tensor,
) -> Tensor:
    B, A, L, _ = x_BALH.shape
    S, G, D = keys_BSGD.shape[1:]
    q = rotate(module.q_norm(module.q_proj(x_BALH).view(B, A, L, -1, D)), rotary)
    n = q.shape[3] // G  # query heads of a group, laid beside the block's rows
    q = (q / math.sqrt(D)).view(B, A, L, G, n, D).permute(0, 3, 1, 4, 2, 5).contiguous()
    own_keys, own_values = module.keys_values(x_BALH, rotary)  # [B, A, L, G, D]
    own_keys = own_keys.permute(0, 3, 1, 4, 2).reshape(B * G * A, D, L)
    own_values = own_values.permute(0, 3, 1, 2, 4).reshape(B * G * A, L, D)
    keys = keys_BSGD.permute(0, 2, 3, 1).reshape(B * G, D, S)
    values = values_BSGD.permute(0, 2, 1, 3).reshape(B * G, S, D)
    context_scores = torch.bmm(q.view(B * G, A * n * L, D), keys).view(B, G, A, n * L, S)
    context_scores = context_scores.masked_fill(hidden_BA1S[:, None], float("-inf"))
    own_scores = torch.bmm(q.view(B * G * A, n * L, D), own_keys).view(B, G, A, n * L, L)
    weights = torch.cat((context_scores, own_scores), dim=-1).softmax(dim=-1)
    context_weights, own_weights = weights.split((S, L), dim=-1)
    out = torch.bmm(context_weights.reshape(B * G, A * n * L, S), values).view(B, G, A, n, L, D)
    own = torch.bmm(own_weights.reshape(B * G * A, n * L, L), own_values)
    out = out + own.view(B, G, A, n, L, D)
    return module.o_proj(out.permute(0, 2, 4, 1, 3, 5).reshape(B, A, L, G * n * D))
