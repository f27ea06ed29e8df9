"""The models on (a stand-in for) neuronx-distributed give the tokens of a single native rank."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

from dflash_core.drafter_runner import DrafterRunner
from dflash_core.engine import generate
from dflash_core.kv_cache import KVCache
from dflash_core.nxd import target_runner
from dflash_core.nxd.drafter_runner import NxdDrafterRunner
from dflash_core.nxd.parallel import NxdParallel
from dflash_core.nxd.target_runner import NxdTargetRunner
from dflash_core.request import GenerationRequest
from dflash_core.stopping import Stopping
from dflash_core.target_runner import TargetRunner
from tests.core.test_drafter import TAPS
from tests.core.test_target import LLAMA3, transformers_model
from tests.core.test_tensor_parallel import PROMPTS, SHAPES, json_tokenizer
from tests.drafters import record_drafts
from tests.tiny import write_drafter

pytestmark = pytest.mark.usefixtures("nxd")

Outcome = tuple[list[list[int]], list[list[int]]]


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("pair")
    transformers_model(
        folder / "target",
        vocab_size=136,
        num_attention_heads=8,
        num_key_value_heads=4,
        rope_parameters=LLAMA3,
    )
    write_drafter(
        folder / "drafter",
        folder / "target",
        target_layer_ids=TAPS,
        num_attention_heads=4,
        num_key_value_heads=2,
    )
    return folder


def outcome(target: TargetRunner, drafter: DrafterRunner | None) -> Outcome:
    """Tokens and drafts."""
    drafts = [] if drafter is None else record_drafts(drafter)

    def make(prompt: list[int]) -> Stopping:
        request = GenerationRequest("test", prompt, 12)
        return Stopping(json_tokenizer(), request, eos_token_ids=(), max_model_len=64)

    outputs = generate(target, drafter, PROMPTS, make)
    return [output.token_ids for output in outputs], drafts


@pytest.fixture(scope="module")
def native(folder: Path) -> Outcome:
    target = TargetRunner.load(folder / "target", SHAPES, tapped_layers=TAPS, dtype=torch.float32)
    drafter = DrafterRunner.load(folder / "drafter", folder / "target", SHAPES, dtype=torch.float32)
    return outcome(target, drafter)


def target_on(folder: Path, ranks: int, taps: tuple[int, ...] = TAPS) -> NxdTargetRunner:
    target = NxdTargetRunner.load(
        folder / "target",
        SHAPES,
        tapped_layers=taps,
        dtype=torch.float32,
        tp=NxdParallel(size=ranks),
    )
    target.warm_up()
    return target


def drafter_on(folder: Path, ranks: int) -> NxdDrafterRunner:
    drafter = NxdDrafterRunner.load(
        folder / "drafter",
        folder / "target",
        SHAPES,
        dtype=torch.float32,
        tp=NxdParallel(size=ranks),
    )
    drafter.warm_up()
    return drafter


@pytest.mark.parametrize(
    ("target_ranks", "drafter_ranks"),
    [(1, 1), (2, 1), (8, 2)],
    ids=["single", "tp2", "tp8-replicates-key-value-heads"],
)
def test_the_pair_gives_tokens_and_drafts_of_a_native_rank(
    folder: Path, native: Outcome, target_ranks: int, drafter_ranks: int
) -> None:
    assert outcome(target_on(folder, target_ranks), drafter_on(folder, drafter_ranks)) == native
    assert len(set(map(tuple, native[1]))) > 5


def test_the_baseline_gives_the_same_tokens(folder: Path, native: Outcome) -> None:
    """A target without tapped layers: its graphs have no features among their results."""
    assert outcome(target_on(folder, 2, taps=()), None)[0] == native[0]


def test_a_cache_that_is_no_state_of_the_graph_is_found_out(
    folder: Path, native: Outcome, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Written in place and not persistent, as the native steps have it: nothing would be kept."""
    monkeypatch.setattr(target_runner, "StateCache", KVCache)
    assert outcome(target_on(folder, 1), None)[0] != native[0]


def test_a_rank_s_number_that_is_no_weight_is_found_out(
    folder: Path, native: Outcome, monkeypatch: pytest.MonkeyPatch
) -> None:
    """One graph is that of all ranks: a number in it is rank 0's."""
    from dflash_core.nxd.layers import layers

    monkeypatch.setattr(layers.SPMDRank, "get_rank", lambda self: 0)
    assert outcome(target_on(folder, 2), None)[0] != native[0]
