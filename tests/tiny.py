"""Small random checkpoints: a Llama target and a z-lab drafter that fits it."""

from __future__ import annotations

import json
import shutil
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import save_file

from dflash_core.checkpoint import load_target_config
from dflash_core.config import default_target_layer_ids, drafter_config
from dflash_core.random_drafter import drafter_json, weight_shapes

TOKENIZER_FILES = ("tokenizer.json", "tokenizer_config.json", "chat_template.jinja")
MASK_TOKEN_ID = 16  # `<empty_output>` when the tokenizer is SmolLM2's


def target_json(**changes: Any) -> dict[str, Any]:
    """The config.json of a target that every tensor-parallel size up to 8 divides."""
    return {
        "architectures": ["LlamaForCausalLM"],
        "model_type": "llama",
        "hidden_act": "silu",
        "hidden_size": 64,
        "intermediate_size": 128,
        "num_hidden_layers": 6,
        "num_attention_heads": 8,
        "num_key_value_heads": 2,
        "head_dim": 8,
        "vocab_size": 256,
        "rms_norm_eps": 1e-5,
        "rope_theta": 10000.0,
        "rope_scaling": None,
        "max_position_embeddings": 512,
        "tie_word_embeddings": False,
        "attention_bias": False,
        "mlp_bias": False,
        "bos_token_id": 1,
        "eos_token_id": 2,
        "torch_dtype": "float32",
    } | changes


def target_shapes(config: dict[str, Any]) -> dict[str, tuple[int, ...]]:
    hidden, intermediate = config["hidden_size"], config["intermediate_size"]
    queries = config["num_attention_heads"] * config["head_dim"]
    keys = config["num_key_value_heads"] * config["head_dim"]
    layer = {
        "input_layernorm": (hidden,),
        "self_attn.q_proj": (queries, hidden),
        "self_attn.k_proj": (keys, hidden),
        "self_attn.v_proj": (keys, hidden),
        "self_attn.o_proj": (hidden, queries),
        "post_attention_layernorm": (hidden,),
        "mlp.gate_proj": (intermediate, hidden),
        "mlp.up_proj": (intermediate, hidden),
        "mlp.down_proj": (hidden, intermediate),
    }
    shapes = {"model.embed_tokens.weight": (config["vocab_size"], hidden)}
    for index in range(config["num_hidden_layers"]):
        for name, shape in layer.items():
            shapes[f"model.layers.{index}.{name}.weight"] = shape
    shapes["model.norm.weight"] = (hidden,)
    if not config["tie_word_embeddings"]:
        shapes["lm_head.weight"] = (config["vocab_size"], hidden)
    return shapes


def write_target(
    folder: Path, *, seed: int = 0, tokenizer_from: Path | None = None, **changes: Any
) -> Path:
    """A random float32 target; `tokenizer_from` copies a checkpoint's tokenizer next to it."""
    config = target_json(**changes)
    generator = torch.Generator().manual_seed(seed)
    folder.mkdir(parents=True, exist_ok=True)
    weights = {
        name: torch.ones(shape)
        if len(shape) == 1
        else torch.randn(shape, generator=generator) * shape[-1] ** -0.5
        for name, shape in target_shapes(config).items()
    }
    save_file(weights, folder / "model.safetensors", metadata={"format": "pt"})
    (folder / "config.json").write_text(json.dumps(config), encoding="utf-8")
    if tokenizer_from is not None:
        for name in TOKENIZER_FILES:
            shutil.copy(tokenizer_from / name, folder / name)
    return folder


def write_drafter(
    folder: Path,
    target: Path,
    *,
    layers: int = 2,
    block_size: int = 6,
    target_layer_ids: tuple[int, ...] | None = None,
    seed: int = 3,
    **changes: Any,
) -> Path:
    """A random float32 drafter for a target folder, with fields of its config.json changed.

    Its weights are large, so that what it drafts depends on its context.
    """
    target_config = load_target_config(target)
    raw = drafter_json(
        target_config,
        layers=layers,
        block_size=block_size,
        mask_token_id=MASK_TOKEN_ID,
        target_layer_ids=target_layer_ids
        or default_target_layer_ids(target_config.num_layers, layers),
    )
    raw |= {"torch_dtype": "float32"} | changes
    generator = torch.Generator().manual_seed(seed)
    weights = {
        name: torch.randn(shape, generator=generator) * (1.0 if len(shape) == 1 else 0.3)
        for name, shape in weight_shapes(drafter_config(raw)).items()
    }
    folder.mkdir(parents=True, exist_ok=True)
    save_file(weights, folder / "model.safetensors", metadata={"format": "pt"})
    (folder / "config.json").write_text(json.dumps(raw), encoding="utf-8")
    return folder
