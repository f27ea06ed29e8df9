"""Weights fit the architecture to the tensor, or nothing is loaded."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file

from dflash_core.checkpoint import CheckpointError
from dflash_core.drafter_runner import DrafterRunner
from dflash_core.shapes import StaticShapes
from dflash_core.target_runner import TargetRunner
from tests.tiny import write_drafter, write_target

SHAPES = StaticShapes.create(num_slots=1, max_model_len=64, num_drafts=5, prefill_chunk=16)
Weights = dict[str, torch.Tensor]


@pytest.fixture
def target(tmp_path: Path) -> Path:
    return write_target(tmp_path / "target")


@pytest.fixture
def drafter(tmp_path: Path, target: Path) -> Path:
    return write_drafter(tmp_path / "drafter", target)


def change(folder: Path, edit: Callable[[Weights], object]) -> None:
    weights = load_file(folder / "model.safetensors")
    edit(weights)
    save_file(weights, folder / "model.safetensors", metadata={"format": "pt"})


def test_as_written_they_load(target: Path, drafter: Path) -> None:
    TargetRunner.load(target, SHAPES, dtype=torch.float32)
    DrafterRunner.load(drafter, target, SHAPES, dtype=torch.float32)


@pytest.mark.parametrize(
    ("edit", "message"),
    [
        (lambda w: w.pop("model.layers.1.mlp.up_proj.weight"), r"missing: \['layers.1.mlp.up_proj"),
        (
            lambda w: w.update({"model.layers.0.mlp.router.weight": torch.ones(4, 4)}),
            r"unexpected: \['layers.0.mlp.router.weight'\]",
        ),
        (
            lambda w: w.update({"model.norm.weight": torch.ones(3)}),
            r"tensor model.norm.weight gives this rank shape \[3\], its config.json implies \[64\]",
        ),
        (
            lambda w: w.update({"model.layers.0.self_attn.q_proj.weight_scale": torch.ones(1)}),
            "unexpected: .*weight_scale",
        ),
    ],
    ids=["missing", "of another architecture", "of another shape", "scales of quantised weights"],
)
def test_a_target_with_other_tensors_is_refused(
    target: Path, edit: Callable[[Weights], object], message: str
) -> None:
    change(target, edit)
    with pytest.raises(CheckpointError, match=message):
        TargetRunner.load(target, SHAPES, dtype=torch.float32)


@pytest.mark.parametrize(
    ("edit", "message"),
    [
        (lambda w: w.pop("fc.weight"), r"missing: \['fc.weight'\]"),
        # With a vocabulary of its own its drafts would be another model's ids.
        (
            lambda w: w.update({"lm_head.weight": torch.ones(32, 64), "d2t": torch.ones(32)}),
            r"unexpected: \['d2t', 'lm_head.weight'\]",
        ),
        (
            lambda w: w.update({"mask_embedding": torch.ones(64)}),
            r"unexpected: \['mask_embedding'\]",
        ),
    ],
    ids=["missing", "a head of its own", "a mask embedding of its own"],
)
def test_a_drafter_with_other_tensors_is_refused(
    target: Path, drafter: Path, edit: Callable[[Weights], object], message: str
) -> None:
    change(drafter, edit)
    with pytest.raises(CheckpointError, match=message):
        DrafterRunner.load(drafter, target, SHAPES, dtype=torch.float32)


def test_a_drafter_is_no_target(target: Path, drafter: Path) -> None:
    (drafter / "config.json").write_text((target / "config.json").read_text())
    with pytest.raises(CheckpointError, match="weights do not match the architecture"):
        TargetRunner.load(drafter, SHAPES, dtype=torch.float32)
