"""The published pair: Llama-3.1-8B-Instruct and its DFlash drafter, as their config.json say.

Of the drafter's config, third parties have published everything that has to do with shapes and
semantics, but not `rope_theta`, `rms_norm_eps` and `max_position_embeddings`: these three are made
up here, and have to come from the real file.
"""

from __future__ import annotations

import json
from math import prod
from pathlib import Path
from typing import Any

from dflash_core.config import DrafterConfig, drafter_config
from dflash_core.random_drafter import weight_shapes
from tests.tiny import target_json, target_shapes

TARGET_BYTES = 16_060_522_496  # total_size in its model.safetensors.index.json
DRAFTER_PARAMETERS = 1_048_626_432
TARGET_SHARDS = 4

TARGET: dict[str, Any] = target_json(
    hidden_size=4096,
    intermediate_size=14336,
    num_hidden_layers=32,
    num_attention_heads=32,
    num_key_value_heads=8,
    head_dim=128,
    vocab_size=128256,
    rope_theta=500000.0,
    rope_scaling={
        "rope_type": "llama3",
        "factor": 8.0,
        "low_freq_factor": 1.0,
        "high_freq_factor": 4.0,
        "original_max_position_embeddings": 8192,
    },
    max_position_embeddings=131072,
    bos_token_id=128000,
    eos_token_id=[128001, 128008, 128009],
    torch_dtype="bfloat16",
)
DRAFTER: dict[str, Any] = {
    "architectures": ["DFlashDraftModel"],
    "model_type": "qwen3",
    "block_size": 10,
    "dflash_config": {"mask_token_id": 128002, "target_layer_ids": [1, 8, 15, 22, 29]},
    "num_target_layers": 32,
    "num_hidden_layers": 5,
    "hidden_act": "silu",
    "hidden_size": 4096,
    "intermediate_size": 12288,
    "num_attention_heads": 32,
    "num_key_value_heads": 8,
    "head_dim": 128,
    "vocab_size": 128256,
    "rms_norm_eps": 1e-05,
    "rope_theta": 500000.0,
    "rope_scaling": None,
    "max_position_embeddings": 131072,
    "attention_bias": False,
    "sliding_window": None,
    "use_sliding_window": False,
    "tie_word_embeddings": False,
    "torch_dtype": "bfloat16",
}


def drafter_shapes() -> dict[str, tuple[int, ...]]:
    config: DrafterConfig = drafter_config(DRAFTER)
    return dict(weight_shapes(config))


def write_sparse_target(folder: Path) -> Path:
    """Names, shapes and four files of the target; its 16 GB are holes that read as zeros."""
    shapes = target_shapes(TARGET)
    names = list(shapes)
    size = -(-len(names) // TARGET_SHARDS)
    weight_map: dict[str, str] = {}
    for shard in range(TARGET_SHARDS):
        part = names[shard * size : (shard + 1) * size]
        file = f"model-{shard + 1:05}-of-{TARGET_SHARDS:05}.safetensors"
        _write_sparse(folder / file, {name: shapes[name] for name in part})
        weight_map |= dict.fromkeys(part, file)
    index = {"metadata": {"total_size": TARGET_BYTES}, "weight_map": weight_map}
    (folder / "model.safetensors.index.json").write_text(json.dumps(index))
    (folder / "config.json").write_text(json.dumps(TARGET))
    return folder


def write_sparse_drafter(folder: Path) -> Path:
    _write_sparse(folder / "model.safetensors", drafter_shapes())
    (folder / "config.json").write_text(json.dumps(DRAFTER))
    return folder


def _write_sparse(file: Path, shapes: dict[str, tuple[int, ...]]) -> None:
    """A safetensors file of bfloat16 tensors: eight bytes of length, a JSON header, then holes."""
    header: dict[str, Any] = {}
    end = 0
    for name, shape in shapes.items():
        begin, end = end, end + 2 * prod(shape)
        header[name] = {"dtype": "BF16", "shape": list(shape), "data_offsets": [begin, end]}
    text = json.dumps(header).encode()
    text += b" " * (-len(text) % 8)
    file.parent.mkdir(parents=True, exist_ok=True)
    with file.open("wb") as opened:
        opened.write(len(text).to_bytes(8, "little") + text)
        opened.truncate(8 + len(text) + end)
