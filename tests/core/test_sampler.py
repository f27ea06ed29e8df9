"""The sampler's parts on logits made by hand."""

from __future__ import annotations

import numpy as np
import pytest
import torch

from dflash_core.messages import SamplingPlan
from dflash_core.sampler import CANDIDATES, choose, draw, sampler_inputs
from dflash_core.sampling import SamplingParams
from tests.plain_sampling import distribution

CPU = torch.device("cpu")


def plan(params: list[SamplingParams], uniforms: np.ndarray) -> SamplingPlan:
    """Without history, biases and bans."""
    none = np.zeros(0, dtype=np.int32)

    def column(name: str, dtype: type = np.float32) -> np.ndarray:
        return np.array([getattr(each, name) for each in params], dtype=dtype)

    return SamplingPlan(
        temperature=column("temperature"),
        top_p=column("top_p"),
        top_k=column("top_k", np.int32),
        min_p=column("min_p"),
        repetition=column("repetition_penalty"),
        presence=column("presence_penalty"),
        frequency=column("frequency_penalty"),
        uniforms=uniforms.astype(np.float32),
        history_rows=none,
        history_tokens=none,
        history_output=none.astype(np.bool_),
        bias_rows=none,
        bias_tokens=none,
        bias_values=none.astype(np.float32),
        banned_rows=none,
        banned_tokens=none,
        banned_lengths=np.zeros(len(params), dtype=np.int32),
        num_logprobs=np.full(len(params), -1, dtype=np.int32),
    )


@pytest.mark.parametrize("spread", [0.01, 1.0, 4.0], ids=["flat", "wide", "peaked"])
@pytest.mark.parametrize("vocabulary", [30, CANDIDATES[0] + 100, CANDIDATES[1] + 1000])
def test_the_inverse_of_the_processed_distribution_is_drawn(vocabulary: int, spread: float) -> None:
    """Also where top-p needs more candidates than are looked at first."""
    settings = [
        SamplingParams(temperature=1.0),
        SamplingParams(temperature=0.5, top_p=0.9),
        SamplingParams(temperature=1.0, top_k=7),
        SamplingParams(temperature=2.0, top_k=300, top_p=0.8),
        SamplingParams(temperature=1.0, top_k=10**9, top_p=0.999),
        SamplingParams(temperature=1.0, min_p=0.3, top_p=0.5),
        SamplingParams(temperature=1.0, top_p=1e-6),
        SamplingParams(),
    ]
    random = np.random.default_rng(vocabulary)
    L = 5
    logits = (random.standard_normal((len(settings), L, vocabulary)) * spread).astype(np.float32)
    uniforms = random.random((len(settings), L))
    inputs = sampler_inputs(plan(settings, uniforms), len(settings), vocabulary, CPU)
    before = torch.from_numpy(logits.copy())
    chosen = choose(before, torch.zeros((len(settings), L - 1), dtype=torch.int32), inputs)
    assert np.array_equal(before.numpy(), logits), "the raw logits are needed for logprobs"
    for b, params in enumerate(settings):
        for i in range(L):
            p = distribution(logits[b, i], params, [], [])
            token = chosen[b, i].item()
            assert p[token] > 0
            # The token's stretch of the cumulated probability holds the uniform number.
            begin = p[:token].sum()
            assert begin - 2e-5 <= uniforms[b, i] <= begin + p[token] + 2e-5


def test_equal_logits_stay_or_go_together() -> None:
    logits = torch.tensor([1.0, 3.0, 2.0, 3.0, 2.0]).repeat(400, 1, 1)
    uniforms = np.arange(400)[:, None] / 400
    for params, expected in [
        (SamplingParams(temperature=1.0, top_k=1), {1, 3}),
        (SamplingParams(temperature=1.0, top_k=3), {1, 2, 3, 4}),
        (SamplingParams(temperature=1.0, top_p=0.1), {1, 3}),
        (SamplingParams(temperature=1.0, min_p=1.0), {1, 3}),
    ]:
        inputs = sampler_inputs(plan([params] * 400, uniforms), 400, 5, CPU)
        chosen = choose(logits, torch.zeros((400, 0), dtype=torch.int32), inputs)
        assert set(chosen.flatten().tolist()) == expected


@pytest.mark.parametrize("uniform", [0.0, 2.0**-24, 0.5, 1 - 2.0**-24])
@pytest.mark.parametrize("vocabulary", [3, 50_000])
def test_a_token_of_probability_zero_is_never_drawn(vocabulary: int, uniform: float) -> None:
    """Neither ahead of the first possible token, nor after the last, nor between."""
    random = torch.Generator().manual_seed(0)
    logits = torch.randn((20, 4, vocabulary), generator=random)
    possible = torch.rand((20, 4, vocabulary), generator=random) < 0.1
    possible[..., vocabulary // 2] = True
    possible[..., 0] = possible[..., -1] = False
    drawn = draw(logits.masked_fill(~possible, -torch.inf), torch.full((20, 4), uniform))
    assert possible.gather(-1, drawn[..., None]).all()


def test_the_extremes_of_the_uniform_numbers_draw_the_first_and_the_last_possible_token() -> None:
    logits = torch.zeros((1, 2, 3000))
    logits[..., :100] = logits[..., -100:] = -torch.inf
    drawn = draw(logits, torch.tensor([[0.0, 1 - 2.0**-24]]))
    assert drawn.tolist() == [[100, 2899]]


def test_the_padding_of_a_batch_changes_nothing() -> None:
    random = np.random.default_rng(2)
    settings = [SamplingParams(temperature=1.0, top_p=0.8), SamplingParams(temperature=0.7)]
    logits = torch.from_numpy(random.standard_normal((8, 3, 20)).astype(np.float32))
    drafts = torch.zeros((8, 2), dtype=torch.int32)
    uniforms = random.random((2, 3))
    small = choose(logits[:2], drafts[:2], sampler_inputs(plan(settings, uniforms), 2, 20, CPU))
    large = choose(logits, drafts, sampler_inputs(plan(settings, uniforms), 8, 20, CPU))
    assert torch.equal(large[:2], small)
    assert torch.equal(large[2:], logits[2:].argmax(-1).to(torch.int32))
