"""Fused and packed layers say what the checkpoint's own layers say."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

from dflash_core.checkpoint import Checkpoint, load_target_config
from dflash_core.fused import FusedLinear, FusedRows, packable
from dflash_core.layers import fuse
from dflash_core.loading import build
from dflash_core.parallel import RowParallelLinear
from dflash_core.target import LlamaTarget
from dflash_core.target_runner import TargetRunner
from tests.core.test_drafter import Pair, features_of, plan
from tests.core.test_target import SHAPES, VARIANTS, run, transformers_model

CPU = torch.device("cpu")
needs_packing = pytest.mark.skipif(
    not packable(torch.bfloat16, CPU), reason="this processor has no bf16 kernels of oneDNN"
)


def plain_model(folder: Path, dtype: torch.dtype) -> LlamaTarget:
    config = load_target_config(folder)
    return build(
        lambda: LlamaTarget(config, max_model_len=64, tapped_layers=(1,)),
        Checkpoint(folder),
        dtype=dtype,
        device=CPU,
        prefix="model.",
    )


def outputs(model: LlamaTarget, dtype: torch.dtype) -> tuple[torch.Tensor, torch.Tensor]:
    runner = TargetRunner(model, SHAPES, dtype=dtype, device=CPU)
    rows = torch.randint(0, 131, (2, 9), generator=torch.Generator().manual_seed(1)).tolist()
    return run(runner, runner.cache, rows, [2, 0], [0, 0])


@pytest.mark.parametrize("variant", VARIANTS)
def test_a_fused_target_gives_the_logits_of_its_checkpoint(variant: str, tmp_path: Path) -> None:
    transformers_model(tmp_path, **VARIANTS[variant])
    model = plain_model(tmp_path, torch.float32)
    expected, expected_features = outputs(model, torch.float32)
    fuse(model, packed=False)
    names = dict(model.named_parameters())
    assert not any("q_proj" in name or "gate_proj" in name for name in names), "weights held twice"
    logits, features = outputs(model, torch.float32)
    torch.testing.assert_close(logits, expected, rtol=1e-4, atol=1e-4)
    torch.testing.assert_close(features, expected_features, rtol=1e-4, atol=1e-4)


@needs_packing
@pytest.mark.parametrize("variant", VARIANTS)
def test_a_packed_target_gives_the_logits_of_a_plain_one(variant: str, tmp_path: Path) -> None:
    transformers_model(tmp_path, **VARIANTS[variant])
    expected, expected_features = outputs(plain_model(tmp_path, torch.bfloat16), torch.bfloat16)
    runner = TargetRunner.load(tmp_path, SHAPES, tapped_layers=(1,), dtype=torch.bfloat16)
    assert runner.model.fused_head is not None and runner.model.fused_head.packed
    logits, features = outputs(runner.model, torch.bfloat16)
    torch.testing.assert_close(logits, expected, rtol=0.05, atol=0.3)
    torch.testing.assert_close(features, expected_features, rtol=0.05, atol=0.3)
    spread = expected.float().std()
    assert (logits - expected).float().abs().mean() < 0.03 * spread


def test_a_fused_drafter_drafts_as_before(tmp_path: Path) -> None:
    pair = Pair(tmp_path, num_key_value_heads=2)
    fuse(pair.runner.model, packed=False)
    fuse(pair.runner.vocabulary, packed=False)
    features = features_of(1)
    for start in (4, 9, 21):
        rows = [(2, position) for position in range(start)]
        result = pair.runner.draft(plan(features[:start], rows, [(2, start, start)]))
        assert result.tokens == [pair.expected(features, start, start)]


@needs_packing
@pytest.mark.parametrize("rows", [1, 7, 8, 64, 200])
def test_packing_changes_no_product(rows: int) -> None:
    generator = torch.Generator().manual_seed(0)
    weight = torch.randn((96, 64), generator=generator).bfloat16()
    bias = torch.randn(96, generator=generator).bfloat16()
    x = torch.randn((rows, 64), generator=generator).bfloat16()
    exact = x.double() @ weight.double().T + bias.double()
    with torch.inference_mode():
        y = FusedLinear([weight[:32], weight[32:]], [bias[:32], bias[32:]], packed=True)(x)
    torch.testing.assert_close(y, exact.bfloat16(), rtol=2**-7, atol=0.05)


def test_a_fused_row_parallel_layer_adds_its_bias_once() -> None:
    layer = RowParallelLinear(8, 4, bias=True)
    torch.nn.init.normal_(layer.weight)
    torch.nn.init.normal_(layer.bias)
    holder = torch.nn.Module()
    holder.layer = FusedRows(layer, packed=False)
    x = torch.randn(3, 8)
    torch.testing.assert_close(holder.layer(x), layer(x))
