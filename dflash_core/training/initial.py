"""A new drafter that starts from its target.

The draft layers are copies of the target's last layers. `fc` passes the last tapped layer through,
so the first draft layer's context keys and values are nearly those that the target's own layer
would have: the drafter starts as something like the end of its target. Two differences of the
architectures are folded away: a draft layer normalises context and block with two different gains
where the target has one, and q_norm/k_norm remove the length of queries and keys.

Shape legend: T tokens, F feature width, H hidden.
"""

from __future__ import annotations

import torch
from torch import Tensor

from dflash_core.config import DrafterConfig
from dflash_core.drafter import DFlashDrafter
from dflash_core.target import LlamaTarget

NOISE = 0.2  # standard deviation of fc's other columns, in units of 1 / sqrt(F)


@torch.no_grad()
def new_drafter(
    config: DrafterConfig, target: LlamaTarget, features_TF: Tensor, *, seed: int
) -> DFlashDrafter:
    """A float32 drafter.

    Args:
        config: with the target's layer shapes.
        features_TF: some real features, to measure the length of queries and keys.
    """
    model = DFlashDrafter(config, max_model_len=config.max_position_embeddings).float()
    random = torch.Generator().manual_seed(seed)
    hidden, width = model.fc.weight.shape
    last = config.target_layer_ids[-1]
    model.fc.weight.normal_(0.0, NOISE * width**-0.5, generator=random)
    model.fc.weight[:, width - hidden :] = torch.eye(hidden)
    following = target.layers[min(last + 1, len(target.layers) - 1)]
    gain = following.input_layernorm.weight.float()
    gain = torch.where(gain.abs() < 1e-3, torch.ones_like(gain), gain)
    model.hidden_norm.weight.copy_(gain)
    model.norm.weight.copy_(target.norm.weight)
    context_TH = model.hidden_norm(model.fc(features_TF.float()))
    sources = target.layers[len(target.layers) - config.num_layers :]
    for layer, source in zip(model.layers, sources, strict=True):
        attention, original = layer.self_attn, source.self_attn
        # The copied projections expect the gain of their own layer, not `gain`.
        ratio = source.input_layernorm.weight.float() / gain
        layer.input_layernorm.weight.copy_(gain)
        for name in ("q_proj", "k_proj", "v_proj"):
            getattr(attention, name).weight.copy_(getattr(original, name).weight.float() * ratio)
        attention.o_proj.weight.copy_(original.o_proj.weight)
        for name in ("q", "k"):
            projected = getattr(attention, f"{name}_proj")(context_TH)
            length = projected.view(-1, config.head_dim).pow(2).mean(-1).sqrt().mean()
            getattr(attention, f"{name}_norm").weight.fill_(length)
        layer.post_attention_layernorm.weight.copy_(source.post_attention_layernorm.weight)
        for name in ("gate_proj", "up_proj", "down_proj"):
            getattr(layer.mlp, name).weight.copy_(getattr(source.mlp, name).weight)
    return model
