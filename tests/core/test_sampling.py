"""Sampling parameters and the random numbers of a request."""

from __future__ import annotations

import pickle

import numpy as np
import pytest

from dflash_core.request import GenerationRequest
from dflash_core.sampling import (
    GREEDY,
    InvalidSampling,
    SamplingParams,
    choice_seed,
    sampling_defaults,
    uniforms,
)


@pytest.mark.parametrize(
    ("field", "value"),
    [
        ("temperature", -0.1),
        ("temperature", float("nan")),
        ("temperature", float("inf")),
        ("top_p", 0),
        ("top_p", 1.01),
        ("top_k", -2),
        ("min_p", -0.1),
        ("min_p", 1.1),
        ("repetition_penalty", 0),
        ("presence_penalty", 2.1),
        ("frequency_penalty", -2.1),
        ("frequency_penalty", float("nan")),
        ("logit_bias", {3: 101}),
        ("logit_bias", {3: float("nan")}),
        ("logit_bias", {-1: 1}),
        ("logit_bias", dict.fromkeys(range(1025), 1)),
        ("min_tokens", -1),
        ("seed", 1 << 63),
        ("logprobs", 21),
        ("logprobs", -1),
    ],
)
def test_a_value_out_of_range_is_named(field: str, value: object) -> None:
    with pytest.raises(InvalidSampling, match=f"^{field} ") as caught:
        SamplingParams(**{field: value})
    again = pickle.loads(pickle.dumps(caught.value))
    assert (again.field, str(again)) == (field, str(caught.value))


def test_the_limits_of_the_ranges_are_allowed() -> None:
    SamplingParams(
        temperature=0, top_p=1, top_k=-1, min_p=1, presence_penalty=-2, frequency_penalty=2,
        logit_bias={0: -100, 5: 100}, seed=-(1 << 63), logprobs=20,
    )  # fmt: skip


def test_more_min_tokens_than_max_tokens_are_refused() -> None:
    with pytest.raises(InvalidSampling, match="min_tokens is 6: it must be at most max_tokens = 5"):
        GenerationRequest("r", [1], 5, sampling=SamplingParams(min_tokens=6))


@pytest.mark.parametrize(
    ("params", "beyond"),
    [
        (GREEDY, ()),
        (SamplingParams(temperature=9e-6, top_p=0.5, top_k=3, min_p=0.1, seed=7), ()),
        (SamplingParams(temperature=1e-5), ("temperature",)),
        (SamplingParams(frequency_penalty=1, min_tokens=1), ("frequency_penalty", "min_tokens")),
        (SamplingParams(logit_bias={1: 1}), ("logit_bias",)),
        (SamplingParams(logprobs=0), ("logprobs",)),
    ],
)
def test_what_argmax_cannot_do(params: SamplingParams, beyond: tuple[str, ...]) -> None:
    assert params.beyond_argmax == beyond


def test_a_uniform_number_depends_on_seed_and_index_alone() -> None:
    [whole] = uniforms([5], [0], 100)
    other, part = uniforms([6, 5], [0, 90], 10)
    assert np.array_equal(part, whole[90:])
    assert not np.intersect1d(other, whole).size
    assert whole.dtype == np.float32


@pytest.mark.parametrize("by_seed", [False, True])
def test_uniform_numbers_are_uniform_along_an_output_and_across_seeds(by_seed: bool) -> None:
    if by_seed:
        numbers = uniforms(range(-8000, 8000), [3] * 16000, 2)
    else:
        numbers = uniforms([-1], [0], 32000).reshape(-1, 2)
    assert numbers.min() >= 0 and numbers.max() < 1
    # Pairs of neighbours, in 8 x 8 cells of 250: chi-square with 63 degrees of freedom, p > 0.001.
    counts, _, _ = np.histogram2d(numbers[:, 0], numbers[:, 1], bins=8, range=[(0, 1), (0, 1)])
    assert ((counts - 250) ** 2 / 250).sum() < 103.4


def test_the_first_choice_has_the_seed_and_all_differ() -> None:
    seeds = [choice_seed(seed, choice) for seed in (0, 1, -1) for choice in range(128)]
    assert seeds[0] == 0 and seeds[128] == 1 and seeds[256] == -1
    assert len(set(seeds)) == len(seeds)
    for seed in seeds:
        SamplingParams(seed=seed)


def test_defaults_of_a_checkpoint() -> None:
    config = {"temperature": 0.6, "top_p": 0.9, "top_k": None, "do_sample": True, "eos_token_id": 2}
    assert sampling_defaults(config) == {"temperature": 0.6, "top_p": 0.9}
    with pytest.raises(InvalidSampling, match="top_p is 9"):
        sampling_defaults({"top_p": 9})
