"""Steps run at the shapes that are listed, and warming up runs all of them."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch

from dflash_core import runtime
from dflash_core.drafter_runner import DrafterRunner
from dflash_core.engine import generate
from dflash_core.request import GenerationRequest
from dflash_core.shapes import StaticShapes
from dflash_core.step_shapes import (
    DraftShape,
    InjectShape,
    TargetShape,
    draft_shapes,
    inject_shapes,
    target_shapes,
)
from dflash_core.stopping import Stopping
from dflash_core.target_runner import TargetRunner
from tests.core.test_tensor_parallel import json_tokenizer
from tests.tiny import write_drafter, write_target

TAPS = (1, 4)
SHAPES = StaticShapes(
    num_slots=3,
    max_model_len=128,
    num_drafts=5,
    prefill_chunk=64,
    num_seqs_buckets=(1, 2, 3),
    context_buckets=(32, 64, 128),
    partial_drafts=(2,),
)


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("pair")
    target = write_target(folder / "target")
    write_drafter(folder / "drafter", target, target_layer_ids=TAPS)
    return folder


class Recorder:
    """Both runners, and the shapes at which their steps ran."""

    def __init__(self, folder: Path) -> None:
        self.target = TargetRunner.load(
            folder / "target", SHAPES, tapped_layers=TAPS, dtype=torch.float32
        )
        self.drafter = DrafterRunner.load(
            folder / "drafter", folder / "target", SHAPES, dtype=torch.float32
        )
        self.seen: set[Any] = set()
        for runner, name, shape in (
            (self.target, "step", lambda *args: TargetShape(False, *args[0].shape, args[4])),
            (self.target, "prefill_step", lambda *args: TargetShape(True, *args[0].shape, args[4])),
            (self.drafter, "inject_step", lambda *args: InjectShape(len(args[0]))),
            (self.drafter, "step", lambda *args: DraftShape(len(args[3]), len(args[0]), args[7])),
        ):
            setattr(runner, name, self.recording(getattr(runner, name), shape))

    def recording(self, step: Any, shape: Any) -> Any:
        def recorded(*args: Any) -> Any:
            for arg in args:
                assert not isinstance(arg, torch.Tensor) or arg.dtype != torch.int64
            self.seen.add(shape(*args))
            return step(*args)

        return recorded


LISTED = {*target_shapes(SHAPES), *inject_shapes(SHAPES), *draft_shapes(SHAPES)}


@pytest.fixture
def recorder(folder: Path) -> Recorder:
    return Recorder(folder)


def test_generating_runs_no_other_shape(recorder: Recorder) -> None:
    """Prompts of all lengths, alone and together, up to the end of the context."""
    for prompts in (
        [[3] * length for length in (1, 31, 33)],
        [[5] * 64, [6] * 65],
        [[7] * 120],
        [[8] * 10] * 3,
    ):

        def make(prompt: list[int]) -> Stopping:
            request = GenerationRequest("test", prompt, 128 - len(prompt))
            return Stopping(json_tokenizer(), request, eos_token_ids=(), max_model_len=128)

        generate(recorder.target, recorder.drafter, prompts, make)
    assert recorder.seen <= LISTED
    kinds = {type(shape) for shape in recorder.seen}
    assert kinds == {TargetShape, InjectShape, DraftShape}
    assert len(recorder.seen) > len(LISTED) / 2


def test_where_steps_are_compiled_all_shapes_are_warmed_up(
    recorder: Recorder, monkeypatch: pytest.MonkeyPatch
) -> None:
    """As on neuron; only the choice of shapes is switched, the device is this machine's."""
    for runner in ("target_runner", "drafter_runner"):
        monkeypatch.setattr(f"dflash_core.{runner}.warm_shapes", lambda shapes, device: shapes)
    recorder.target.warm_up()
    recorder.drafter.warm_up()
    assert recorder.seen == LISTED


def test_elsewhere_each_batch_and_length_is_warmed_up_once(recorder: Recorder) -> None:
    recorder.target.warm_up()
    recorder.drafter.warm_up()
    assert recorder.seen < LISTED

    def without_context(shapes: set[Any]) -> set[Any]:
        return {
            shape._replace(context=0) if hasattr(shape, "context") else shape for shape in shapes
        }

    assert without_context(recorder.seen) == without_context(LISTED)
    assert len(recorder.seen) == len(without_context(LISTED))


def test_only_neuron_needs_every_context_length() -> None:
    class Neuron:
        type = "neuron"

    shapes = target_shapes(SHAPES)
    assert runtime.warm_shapes(shapes, Neuron()) == shapes
    assert len(runtime.warm_shapes(shapes, torch.device("cpu"))) < len(shapes)
