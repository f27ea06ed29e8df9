"""Compiled as on Trainium, but by torch's own `aot_eager`: same tokens, and no compilation later.

Dynamo and AOTAutograd run as they would there (whole graphs, static shapes, caches updated in
place); what stands in for neuronx-cc runs the captured operators one by one on the CPU.
"""

from __future__ import annotations

import logging
import sys
import threading
from collections.abc import Callable, Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from dflash_core import runtime
from dflash_core.drafter_runner import DrafterRunner
from dflash_core.engine import generate
from dflash_core.request import GenerationRequest
from dflash_core.shapes import StaticShapes
from dflash_core.stopping import Stopping
from dflash_core.target_runner import TargetRunner
from tests.core.test_tensor_parallel import json_tokenizer
from tests.tiny import write_drafter, write_target

TAPS = (0, 1)
SHAPES = StaticShapes(
    num_slots=2,
    max_model_len=64,
    num_drafts=3,
    prefill_chunk=32,
    num_seqs_buckets=(1, 2),
    context_buckets=(32, 64),
)
PROMPTS = [[3, 4, 5, 6, 7], list(range(20, 60))]
NEURON = SimpleNamespace(type="neuron")  # torch has no device of that name without torch-neuronx


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("pair")
    target = write_target(folder / "target", num_hidden_layers=2)
    write_drafter(folder / "drafter", target, layers=1, block_size=4, target_layer_ids=TAPS)
    return folder


@pytest.fixture(scope="module")
def expected(folder: Path) -> list[list[int]]:
    """What the target alone says, not compiled."""
    return tokens(load(folder)[0], None)


@pytest.fixture
def neuron_runtime(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """What runners ask the runtime for, answered as on neuron with another compiler behind it."""

    def compile_step(step: Any, device: Any) -> Any:
        return torch.compile(step, backend="aot_eager", fullgraph=True, dynamic=False)

    for runner in ("target_runner", "drafter_runner"):
        monkeypatch.setattr(f"dflash_core.{runner}.compile_step", compile_step)
        monkeypatch.setattr(f"dflash_core.{runner}.warm_shapes", lambda shapes, device: shapes)
    fallbacks = SimpleNamespace(get_fallback_ops=lambda: ["aten::nothing"])
    monkeypatch.setitem(sys.modules, "torch_neuronx", fallbacks)
    torch._dynamo.reset()
    # Not monkeypatch: undoing that would delete torch's options.
    limits = dict.fromkeys(("recompile_limit", "accumulated_recompile_limit"), runtime.MAX_GRAPHS)
    with torch._dynamo.config.patch(limits):
        yield
    torch.compiler.set_stance("default")
    torch._dynamo.reset()


def load(folder: Path) -> tuple[TargetRunner, DrafterRunner]:
    target = TargetRunner.load(folder / "target", SHAPES, tapped_layers=TAPS, dtype=torch.float32)
    drafter = DrafterRunner.load(folder / "drafter", folder / "target", SHAPES, dtype=torch.float32)
    return target, drafter


def tokens(target: TargetRunner, drafter: DrafterRunner | None) -> list[list[int]]:
    def make(prompt: list[int]) -> Stopping:
        request = GenerationRequest("test", prompt, 20)
        return Stopping(json_tokenizer(), request, eos_token_ids=(), max_model_len=64)

    alone = [generate(target, drafter, [prompt], make)[0] for prompt in PROMPTS]
    together = generate(target, drafter, PROMPTS, make)
    return [output.token_ids for output in (*alone, *together)]


def in_a_thread(call: Callable[[], Any]) -> Any:
    """As a compiled graph of Ray runs the model: not in the thread that warmed it up."""
    answers: list[Any] = []

    def run() -> None:
        try:
            answers.append(call())
        except Exception as error:
            answers.append(error)

    thread = threading.Thread(target=run)
    thread.start()
    thread.join()
    return answers[0]


@pytest.mark.timeout(600)
def test_compiled_steps_give_the_same_tokens_and_nothing_is_compiled_after_the_warm_up(
    folder: Path, expected: list[list[int]], neuron_runtime: None, caplog: pytest.LogCaptureFixture
) -> None:
    target, drafter = load(folder)
    target.warm_up()
    drafter.warm_up()
    with caplog.at_level(logging.WARNING):
        runtime.seal(NEURON)
    assert "operators that run on the host, not on the NeuronCore: ['aten::nothing']" in caplog.text
    compiled = in_a_thread(lambda: tokens(target, drafter))
    assert compiled == expected

    unseen = torch.zeros((1, 7), dtype=torch.int32)
    one = torch.zeros(1, dtype=torch.int32)
    error = in_a_thread(lambda: target.step(unseen, one, one, one + 1, 32))
    assert isinstance(error, RuntimeError) and "recompil" in str(error)
