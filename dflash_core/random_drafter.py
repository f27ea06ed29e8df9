"""A correctly shaped drafter with random weights, for targets that have no trained one.

Its drafts are almost never accepted; with it everything but the speed-up can be run and tested.

`python -m dflash_core.random_drafter TARGET --out DIR`
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Annotated, Any

import torch
import typer
from safetensors.torch import save_file

from dflash_core.checkpoint import load_target_config, read_json, resolve
from dflash_core.config import DrafterConfig, TargetConfig, default_target_layer_ids, drafter_config
from dflash_core.errors import CheckpointError

STANDARD_DEVIATION = 0.02  # of the weights; the usual initialisation of transformers
UNUSED_TOKENS = ("<empty_output>", "<|reserved_special_token_0|>")  # SmolLM2, Llama 3


def write_random_drafter(
    target_folder: str | Path,
    out: str | Path,
    *,
    layers: int = 2,
    block_size: int = 8,
    seed: int = 0,
    mask_token_id: int | None = None,
    target_layer_ids: tuple[int, ...] | None = None,
) -> Path:
    """Write a z-lab-format checkpoint (bfloat16) for a target checkpoint and return its folder.

    Layer shapes and rotary base are the target's, tapped layers those of z-lab's rule. The mask
    token is by default a special token that no chat template emits: `<empty_output>` (16) for
    SmolLM2, `<|reserved_special_token_0|>` (128002) for Llama 3. Raises CheckpointError.
    """
    target = load_target_config(target_folder)
    if mask_token_id is None:
        mask_token_id = _unused_token(Path(target_folder))
    raw = drafter_json(
        target,
        layers=layers,
        block_size=block_size,
        mask_token_id=mask_token_id,
        target_layer_ids=target_layer_ids or default_target_layer_ids(target.num_layers, layers),
    )
    config = drafter_config(raw)
    folder = Path(out)
    folder.mkdir(parents=True, exist_ok=True)
    generator = torch.Generator().manual_seed(seed)
    weights = {name: _random(shape, generator) for name, shape in weight_shapes(config).items()}
    save_file(weights, folder / "model.safetensors", metadata={"format": "pt"})
    (folder / "config.json").write_text(json.dumps(raw, indent=2) + "\n", encoding="utf-8")
    return folder


def drafter_json(
    target: TargetConfig,
    *,
    layers: int,
    block_size: int,
    mask_token_id: int,
    target_layer_ids: tuple[int, ...],
) -> dict[str, Any]:
    """The config.json of a drafter for `target` in z-lab's format."""
    return {
        "architectures": ["DFlashDraftModel"],
        "model_type": "qwen3",
        "block_size": block_size,
        "dflash_config": {
            "mask_token_id": mask_token_id,
            "target_layer_ids": list(target_layer_ids),
        },
        "num_target_layers": target.num_layers,
        "num_hidden_layers": layers,
        "hidden_size": target.hidden_size,
        "intermediate_size": target.intermediate_size,
        "num_attention_heads": target.num_heads,
        "num_key_value_heads": target.num_kv_heads,
        "head_dim": target.head_dim,
        "hidden_act": "silu",
        "vocab_size": target.vocab_size,
        "rms_norm_eps": target.rms_norm_eps,
        "rope_theta": target.rope.theta,
        "rope_scaling": None,
        "max_position_embeddings": target.max_position_embeddings,
        "attention_bias": False,
        "tie_word_embeddings": False,
        "torch_dtype": "bfloat16",
    }


def weight_shapes(config: DrafterConfig) -> dict[str, tuple[int, ...]]:
    """Every tensor of a z-lab checkpoint with its shape."""
    hidden, features = config.hidden_size, len(config.target_layer_ids) * config.hidden_size
    queries, keys = config.num_heads * config.head_dim, config.num_kv_heads * config.head_dim
    layer = {
        "input_layernorm.weight": (hidden,),
        "self_attn.q_proj.weight": (queries, hidden),
        "self_attn.k_proj.weight": (keys, hidden),
        "self_attn.v_proj.weight": (keys, hidden),
        "self_attn.o_proj.weight": (hidden, queries),
        "self_attn.q_norm.weight": (config.head_dim,),
        "self_attn.k_norm.weight": (config.head_dim,),
        "post_attention_layernorm.weight": (hidden,),
        "mlp.gate_proj.weight": (config.intermediate_size, hidden),
        "mlp.up_proj.weight": (config.intermediate_size, hidden),
        "mlp.down_proj.weight": (hidden, config.intermediate_size),
    }
    shapes = {"fc.weight": (hidden, features), "hidden_norm.weight": (hidden,)}
    for index in range(config.num_layers):
        shapes |= {f"layers.{index}.{name}": shape for name, shape in layer.items()}
    return shapes | {"norm.weight": (hidden,)}


def _random(shape: tuple[int, ...], generator: torch.Generator) -> torch.Tensor:
    if len(shape) == 1:  # the gain of a norm
        return torch.ones(shape, dtype=torch.bfloat16)
    return (torch.randn(shape, generator=generator) * STANDARD_DEVIATION).bfloat16()


def _unused_token(folder: Path) -> int:
    tokenizer = folder / "tokenizer.json"
    added = read_json(tokenizer).get("added_tokens", []) if tokenizer.is_file() else []
    ids = {token["content"]: token["id"] for token in added}
    for name in UNUSED_TOKENS:
        if name in ids:
            return ids[name]
    raise CheckpointError(
        f"{folder}: its tokenizer has none of {', '.join(UNUSED_TOKENS)}; give --mask-token-id, a "
        "token that prompts and answers never contain"
    )


def main(
    target: Annotated[str, typer.Argument(help="Hub id, folder or package:// name of the target")],
    out: Annotated[Path, typer.Option(help="Folder to write")],
    layers: Annotated[int, typer.Option(min=1, help="Draft layers")] = 2,
    block_size: Annotated[int, typer.Option(min=2, help="Draft tokens per step plus one")] = 8,
    seed: Annotated[int, typer.Option(help="Of the weights")] = 0,
    mask_token_id: Annotated[int | None, typer.Option(min=0, help="Overrides the default")] = None,
) -> None:
    """Write a randomly initialised DFlash drafter for TARGET."""
    try:
        folder = write_random_drafter(
            resolve(target),
            out,
            layers=layers,
            block_size=block_size,
            seed=seed,
            mask_token_id=mask_token_id,
        )
    except CheckpointError as error:
        typer.echo(error, err=True)
        raise typer.Exit(1) from error
    typer.echo(f"random drafter -> {folder}")


if __name__ == "__main__":
    typer.run(main)
