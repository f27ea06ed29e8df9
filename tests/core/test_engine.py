"""The in-process engine: speculation changes the number of steps, never a token."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

from dflash_core.drafter_runner import DrafterRunner
from dflash_core.engine import Generation, generate
from dflash_core.request import GenerationRequest
from dflash_core.shapes import StaticShapes
from dflash_core.stopping import Stopping
from dflash_core.target_runner import TargetRunner
from tests.core.test_drafter import TAPS
from tests.core.test_target import transformers_model
from tests.drafters import ReplayDrafter, record_drafts
from tests.tiny import write_drafter

K = 5
SHAPES = StaticShapes.create(num_slots=3, max_model_len=64, num_drafts=K, prefill_chunk=8)
MAX_TOKENS = 18
LENGTHS = (1, 3, 7, 8, 9, 16, 21)


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("pair")
    transformers_model(folder / "target")
    write_drafter(folder / "drafter", folder / "target", target_layer_ids=TAPS)
    return folder


@pytest.fixture(scope="module")
def prompts() -> list[list[int]]:
    generator = torch.Generator().manual_seed(5)
    return [torch.randint(3, 131, (n,), generator=generator).tolist() for n in LENGTHS]


@pytest.fixture(scope="module")
def target(folder: Path) -> TargetRunner:
    return TargetRunner.load(folder / "target", SHAPES, tapped_layers=TAPS, dtype=torch.float32)


@pytest.fixture(scope="module")
def baseline(target: TargetRunner, prompts: list[list[int]], tokenizer: object) -> list[Generation]:
    return generate(target, None, prompts, stopping(tokenizer))


def stopping(tokenizer: object, max_tokens: int = MAX_TOKENS, **limits: object):
    def make(prompt: list[int]) -> Stopping:
        request = GenerationRequest("test", prompt, max_tokens, **limits)
        return Stopping(tokenizer, request, eos_token_ids=(), max_model_len=SHAPES.max_model_len)

    return make


def ids(generations: list[Generation]) -> list[list[int]]:
    return [generation.token_ids for generation in generations]


def replay(prompts: list[list[int]], baseline: list[Generation]) -> ReplayDrafter:
    sequences = [p + g.token_ids for p, g in zip(prompts, baseline, strict=True)]
    return ReplayDrafter(sequences, list(map(len, prompts)), SHAPES)


def test_the_baseline_equals_transformers(
    folder: Path, prompts: list[list[int]], baseline: list[Generation]
) -> None:
    model = transformers_model(folder / "target")
    for prompt, generation in zip(prompts, baseline, strict=True):
        expected = model.generate(
            torch.tensor([prompt]),
            max_new_tokens=MAX_TOKENS,
            do_sample=False,
            eos_token_id=None,
            pad_token_id=0,
        )
        assert generation.token_ids == expected[0, len(prompt) :].tolist()


def test_a_random_drafter_changes_nothing(
    folder: Path,
    target: TargetRunner,
    prompts: list[list[int]],
    baseline: list[Generation],
    tokenizer: object,
) -> None:
    drafter = DrafterRunner.load(folder / "drafter", folder / "target", SHAPES, dtype=torch.float32)
    speculative = generate(target, drafter, prompts, stopping(tokenizer))
    assert ids(speculative) == ids(baseline)
    assert sum(g.statistics.num_draft_tokens for g in speculative) > 50


def test_a_perfect_drafter_needs_a_fraction_of_the_steps(
    target: TargetRunner, prompts: list[list[int]], baseline: list[Generation], tokenizer: object
) -> None:
    drafter = replay(prompts, baseline)
    speculative = generate(target, drafter, prompts, stopping(tokenizer))
    assert ids(speculative) == ids(baseline)
    for generation in speculative:
        statistics = generation.statistics
        assert statistics.num_accepted_tokens == statistics.num_draft_tokens
        # The first token comes from the prompt, the other 17 in blocks of K + 1 = 6.
        assert statistics.num_steps == 3
        assert statistics.accepted_per_position == [3, 3, 3, 3, 2]


@pytest.mark.parametrize("max_tokens", [1, 2, 6, 7, 8])
def test_max_tokens_inside_a_block_ends_the_output_there(
    max_tokens: int,
    target: TargetRunner,
    prompts: list[list[int]],
    baseline: list[Generation],
    tokenizer: object,
) -> None:
    drafter = replay(prompts, baseline)
    speculative = generate(target, drafter, prompts, stopping(tokenizer, max_tokens))
    assert ids(speculative) == [g.token_ids[:max_tokens] for g in baseline]
    assert {g.finish_reason for g in speculative} == {"length"}


def test_a_stop_token_inside_a_block_ends_output_and_counts_there(
    target: TargetRunner, prompts: list[list[int]], baseline: list[Generation], tokenizer: object
) -> None:
    prompt, expected = prompts[4], baseline[4].token_ids
    stop = expected[9]
    end = expected.index(stop) + 1
    drafter = replay([prompt], [baseline[4]])
    [generation] = generate(target, drafter, [prompt], stopping(tokenizer, stop_token_ids=(stop,)))
    assert generation.token_ids == expected[:end]
    assert generation.finish_reason == "stop"
    assert generation.statistics.num_tokens == end - 1
    assert generation.statistics.num_accepted_tokens <= end - 1


def test_the_context_limit_is_reached_exactly(
    folder: Path, target: TargetRunner, tokenizer: object
) -> None:
    """Near the limit K shrinks, so that nothing is written beyond it; the last position is used."""
    prompt = list(range(10, 64))
    baseline = generate(target, None, [prompt], stopping(tokenizer, 1000))
    drafter = replay([prompt], baseline)
    speculative = generate(target, drafter, [prompt], stopping(tokenizer, 1000))
    assert ids(speculative) == ids(baseline)
    assert len(prompt) + len(speculative[0].token_ids) == SHAPES.max_model_len
    assert speculative[0].finish_reason == "length"


def test_a_chunked_prefill_gives_the_drafts_of_a_whole_one(
    folder: Path, prompts: list[list[int]], tokenizer: object
) -> None:
    prompt = prompts[-1]

    def drafts(prefill_chunk: int) -> list[list[int]]:
        shapes = StaticShapes.create(
            num_slots=1, max_model_len=64, num_drafts=K, prefill_chunk=prefill_chunk
        )
        target = TargetRunner.load(
            folder / "target", shapes, tapped_layers=TAPS, dtype=torch.float32
        )
        drafter = DrafterRunner.load(
            folder / "drafter", folder / "target", shapes, dtype=torch.float32
        )
        seen = record_drafts(drafter)
        generate(target, drafter, [prompt], stopping(tokenizer))
        return seen

    whole = drafts(32)
    assert len(set(map(tuple, whole))) > 3
    assert drafts(4) == whole
    assert drafts(1) == whole
