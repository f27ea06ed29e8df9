"""`compile: inductor`: the same tokens, and nothing is compiled after the warm-up."""

from __future__ import annotations

import shutil
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch

from dflash_core import runtime
from dflash_core.drafter_runner import DrafterRunner
from dflash_core.shapes import StaticShapes
from dflash_core.target_runner import TargetRunner
from tests.graphs.test_compiled_steps import TAPS, in_a_thread, tokens
from tests.tiny import write_drafter, write_target

CPU = torch.device("cpu")
SHAPES = StaticShapes(
    num_slots=1,
    max_model_len=64,
    num_drafts=3,
    prefill_chunk=32,
    num_seqs_buckets=(1,),
    context_buckets=(64,),
)


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("pair")
    target = write_target(folder / "target", num_hidden_layers=2)
    write_drafter(folder / "drafter", target, layers=1, block_size=4, target_layer_ids=TAPS)
    return folder


@pytest.fixture
def inductor() -> Iterator[None]:
    torch._dynamo.reset()
    limits = dict.fromkeys(("recompile_limit", "accumulated_recompile_limit"), runtime.MAX_GRAPHS)
    with torch._dynamo.config.patch(limits):  # as set_compiler does for good
        runtime.set_compiler("inductor")
        yield
    runtime.set_compiler("eager")
    torch.compiler.set_stance("default")
    torch._dynamo.reset()


def load(folder: Path, dtype: torch.dtype) -> tuple[TargetRunner, DrafterRunner]:
    target = TargetRunner.load(folder / "target", SHAPES, tapped_layers=TAPS, dtype=dtype)
    drafter = DrafterRunner.load(folder / "drafter", folder / "target", SHAPES, dtype=dtype)
    return target, drafter


def test_an_unknown_compiler_is_refused() -> None:
    with pytest.raises(ValueError, match="compile = 'gcc' is not one of"):
        runtime.set_compiler("gcc")


@pytest.mark.timeout(900)
@pytest.mark.skipif(shutil.which("g++") is None, reason="inductor needs a C++ compiler")
def test_inductor_gives_the_same_tokens_and_compiles_nothing_after_the_warm_up(
    folder: Path, request: pytest.FixtureRequest
) -> None:
    expected = tokens(load(folder, torch.float32)[0], None)
    request.getfixturevalue("inductor")
    target, drafter = load(folder, torch.float32)
    target.warm_up()
    drafter.warm_up()
    runtime.seal(CPU)
    graphs = torch._dynamo.utils.counters["stats"]["unique_graphs"]
    assert graphs >= 5, "verify at two lengths, prefill, inject, draft"
    assert in_a_thread(lambda: tokens(target, drafter)) == expected
    assert torch._dynamo.utils.counters["stats"]["unique_graphs"] == graphs
    assert not torch._dynamo.utils.counters["graph_break"]

    unseen, one = torch.zeros((1, 7), dtype=torch.int32), torch.zeros(1, dtype=torch.int32)
    error = in_a_thread(lambda: target.step(unseen, one, one, one + 1, 64))
    assert isinstance(error, RuntimeError) and "recompil" in str(error)


def test_bfloat16_steps_can_be_captured(
    folder: Path, inductor: None, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Where steps are compiled the CPU's own kernels stay out of them."""
    monkeypatch.setattr(runtime, "_compiler", "aot_eager")
    target, drafter = load(folder, torch.bfloat16)
    assert target.model.packed_layers is None
    target.warm_up()
    drafter.warm_up()
    assert in_a_thread(lambda: tokens(target, drafter))
    assert not torch._dynamo.utils.counters["graph_break"]
