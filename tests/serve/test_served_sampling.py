"""Sampling by the running application, with a drafter whose drafts are nearly all wrong.

The oracle is the in-process engine without a drafter.
"""

from __future__ import annotations

import asyncio
import pickle
from collections.abc import Iterator
from typing import Any

import httpx
import numpy as np
import pytest

from deployments.app import LOGPROBS_BYTES, MESSAGE_OVERHEAD_BYTES, plan_bytes
from dflash_core import plans
from dflash_core.engine import generate
from dflash_core.request import GenerationRequest, TokenLogprobs
from dflash_core.sampling import MAX_LOGIT_BIAS, SamplingParams, choice_seed
from dflash_core.sequence import Sequence
from dflash_core.shapes import StaticShapes
from dflash_core.stopping import Stopping
from tests.serve.application import Application, application
from tests.serve.tiny_pair import MAX_MODEL_LEN, Tiny, prompt_of

MAX_TOKENS = 24
SETTINGS: list[dict[str, Any]] = [
    {"temperature": 1.0, "seed": 1},
    {"temperature": 0.7, "top_p": 0.9, "seed": 2},
    {"temperature": 1.2, "top_k": 20, "min_p": 0.01, "seed": -3},
    {"temperature": 0},
    {"temperature": 0, "repetition_penalty": 1.3, "frequency_penalty": 0.3},
    {"temperature": 1.0, "presence_penalty": 1.5, "seed": 5},
    {"temperature": 0, "logit_bias": {"300": 5.0, "301": 5.0}, "presence_penalty": 2},
    {"temperature": 0, "logit_bias": {"2": 100}, "min_tokens": 7},
]


@pytest.fixture(scope="module")
def app(http_port: int, tiny: Tiny) -> Iterator[Application]:  # noqa: F811
    with application("sampling", http_port, tiny.args()) as app:
        yield app


def expected(tiny: Tiny, prompt: list[int], body: dict[str, Any]) -> list[int]:  # noqa: F811
    bias = {int(token): value for token, value in body.get("logit_bias", {}).items()}
    params = SamplingParams(**body | {"logit_bias": bias})

    def stopping(ids: list[int]) -> Stopping:
        request = GenerationRequest("oracle", ids, MAX_TOKENS, sampling=params)
        return Stopping(tiny.tokenizer, request, eos_token_ids=(2,), max_model_len=MAX_MODEL_LEN)

    return generate(tiny.oracle, None, [prompt], stopping)[0].token_ids


def test_requests_of_all_kinds_side_by_side_get_the_tokens_of_each_alone(
    app: Application,
    tiny: Tiny,  # noqa: F811
) -> None:
    async def ask() -> list[list[int]]:
        async with httpx.AsyncClient(base_url=app.base_url, timeout=120) as client:
            bodies = [
                {"prompt": prompt_of(9), "max_tokens": MAX_TOKENS, "return_token_ids": True} | each
                for each in SETTINGS
            ]
            answers = await asyncio.gather(
                *(client.post("/v1/completions", json=body) for body in bodies)
            )
        return [answer.raise_for_status().json()["choices"][0]["token_ids"] for answer in answers]

    answers = asyncio.run(ask())
    assert answers == [expected(tiny, prompt_of(9), body) for body in SETTINGS]
    assert answers[-1].index(2) == 7, "min_tokens keeps the likeliest token out until then"
    assert app.stats()["speculation"]["num_draft_tokens"] > 0


def test_two_choices_are_seeded_independently(app: Application, tiny: Tiny) -> None:  # noqa: F811
    answer = app.completion(prompt_of(10), max_tokens=MAX_TOKENS, temperature=1, seed=4, n=2)
    tokens = [choice["token_ids"] for choice in answer["choices"]]
    assert tokens == [
        expected(tiny, prompt_of(10), {"temperature": 1, "seed": choice_seed(4, choice)})
        for choice in (0, 1)
    ]
    assert tokens[0] != tokens[1]
    assert answer["usage"]["prompt_tokens"] == 10


def test_without_a_temperature_answers_vary(app: Application) -> None:
    body = {"prompt": prompt_of(8), "max_tokens": 12, "return_token_ids": True}
    answers = [app.http.post("/v1/completions", json=body).json() for _ in range(2)]
    first, second = (answer["choices"][0]["token_ids"] for answer in answers)
    assert first != second


def test_log_probabilities_come_with_every_token(app: Application) -> None:
    answer = app.completion(prompt_of(9), max_tokens=MAX_TOKENS, logprobs=2)
    choice = answer["choices"][0]
    logprobs = choice["logprobs"]
    assert len(logprobs["token_logprobs"]) == len(choice["token_ids"]) == MAX_TOKENS
    for own, top in zip(logprobs["token_logprobs"], logprobs["top_logprobs"], strict=True):
        assert own == pytest.approx(max(top.values())), "greedy: the token is the likeliest"
        assert len(top) == 2
    streamed = list(app.stream(prompt_of(9), max_tokens=MAX_TOKENS, logprobs=2))
    parts = [chunk["choices"][0]["logprobs"]["token_logprobs"] for chunk in streamed]
    assert sum(parts, []) == pytest.approx(logprobs["token_logprobs"], abs=1e-4)


def test_the_buffers_hold_the_largest_messages(tiny: Tiny) -> None:  # noqa: F811
    """A message that outgrows its channel breaks the graph."""
    slots, length, K = 128, 4096, 7
    shapes = StaticShapes.create(num_slots=slots, max_model_len=length, num_drafts=K)
    stops = tuple(range(10**6, 10**6 + 1024))
    params = SamplingParams(
        temperature=1.0, repetition_penalty=1.1, min_tokens=5, logprobs=20, seed=-1,
        logit_bias=dict.fromkeys(range(MAX_LOGIT_BIAS), 1.5),
    )  # fmt: skip
    prompt = list(range(length - 10))
    request = GenerationRequest("r", prompt, 10, stop_token_ids=stops, sampling=params)
    sequences = []
    for slot in range(slots):
        stopping = Stopping(tiny.tokenizer, request, eos_token_ids=(2,), max_model_len=length)
        sequence = Sequence(prompt, slot=slot, stopping=stopping, max_model_len=length)
        sequence.num_computed = len(prompt)
        sequence.tokens.append(5)
        sequence.drafts = [1] * K
        sequences.append(sequence)
    plan, _ = plans.verify_plan(sequences, shapes, with_features=True)
    assert plan.sampling is not None and len(plan.sampling.history_tokens) > slots * (length - 10)
    assert len(pickle.dumps(plan)) < plan_bytes(shapes) - MESSAGE_OVERHEAD_BYTES / 2
    values = np.random.default_rng(0).standard_normal(21).tolist()
    entry = TokenLogprobs(values[20], tuple(enumerate(values[:20], 10**5)))
    entries = [pickle.loads(pickle.dumps(entry)) for _ in range(1000)]
    assert len(pickle.dumps(entries)) < 1000 * LOGPROBS_BYTES
