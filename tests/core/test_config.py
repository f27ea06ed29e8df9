"""A config.json is understood completely or refused; nothing is guessed."""

from __future__ import annotations

import copy
from typing import Any

import pytest
from transformers import LlamaConfig

from dflash_core.config import (
    LinearScaling,
    Llama3Scaling,
    RopeConfig,
    default_target_layer_ids,
    drafter_config,
    target_config,
)
from dflash_core.errors import ConfigError
from tests.tiny import target_json

LLAMA3 = {
    "factor": 8.0,
    "low_freq_factor": 1.0,
    "high_freq_factor": 4.0,
    "original_max_position_embeddings": 8192,
}
# The published pairs: Llama 3.1 8B Instruct, and a z-lab drafter as of the first releases.
LLAMA_31_8B = {
    "architectures": ["LlamaForCausalLM"],
    "attention_bias": False,
    "bos_token_id": 128000,
    "eos_token_id": [128001, 128008, 128009],
    "hidden_act": "silu",
    "hidden_size": 4096,
    "intermediate_size": 14336,
    "max_position_embeddings": 131072,
    "mlp_bias": False,
    "model_type": "llama",
    "num_attention_heads": 32,
    "num_hidden_layers": 32,
    "num_key_value_heads": 8,
    "pretraining_tp": 1,
    "rms_norm_eps": 1e-05,
    "rope_scaling": {"rope_type": "llama3", **LLAMA3},
    "rope_theta": 500000.0,
    "tie_word_embeddings": False,
    "torch_dtype": "bfloat16",
    "vocab_size": 128256,
}
DRAFTER = {
    "architectures": ["DFlashDraftModel"],
    "model_type": "qwen3",
    "auto_map": {"AutoModel": "dflash.DFlashDraftModel"},
    "block_size": 10,
    "dflash_config": {"mask_token_id": 128002, "target_layer_ids": [1, 8, 15, 22, 29]},
    "num_target_layers": 32,
    "num_hidden_layers": 5,
    "hidden_act": "silu",
    "hidden_size": 4096,
    "intermediate_size": 14336,
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


def without(raw: dict[str, Any], *names: str) -> dict[str, Any]:
    return {name: value for name, value in raw.items() if name not in names}


def drafter_with(nested: dict[str, Any] | None = None, **changes: Any) -> dict[str, Any]:
    raw = copy.deepcopy(DRAFTER) | changes
    raw["dflash_config"] |= nested or {}
    return raw


class TestTarget:
    def test_llama_31(self):
        config = target_config(LLAMA_31_8B)
        assert (config.hidden_size, config.num_layers, config.vocab_size) == (4096, 32, 128256)
        assert (config.num_heads, config.num_kv_heads, config.head_dim) == (32, 8, 128)
        assert config.rope == RopeConfig(500000.0, Llama3Scaling(**LLAMA3))
        assert config.bos_token_id == 128000
        assert config.eos_token_ids == (128001, 128008, 128009)
        assert config.torch_dtype == "bfloat16"

    def test_transformers_5_spelling_means_the_same(self):
        raw = without(LLAMA_31_8B, "rope_scaling", "rope_theta", "torch_dtype") | {
            "rope_parameters": {"rope_type": "llama3", "rope_theta": 500000.0, **LLAMA3},
            "dtype": "bfloat16",
        }
        assert target_config(raw) == target_config(LLAMA_31_8B)

    def test_what_transformers_writes_is_understood(self):
        raw = LlamaConfig(**LLAMA_31_8B).to_dict() | {"architectures": ["LlamaForCausalLM"]}
        assert target_config(raw) == target_config(LLAMA_31_8B)

    def test_linear_scaling(self):
        expected = RopeConfig(10000.0, LinearScaling(4.0))
        for key in ("rope_type", "type"):
            raw = target_json(rope_scaling={key: "linear", "factor": 4.0})
            assert target_config(raw).rope == expected

    def test_absence_means_what_the_architecture_defines(self):
        raw = without(
            target_json(),
            "head_dim",
            "num_key_value_heads",
            "tie_word_embeddings",
            "attention_bias",
            "mlp_bias",
            "bos_token_id",
            "rope_scaling",
            "torch_dtype",
        )
        config = target_config(raw)
        assert (config.head_dim, config.num_kv_heads) == (8, 8)
        assert not (config.tie_word_embeddings or config.attention_bias or config.mlp_bias)
        assert config.bos_token_id is None
        assert config.rope.scaling is None
        assert config.torch_dtype == "float32"

    def test_a_null_end_of_sequence_is_none_at_all(self):
        assert target_config(target_json(eos_token_id=None)).eos_token_ids == ()

    @pytest.mark.parametrize(
        "field",
        [
            "architectures",
            "hidden_size",
            "intermediate_size",
            "num_hidden_layers",
            "num_attention_heads",
            "vocab_size",
            "rms_norm_eps",
            "rope_theta",
            "max_position_embeddings",
            "eos_token_id",
        ],
    )
    def test_a_missing_field_is_named(self, field):
        with pytest.raises(ConfigError, match=f"required field {field} is missing"):
            target_config(without(target_json(), field))

    @pytest.mark.parametrize(
        ("changes", "message"),
        [
            ({"architectures": ["MistralForCausalLM"]}, "architectures is .*Mistral.*Llama"),
            ({"hidden_size": "64"}, "hidden_size is '64', not an integer >= 1"),
            ({"num_hidden_layers": 0}, "num_hidden_layers is 0, not an integer >= 1"),
            ({"vocab_size": True}, "vocab_size is True"),
            ({"rms_norm_eps": -1.0}, "rms_norm_eps is -1.0, not a positive number"),
            ({"num_key_value_heads": 3}, "num_attention_heads 8 .* num_key_value_heads 3"),
            ({"head_dim": None, "hidden_size": 65}, "hidden_size 65 .* num_attention_heads 8"),
            ({"head_dim": 7}, "head_dim is 7"),
            ({"hidden_act": "gelu"}, "hidden_act is 'gelu', which is not supported"),
            ({"eos_token_id": [2, "3"]}, "eos_token_id contains '3'"),
            ({"tie_word_embeddings": "yes"}, "tie_word_embeddings is 'yes'"),
            ({"torch_dtype": "int8"}, "dtype is 'int8'"),
            ({"rope_scaling": {"rope_type": "yarn", "factor": 4.0}}, "rope_type is 'yarn'.*llama3"),
            ({"rope_scaling": {"type": "dynamic", "factor": 2.0}}, "rope_type is 'dynamic'"),
            ({"rope_scaling": {"factor": 2.0}}, "factor is given but rope_type is missing"),
            ({"rope_scaling": {"rope_type": "linear"}}, "rope_scaling: .*factor is missing"),
            (
                {"rope_scaling": {"rope_type": "llama3", "factor": 8.0}},
                "required field low_freq_factor is missing",
            ),
            (
                {"rope_scaling": {"rope_type": "llama3", **LLAMA3, "high_freq_factor": 1.0}},
                "high_freq_factor 1.0 .* low_freq_factor 1.0",
            ),
            ({"partial_rotary_factor": 0.5}, "partial_rotary_factor is 0.5"),
            (
                {"quantization_config": {"quant_method": "awq"}},
                "quantization_config is present .*'awq'.*bfloat16 release",
            ),
        ],
    )
    def test_what_is_not_implemented_is_refused(self, changes, message):
        with pytest.raises(ConfigError, match=message):
            target_config(target_json(**changes))


class TestDrafter:
    def test_z_lab_format(self):
        config = drafter_config(DRAFTER)
        assert (config.block_size, config.mask_token_id) == (10, 128002)
        assert config.target_layer_ids == (1, 8, 15, 22, 29)
        assert (config.num_layers, config.num_target_layers) == (5, 32)
        assert config.rope == RopeConfig(500000.0)
        assert config.windows == (None,) * 5
        assert config.causal == (False,) * 5

    @pytest.mark.parametrize("name", ["block_size", "mask_token_id", "target_layer_ids"])
    def test_its_own_fields_may_be_at_either_level(self, name):
        flat = DRAFTER["dflash_config"] | {"block_size": DRAFTER["block_size"]}
        nested = without(DRAFTER, name) | {"dflash_config": flat}
        outer = DRAFTER | flat | {"dflash_config": without(flat, name)}
        assert drafter_config(nested) == drafter_config(outer) == drafter_config(DRAFTER)

    def test_tapped_layers_follow_the_rule_when_they_are_not_listed(self):
        raw = drafter_with()
        del raw["dflash_config"]["target_layer_ids"]
        assert drafter_config(raw).target_layer_ids == (1, 8, 15, 22, 29)
        assert default_target_layer_ids(36, 5) == (1, 9, 17, 25, 33)
        assert default_target_layer_ids(36, 1) == (18,)

    def test_rope_is_the_drafters_own(self):
        raw = without(DRAFTER, "rope_theta", "rope_scaling") | {
            "rope_parameters": {"rope_type": "default", "rope_theta": 1e6}
        }
        assert drafter_config(raw).rope == RopeConfig(1e6)

    def test_only_sliding_layers_are_causal_by_default(self):
        kinds = ["sliding_attention"] * 4 + ["full_attention"]
        sliding = {"layer_types": kinds, "sliding_window": 2048, "use_sliding_window": True}
        config = drafter_config(drafter_with(**sliding))
        assert config.windows == (2048, 2048, 2048, 2048, None)
        assert config.causal == (True, True, True, True, False)
        for flag in (True, False):
            overridden = drafter_config(drafter_with(**sliding, is_causal=flag))
            assert overridden.causal == (flag,) * 5
            assert overridden.windows == config.windows
            assert drafter_config(drafter_with({"causal": flag}, **sliding)) == overridden

    @pytest.mark.parametrize(
        "field",
        ["num_target_layers", "block_size", "head_dim", "vocab_size", "rope_theta", "hidden_size"],
    )
    def test_a_missing_field_is_named(self, field):
        with pytest.raises(ConfigError, match=f"required field {field} is missing"):
            drafter_config(without(DRAFTER, field))

    def test_a_missing_mask_token_is_named(self):
        with pytest.raises(ConfigError, match="required field mask_token_id is missing"):
            drafter_config(DRAFTER | {"dflash_config": None})

    @pytest.mark.parametrize(
        ("raw", "message"),
        [
            (drafter_with(architectures=["DFlash2DraftModel"]), "DFlash 2 drafters"),
            (drafter_with(architectures=["Qwen3ForCausalLM"]), "must be DFlashDraftModel"),
            (drafter_with(speculators_model_type="dflash"), "speculators.* z-lab release"),
            (drafter_with({"input_embedding_scale": 8.0}), "input_embedding_scale is 8.0"),
            (drafter_with({"output_multiplier": 0.5}), "output_multiplier is 0.5"),
            (drafter_with(final_logit_softcapping=30.0), "final_logit_softcapping is 30.0"),
            (drafter_with({"final_logit_softcapping": 30.0}), "final_logit_softcapping is 30.0"),
            (drafter_with({"use_swa": True}), "use_swa is True"),
            (drafter_with(quantization_config={"quant_method": "fp8"}), "quantization_config"),
            (drafter_with({"block_size": 16}), "block_size is 10 .* but 16 in dflash_config"),
            (drafter_with({"target_layer_ids": [1, 32]}), r"target_layer_ids.*0\.\.31"),
            (drafter_with({"target_layer_ids": [1, 1]}), "must be distinct"),
            (drafter_with({"target_layer_ids": []}), "target_layer_ids is"),
            (drafter_with({"mask_token_id": -1}), "mask_token_id is -1"),
            (drafter_with(layer_types=["full_attention"]), "1 entries but .* is 5"),
            (drafter_with(layer_types=["linear_attention"] * 5), "'linear_attention'"),
            (
                drafter_with(
                    layer_types=["sliding_attention"] * 5,
                    sliding_window=None,
                    use_sliding_window=True,
                ),
                "sliding_window is missing",
            ),
            (
                drafter_with(layer_types=["sliding_attention"] * 5, sliding_window=64),
                "use_sliding_window is False",
            ),
            (drafter_with(rope_scaling={"rope_type": "yarn"}), "rope_type is 'yarn'"),
        ],
    )
    def test_what_is_not_implemented_is_refused(self, raw, message):
        with pytest.raises(ConfigError, match=message):
            drafter_config(raw)
