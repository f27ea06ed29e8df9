"""Every graph of the published 8B pair keeps to the rules, and a core holds what it must.

All shapes of configs/trn2-llama-3.1-8b.yaml are captured with few layers (layers are alike), and
the most important graph at full depth. `python -m deployments.check_graphs` does all in full.
"""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
import yaml
from torch import nn
from typer.testing import CliRunner

from deployments.app_args import AppArgs
from deployments.check_graphs import app as command
from dflash_core.config import drafter_config, target_config
from dflash_core.graphs.capture import capture, simulated_group
from dflash_core.graphs.catalogue import Graph, drafter_graphs, target_graphs
from dflash_core.graphs.footprint import GIB, activation_bytes, core_bytes, footprint
from dflash_core.graphs.lint import CheckedGraph, lint
from dflash_core.graphs.operators import COLLECTIVES, operator_name
from dflash_core.graphs.rules import check
from dflash_core.parallel import SINGLE, TensorParallel
from tests import published
from tests.tiny import write_drafter, write_target

CONFIG = Path(__file__).parents[2] / "configs" / "trn2-llama-3.1-8b.yaml"
ARGS = AppArgs.model_validate(
    yaml.safe_load(CONFIG.read_text(encoding="utf-8"))["applications"][0]["args"]
)
SHAPES = ARGS.shapes(ARGS.max_num_seqs)
TARGET, DRAFTER = target_config(published.TARGET), drafter_config(published.DRAFTER)
BF16 = torch.bfloat16


@pytest.mark.timeout(900)
def test_all_nineteen_graphs_are_fit_for_trainium() -> None:
    target = replace(TARGET, num_layers=2)
    drafter = replace(DRAFTER, num_layers=1, windows=(None,), causal=(False,))
    seen: list[CheckedGraph] = []
    for make, ranks in (
        (lambda tp: target_graphs(target, SHAPES, (0, 1), dtype=BF16, tp=tp), 8),
        (lambda tp: drafter_graphs(drafter, target, SHAPES, dtype=BF16, tp=tp), 1),
    ):
        checked = lint(make, ranks, on_graph=seen.append)
        assert checked.violations == []
        assert all(graph.operators > 20 for graph in checked.graphs)
    names = [graph.name for graph in seen]
    assert len(set(names)) == len(names) == 19
    assert {"verify B=1 L=10 C=2048", "prefill B=1 L=256 C=512"} <= set(names)
    assert {"inject R=256", "draft B=1 R=10 C=512"} <= set(names)


def test_a_drafter_on_eight_ranks_is_fit_as_well() -> None:
    drafter = replace(DRAFTER, num_layers=1, windows=(None,), causal=(False,))
    shapes = replace(SHAPES, context_buckets=(2048,))
    checked = lint(lambda tp: drafter_graphs(drafter, TARGET, shapes, dtype=BF16, tp=tp), 8)
    assert checked.violations == []


@pytest.mark.timeout(900)
def test_the_verify_graph_at_full_depth() -> None:
    with simulated_group(0, 8) as tp:
        graphs = target_graphs(TARGET, SHAPES, DRAFTER.target_layer_ids, dtype=BF16, tp=tp)
        [graph] = [each for each in graphs if each.name == "verify B=1 L=10 C=512"]
        captured = capture(graph.name, graph.step, *graph.args)
    assert check(captured) == []
    names = [operator_name(node) for node in captured.calls]
    assert names.count("aten.copy_") == 2 * 32  # keys and values of every layer, in place
    # One sum after attention and one after the MLP of every layer, one for the embedding; the
    # argmax exchanges values and indices.
    assert names.count("_c10d_functional.all_reduce") == 2 * 32 + 1
    assert names.count("_c10d_functional.all_gather_into_tensor") == 2
    assert {name for name in names if "c10d" in name} <= COLLECTIVES
    assert 0 < activation_bytes(captured) < GIB


def steps(graphs: list[Graph]) -> list[nn.Module]:
    return list({id(graph.step): graph.step for graph in graphs}.values())


def test_what_a_core_holds() -> None:
    with simulated_group(0, 8) as tp:
        held = footprint(
            steps(target_graphs(TARGET, SHAPES, DRAFTER.target_layer_ids, dtype=BF16, tp=tp)), 0
        )
    norms = 2 * 4096 * (2 * 32 + 1)  # bytes: whole on every rank
    assert held.parameters == (published.TARGET_BYTES - norms) // 8 + norms
    # Two slots (one is scratch) of 2048 positions, one of eight heads, keys and values.
    assert held.caches == 32 * 2 * (2 * 2048 * 128) * 2
    held = footprint(steps(drafter_graphs(DRAFTER, TARGET, SHAPES, dtype=BF16, tp=SINGLE)), 0)
    vocabulary = 2 * 128256 * 4096
    assert held.parameters == 2 * (published.DRAFTER_PARAMETERS + vocabulary)
    assert held.caches == 5 * 2 * (2 * (2048 + 10) * 8 * 128) * 2
    assert core_bytes(2) == 24 * GIB
    assert core_bytes(1) == 12 * GIB


def test_intermediate_results_are_counted_while_they_are_needed() -> None:
    """Two tensors of 4 KiB live at the same time at most; views and finished ones cost nothing."""

    def step(x: torch.Tensor) -> torch.Tensor:
        first = (x + 1).view(16, 64)
        second = first * 2
        third = second.view(1024) * 3
        return third.sum()

    graph = capture("step", step, torch.empty(1024, device="meta"))
    assert activation_bytes(graph) == 2 * 4096


class BrokenStep(nn.Module):
    """The real step, but the cache of the last layer is not written."""

    def __init__(self, graph: Graph) -> None:
        super().__init__()
        self.inner = graph.step

    def forward(self, *args: Any) -> Any:
        last = self.inner.cache.layers[-1]
        keys, values = last.keys, last.values
        last.keys, last.values = keys.clone(), values.clone()
        result = self.inner(*args)
        last.keys, last.values = keys, values
        return result


def test_a_cache_that_a_step_forgets_to_write_is_noticed() -> None:
    target = replace(TARGET, num_layers=2)

    def make(tp: TensorParallel) -> list[Graph]:
        graph = target_graphs(target, SHAPES, (0, 1), dtype=BF16, tp=tp)[0]
        return [replace(graph, step=BrokenStep(graph))]

    found = [str(violation) for violation in lint(make, 1).violations]
    assert any("2 of 4 key and value caches are written in place" in each for each in found)


class TestCommand:
    @pytest.fixture
    def pair(self, tmp_path: Path) -> list[str]:
        """Configurations alone, as of a small pair: no weights are needed."""
        target = write_target(
            tmp_path / "target", num_hidden_layers=3, max_position_embeddings=2048
        )
        drafter = write_drafter(
            tmp_path / "drafter", target, layers=1, block_size=10, target_layer_ids=(1,)
        )
        for folder in (target, drafter):
            (folder / "model.safetensors").unlink()
        return ["--target", str(target), "--drafter", str(drafter)]

    def run(
        self, tmp_path: Path, pair: list[str], *, baseline: bool = False, **changes: Any
    ) -> tuple[int, str]:
        """On the configuration with one context length and one length of prompt."""
        config = yaml.safe_load(CONFIG.read_text(encoding="utf-8"))
        args = config["applications"][0]["args"]
        args |= {"context_buckets": [2048], "prefill_chunk_size": 32}
        args["speculation"] |= changes
        if baseline:
            args["speculation"] = None
        changed = tmp_path / "config.yaml"
        changed.write_text(json.dumps(config))
        result = CliRunner().invoke(command, [str(changed), *pair])
        return result.exit_code, result.output

    def test_it_lists_the_graphs_and_the_memory(self, pair: list[str], tmp_path: Path) -> None:
        status, output = self.run(tmp_path, pair)
        assert status == 0, output
        assert output.count("OK ") == 6
        assert "6 graphs, 0 violations" in output
        assert output.count("of 24 GiB") == 2
        assert "int32[1, 10]" in output and "bfloat16[32, 64]" in output

    def test_the_baseline_is_the_target_alone(self, pair: list[str], tmp_path: Path) -> None:
        status, output = self.run(tmp_path, pair, baseline=True)
        assert status == 0, output
        assert "verify B=1 L=1 C=2048" in output and "L=10" not in output
        assert "2 graphs, 0 violations" in output

    def test_a_pair_that_does_not_fit_the_configuration(
        self, pair: list[str], tmp_path: Path
    ) -> None:
        status, output = self.run(tmp_path, pair, num_speculative_tokens=10)
        assert status == 1
        assert "num_speculative_tokens is 10" in output
