"""Loaded layers as the kernels want them. The plain weights are given up, one layer at a time."""

from __future__ import annotations

from collections.abc import Iterable

import torch
from torch import Tensor, nn

from dflash_core.attention import Attention
from dflash_core.cpu import kernels
from dflash_core.decoder_layer import DecoderLayer
from dflash_core.norm import RMSNorm


class PackedEmbedding(nn.Module):
    """The embedding of a model whose head is tied to it: both are one weight, in memory once."""

    def __init__(self, head: kernels.Weight) -> None:
        super().__init__()
        self.head = head

    def forward(self, tokens_BL: Tensor) -> Tensor:
        """`[B, L]` int32 -> `[B, L, H]`."""
        return self.head.rows(tokens_BL)


def packed_decoder(
    layers: nn.ModuleList, tapped: tuple[int, ...] = (), kinds: list[int] | None = None
) -> kernels.Decoder:
    """All layers as one operation; empties the list.

    Args:
        layers: `DecoderLayer`s, bfloat16, not sharded.
        tapped, kinds: see `kernels.Decoder`.
    """
    packed = []
    for index, layer in enumerate(layers):
        packed.append(_packed_layer(layer))
        layers[index] = nn.Identity()
    del layers[:]
    return kernels.Decoder(packed, tapped, kinds)


def packed_injection(
    fc: nn.Linear, norm: RMSNorm, layers: Iterable[DecoderLayer]
) -> kernels.Injection:
    """What a drafter does to features; the weights of keys and values are copied."""
    projections = []
    for layer in layers:
        attention = layer.self_attn
        weight = packed_weight(attention.k_proj, attention.v_proj)
        projections.append((weight, packed_heads(attention)))
    return kernels.Injection(packed_weight(fc), (norm.weight.detach(), norm.eps), projections)


def _packed_layer(layer: DecoderLayer) -> kernels.Layer:
    attention, mlp = layer.self_attn, layer.mlp
    return kernels.Layer(
        attention_norm=layer.input_layernorm.weight.detach(),
        mlp_norm=layer.post_attention_layernorm.weight.detach(),
        eps=layer.input_layernorm.eps,
        qkv=packed_weight(attention.q_proj, attention.k_proj, attention.v_proj),
        output=packed_weight(attention.o_proj),
        gate_up=packed_weight(mlp.gate_proj, mlp.up_proj, swiglu=True),
        down=packed_weight(mlp.down_proj),
        heads=packed_heads(attention),
    )


def packed_heads(attention: Attention) -> kernels.Heads:
    norms, eps = None, 0.0
    if attention.q_norm is not None:
        norms = attention.q_norm.weight.detach(), attention.k_norm.weight.detach()
        eps = attention.q_norm.eps
    return kernels.Heads(
        attention.num_heads, attention.num_kv_heads, attention.head_dim, norms, eps
    )


def packed_weight(*layers: nn.Module, swiglu: bool = False) -> kernels.Weight:
    """The weights (and biases) of layers with one input, side by side."""
    biases = [layer.bias for layer in layers if getattr(layer, "bias", None) is not None]
    assert len(biases) in (0, len(layers))
    bias_O = torch.cat(biases).detach() if biases else None
    weights: list[Tensor] = [layer.weight.detach() for layer in layers]
    weight_OI = weights[0] if len(weights) == 1 else torch.cat(weights)
    return kernels.Weight(weight_OI, bias_O, swiglu=swiglu)
