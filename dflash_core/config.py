"""Model configurations, normalised once from the config.json of a checkpoint.

Nothing else in the project looks at a raw config: naming variants of the ecosystem end here, and
whatever the models do not implement is refused here. A missing field is an error, never a default
taken from another model, except where the architecture itself defines what absence means.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from dflash_core.errors import ConfigError
from dflash_core.fields import Fields
from dflash_core.rope_config import LinearScaling, Llama3Scaling, RopeConfig, rope_config

__all__ = [
    "DrafterConfig",
    "LinearScaling",
    "Llama3Scaling",
    "RopeConfig",
    "TargetConfig",
    "default_target_layer_ids",
    "drafter_config",
    "target_config",
]

DTYPES = ("float32", "bfloat16", "float16")


@dataclass(frozen=True)
class TargetConfig:
    """A Llama decoder."""

    hidden_size: int
    intermediate_size: int
    num_layers: int
    num_heads: int
    num_kv_heads: int
    head_dim: int
    vocab_size: int
    rms_norm_eps: float
    rope: RopeConfig
    max_position_embeddings: int
    tie_word_embeddings: bool
    attention_bias: bool
    mlp_bias: bool
    bos_token_id: int | None
    eos_token_ids: tuple[int, ...]
    torch_dtype: str


@dataclass(frozen=True)
class DrafterConfig:
    """A DFlash draft model.

    `target_layer_ids` follow the z-lab convention: id l means the output of decoder layer l, which
    is `hidden_states[l + 1]` in transformers. `windows` and `causal` hold one entry per draft
    layer; a window counts positions and None means full attention.
    """

    hidden_size: int
    intermediate_size: int
    num_layers: int
    num_heads: int
    num_kv_heads: int
    head_dim: int
    vocab_size: int
    rms_norm_eps: float
    rope: RopeConfig
    max_position_embeddings: int
    attention_bias: bool
    block_size: int
    mask_token_id: int
    target_layer_ids: tuple[int, ...]
    num_target_layers: int
    windows: tuple[int | None, ...]
    causal: tuple[bool, ...]
    torch_dtype: str


def target_config(raw: Mapping[str, Any]) -> TargetConfig:
    """Normalise the config of a Llama checkpoint. Raises ConfigError."""
    fields = Fields(raw)
    _refuse_quantised(fields)
    _require_architecture(raw, "LlamaForCausalLM", "target")
    fields.neutral("hidden_act", "silu")
    hidden_size = fields.integer("hidden_size")
    num_heads, num_kv_heads = _heads(fields)
    if fields.has("head_dim"):
        head_dim = fields.integer("head_dim")
    elif hidden_size % num_heads == 0:
        head_dim = hidden_size // num_heads
    else:
        raise ConfigError(
            f"config.json: head_dim is missing and hidden_size {hidden_size} is not a multiple of "
            f"num_attention_heads {num_heads}"
        )
    return TargetConfig(
        hidden_size=hidden_size,
        intermediate_size=fields.integer("intermediate_size"),
        num_layers=fields.integer("num_hidden_layers"),
        num_heads=num_heads,
        num_kv_heads=num_kv_heads,
        head_dim=_even(head_dim),
        vocab_size=fields.integer("vocab_size"),
        rms_norm_eps=fields.number("rms_norm_eps"),
        rope=rope_config(fields),
        max_position_embeddings=fields.integer("max_position_embeddings"),
        tie_word_embeddings=fields.boolean("tie_word_embeddings", False),
        attention_bias=fields.boolean("attention_bias", False),
        mlp_bias=fields.boolean("mlp_bias", False),
        bos_token_id=(
            fields.integer("bos_token_id", minimum=0) if fields.has("bos_token_id") else None
        ),
        eos_token_ids=_eos(fields),
        torch_dtype=_dtype(raw),
    )


def drafter_config(raw: Mapping[str, Any]) -> DrafterConfig:
    """Normalise the config of a z-lab DFlash checkpoint. Raises ConfigError."""
    fields = Fields(raw)
    if "speculators_model_type" in raw or "transformer_layer_config" in raw:
        raise ConfigError(
            f"config.json: speculators_model_type is {raw.get('speculators_model_type')!r}: the "
            "speculators format is not supported; use the z-lab release of the drafter, or export "
            'it to that format (architectures ["DFlashDraftModel"], full vocabulary)'
        )
    _refuse_quantised(fields)
    _require_architecture(raw, "DFlashDraftModel", "drafter")
    nested = fields.section("dflash_config") or Fields({}, "config.json: dflash_config")
    for place in (fields, nested):
        place.neutral("hidden_act", "silu")
        place.neutral("input_embedding_scale", 1, 1.0)
        place.neutral("output_multiplier", 1, 1.0)
        place.neutral("final_logit_softcapping")
        place.neutral("use_swa", False)
        place.neutral("attention_sink_bias", False)
        place.neutral("is_neox_style", True)
    num_layers = fields.integer("num_hidden_layers")
    num_target_layers = _either(fields, nested, "num_target_layers").integer("num_target_layers")
    num_heads, num_kv_heads = _heads(fields)
    windows, causal = _attention(fields, nested, num_layers)
    return DrafterConfig(
        hidden_size=fields.integer("hidden_size"),
        intermediate_size=fields.integer("intermediate_size"),
        num_layers=num_layers,
        num_heads=num_heads,
        num_kv_heads=num_kv_heads,
        head_dim=_even(fields.integer("head_dim")),
        vocab_size=fields.integer("vocab_size"),
        rms_norm_eps=fields.number("rms_norm_eps"),
        rope=rope_config(fields),
        max_position_embeddings=fields.integer("max_position_embeddings"),
        attention_bias=fields.boolean("attention_bias", False),
        block_size=_either(fields, nested, "block_size").integer("block_size"),
        mask_token_id=_either(fields, nested, "mask_token_id").integer("mask_token_id", minimum=0),
        target_layer_ids=_target_layer_ids(fields, nested, num_target_layers, num_layers),
        num_target_layers=num_target_layers,
        windows=windows,
        causal=causal,
        torch_dtype=_dtype(raw),
    )


def default_target_layer_ids(num_target_layers: int, num_layers: int) -> tuple[int, ...]:
    """Tapped layers of a checkpoint that does not list them: evenly spread, z-lab's rule."""
    if num_layers == 1:
        return (num_target_layers // 2,)
    step = (num_target_layers - 4) / (num_layers - 1)
    return tuple(round(1 + layer * step) for layer in range(num_layers))


def _require_architecture(raw: Mapping[str, Any], supported: str, role: str) -> None:
    architectures = raw.get("architectures")
    if architectures is None:
        raise ConfigError(f"config.json: required field architectures is missing ({role} model)")
    if architectures == ["DFlash2DraftModel"]:
        raise ConfigError(
            "config.json: architectures is ['DFlash2DraftModel']; DFlash 2 drafters (convolutions, "
            "candidate selector) are not supported, use a DFlashDraftModel release"
        )
    if not isinstance(architectures, list) or supported not in architectures:
        raise ConfigError(
            f"config.json: architectures is {architectures!r}; a {role} must be {supported}"
        )


def _refuse_quantised(fields: Fields) -> None:
    section = fields.section("quantization_config")
    if section is not None:
        method = section.raw.get("quant_method")
        raise ConfigError(
            f"config.json: quantization_config is present (quant_method {method!r}); quantised "
            "checkpoints are not supported, use the bfloat16 release of the model"
        )


def _heads(fields: Fields) -> tuple[int, int]:
    num_heads = fields.integer("num_attention_heads")
    num_kv_heads = (  # absence means multi-head attention: every head its own keys and values
        fields.integer("num_key_value_heads") if fields.has("num_key_value_heads") else num_heads
    )
    if num_heads % num_kv_heads:
        raise ConfigError(
            f"config.json: num_attention_heads {num_heads} is not a multiple of "
            f"num_key_value_heads {num_kv_heads}"
        )
    return num_heads, num_kv_heads


def _even(head_dim: int) -> int:
    if head_dim % 2:
        raise ConfigError(f"config.json: head_dim is {head_dim}; rotary embedding needs it even")
    return head_dim


def _eos(fields: Fields) -> tuple[int, ...]:
    if "eos_token_id" in fields.raw and not fields.has("eos_token_id"):
        return ()
    if isinstance(fields.raw.get("eos_token_id"), list):
        return fields.integers("eos_token_id")
    return (fields.integer("eos_token_id", minimum=0),)


def _dtype(raw: Mapping[str, Any]) -> str:
    """`dtype` (transformers 5) or `torch_dtype`; float32 if neither is given, as transformers."""
    value = raw.get("dtype") or raw.get("torch_dtype") or "float32"
    if value not in DTYPES:
        raise ConfigError(f"config.json: dtype is {value!r}; supported are {', '.join(DTYPES)}")
    return value


def _either(fields: Fields, nested: Fields, name: str) -> Fields:
    """Where `name` is: at the top level of the config or in `dflash_config`."""
    if fields.has(name) and nested.has(name) and fields.raw[name] != nested.raw[name]:
        raise ConfigError(
            f"config.json: {name} is {fields.raw[name]!r} at the top level but "
            f"{nested.raw[name]!r} in dflash_config"
        )
    return nested if nested.has(name) else fields


def _target_layer_ids(
    fields: Fields, nested: Fields, num_target_layers: int, num_layers: int
) -> tuple[int, ...]:
    place = _either(fields, nested, "target_layer_ids")
    if place.has("target_layer_ids"):
        ids = place.integers("target_layer_ids")
    else:
        ids = default_target_layer_ids(num_target_layers, num_layers)
    if len(set(ids)) < len(ids) or min(ids) < 0 or max(ids) >= num_target_layers:
        raise ConfigError(
            f"config.json: target_layer_ids are {list(ids)}; they must be distinct and within "
            f"0..{num_target_layers - 1} (num_target_layers is {num_target_layers})"
        )
    return ids


def _attention(
    fields: Fields, nested: Fields, num_layers: int
) -> tuple[tuple[int | None, ...], tuple[bool, ...]]:
    """Per draft layer: its window, and whether it is causal (by default only where it slides)."""
    layer_types = fields.raw.get("layer_types") or ["full_attention"] * num_layers
    if len(layer_types) != num_layers:
        raise ConfigError(
            f"config.json: layer_types has {len(layer_types)} entries but num_hidden_layers is "
            f"{num_layers}"
        )
    unknown = sorted(set(layer_types) - {"full_attention", "sliding_attention"})
    if unknown:
        raise ConfigError(
            f"config.json: layer_types contains {unknown[0]!r}; supported are full_attention and "
            "sliding_attention"
        )
    slides = [layer_type == "sliding_attention" for layer_type in layer_types]
    if any(slides) and not fields.boolean("use_sliding_window", True):
        raise ConfigError(
            "config.json: use_sliding_window is False but layer_types contains sliding_attention"
        )
    window = fields.integer("sliding_window") if any(slides) else None
    place, name = (fields, "is_causal") if fields.has("is_causal") else (nested, "causal")
    return (
        tuple(window if sliding else None for sliding in slides),
        tuple(place.boolean(name, sliding) for sliding in slides),
    )
