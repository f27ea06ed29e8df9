"""The target's logits and features equal those of transformers."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from transformers import LlamaConfig, LlamaForCausalLM

from dflash_core.kv_cache import KVCache
from dflash_core.shapes import StaticShapes
from dflash_core.target_runner import TargetRunner

SHAPES = StaticShapes.create(num_slots=4, max_model_len=64, num_drafts=3, prefill_chunk=8)
LLAMA3 = {
    "rope_type": "llama3",
    "rope_theta": 500000.0,
    "factor": 8.0,
    "low_freq_factor": 1.0,
    "high_freq_factor": 4.0,
    "original_max_position_embeddings": 16,
}
VARIANTS = {
    "grouped-query, tied head": {"num_key_value_heads": 2, "tie_word_embeddings": True},
    "llama3 rope": {"rope_parameters": LLAMA3},
    "linear rope": {"rope_parameters": {"rope_type": "linear", "rope_theta": 1e4, "factor": 2.0}},
    "biases": {"attention_bias": True, "mlp_bias": True},
    "wide heads": {"head_dim": 32, "num_key_value_heads": 1},
}


def transformers_model(folder: Path, **changes: object) -> LlamaForCausalLM:
    torch.manual_seed(0)
    options = {
        "vocab_size": 131,
        "hidden_size": 64,
        "intermediate_size": 96,
        "num_hidden_layers": 4,
        "num_attention_heads": 4,
        "num_key_value_heads": 4,
        "max_position_embeddings": 64,
        "initializer_range": 0.2,
        "tie_word_embeddings": False,
    }
    model = LlamaForCausalLM(LlamaConfig(**options | changes)).eval()
    for name, parameter in model.named_parameters():
        if name.endswith("bias"):
            torch.nn.init.normal_(parameter)
    model.save_pretrained(folder)
    return model


def run(
    runner: TargetRunner, cache: KVCache, rows: list[list[int]], slots: list[int], starts: list[int]
) -> tuple[torch.Tensor, torch.Tensor]:
    length = max(map(len, rows))
    tokens = torch.tensor([row + [0] * (length - len(row)) for row in rows], dtype=torch.int32)
    with torch.inference_mode():
        hidden, features = runner.model(
            tokens,
            torch.tensor(slots, dtype=torch.int32),
            torch.tensor(starts, dtype=torch.int32),
            torch.tensor([len(row) for row in rows], dtype=torch.int32),
            cache,
            64,
        )
        return runner.model.logits(hidden), features


@pytest.mark.parametrize("variant", VARIANTS)
def test_logits_equal_transformers_in_any_division_into_steps(variant: str, tmp_path: Path) -> None:
    expected_model = transformers_model(tmp_path, **VARIANTS[variant])
    runner = TargetRunner.load(tmp_path, SHAPES, dtype=torch.float32)
    ids = torch.randint(0, 131, (2, 40), generator=torch.Generator().manual_seed(1))
    with torch.inference_mode():
        expected = expected_model(ids).logits
    first, second = ids.tolist()
    # Sequence 1 runs three tokens ahead of sequence 0, in slots that are not their row numbers.
    run(runner, runner.cache, [second[:3]], [0], [0])
    for begin, end in ((0, 17), (17, 18), (18, 26), (26, 37)):
        logits, _ = run(
            runner,
            runner.cache,
            [first[begin:end], second[begin + 3 : end + 3]],
            [3, 0],
            [begin, begin + 3],
        )
        torch.testing.assert_close(logits[0], expected[0, begin:end], atol=2e-4, rtol=1e-4)
        torch.testing.assert_close(
            logits[1], expected[1, begin + 3 : end + 3], atol=2e-4, rtol=1e-4
        )


def test_bfloat16_logits_are_within_its_rounding(tmp_path: Path) -> None:
    expected_model = transformers_model(tmp_path, initializer_range=0.05)
    runner = TargetRunner.load(tmp_path, SHAPES, dtype=torch.bfloat16)
    ids = torch.randint(0, 131, (1, 40), generator=torch.Generator().manual_seed(1))
    with torch.inference_mode():
        expected = expected_model(ids).logits
    logits, _ = run(runner, runner.cache, ids.tolist(), [0], [0])
    assert (logits.float() - expected).abs().max() < 0.05 * expected.abs().max()


def test_features_are_the_outputs_of_the_tapped_layers(tmp_path: Path) -> None:
    """Also of the last layer, whose output is taken before the final norm."""
    expected_model = transformers_model(tmp_path)
    outputs: list[torch.Tensor] = []
    for layer in expected_model.model.layers:
        layer.register_forward_hook(
            lambda _module, _args, out: outputs.append(out[0] if isinstance(out, tuple) else out)
        )
    ids = torch.randint(0, 131, (1, 12), generator=torch.Generator().manual_seed(2))
    with torch.inference_mode():
        hidden_states = expected_model(ids, output_hidden_states=True).hidden_states
    runner = TargetRunner.load(tmp_path, SHAPES, tapped_layers=(0, 2, 3), dtype=torch.float32)
    _, features = run(runner, runner.cache, ids.tolist(), [1], [0])
    tapped = features[0].split(64, dim=-1)
    for feature, layer in zip(tapped, (0, 2, 3), strict=True):
        torch.testing.assert_close(feature, outputs[layer].view(12, 64), atol=1e-4, rtol=1e-4)
    torch.testing.assert_close(tapped[0], hidden_states[1][0], atol=1e-4, rtol=1e-4)


def test_padding_and_neighbours_do_not_change_a_sequence(tmp_path: Path) -> None:
    transformers_model(tmp_path)
    runner = TargetRunner.load(tmp_path, SHAPES, dtype=torch.float32)
    alone, _ = run(runner, runner.cache, [[5, 6, 7, 8]], [2], [0])
    scratch = runner.cache.scratch_slot
    together, _ = run(
        runner,
        runner.cache,
        [[9] * 8, [5, 6, 7, 8], [0]],
        [0, 1, scratch],
        [0, 0, 0],
    )
    torch.testing.assert_close(together[1, :4], alone[0], atol=1e-5, rtol=1e-5)


def test_positions_beyond_the_context_limit_write_nowhere(tmp_path: Path) -> None:
    transformers_model(tmp_path)
    runner = TargetRunner.load(tmp_path, SHAPES, dtype=torch.float32)
    run(runner, runner.cache, [[5] * 64], [1], [0])
    before = [keys[:3].clone() for keys in runner.cache.keys]
    run(runner, runner.cache, [[9, 9, 9, 9]], [0], [62])
    for keys, kept in zip(runner.cache.keys, before, strict=True):
        assert torch.equal(keys[1:3], kept[1:3])
        assert torch.equal(keys[0, :62], kept[0, :62])
