"""Sampling parameters, several choices and log probabilities over HTTP: a scripted engine."""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import AsyncGenerator
from dataclasses import replace

import httpx
import openai
import pytest

from deployments.api.errors import NotReady, QueueFull
from deployments.api.interleaved import interleaved
from deployments.api.openai_api import create_api
from dflash_core.sampling import SamplingParams, choice_seed
from tests.serve.test_openai_api import (  # noqa: F401  (fixtures)
    EOS,
    MODEL,
    assert_error,
    call,
    chat,
    client,
    complete,
    engine,
    events,
    server,
)

UNSEEDED = SamplingParams(temperature=1.0)


def sampling(engine):
    return engine.requests[-1].sampling


class TestWhatTheEngineIsAsked:
    @pytest.mark.parametrize("kind", ["complete", "chat"])
    def test_every_parameter_arrives(self, kind, request, engine):
        fields = {
            "temperature": 0.7, "top_p": 0.9, "top_k": 40, "min_p": 0.05, "seed": -3,
            "repetition_penalty": 1.1, "presence_penalty": -0.5, "frequency_penalty": 2,
            "min_tokens": 4,
        }  # fmt: skip
        ask = request.getfixturevalue(kind)
        response = ask(**fields, logit_bias={"5": 1.5, "49151": -250, "7": 100}, max_tokens=9)
        assert response.status_code == 200
        assert sampling(engine) == SamplingParams(
            **fields, logit_bias={5: 1.5, 49151: -100, 7: 100}
        )

    def test_absent_and_null_parameters_are_the_apis_defaults(self, complete, engine):
        for body in ({}, {"temperature": None, "top_p": None, "seed": None, "n": None}):
            assert complete(**body).status_code == 200
            assert replace(sampling(engine), seed=0) == UNSEEDED

    def test_the_checkpoints_defaults_come_before_the_apis(self, complete, engine):
        engine.sampling_defaults = {"temperature": 0.6, "top_p": 0.9}
        complete(top_p=0.5, seed=1)
        assert sampling(engine) == SamplingParams(temperature=0.6, top_p=0.5, seed=1)

    def test_without_a_seed_every_request_has_a_random_one(self, complete, engine):
        for _ in range(3):
            complete()
        assert len({request.sampling.seed for request in engine.requests}) == 3

    def test_choices_have_seeds_of_their_own_the_first_that_of_the_request(self, complete, engine):
        complete(n=3, seed=11)
        seeds = sorted(request.sampling.seed for request in engine.requests)
        assert seeds == sorted([11, choice_seed(11, 1), choice_seed(11, 2)])
        engine.requests.clear()
        complete(n=3)
        assert len({request.sampling.seed for request in engine.requests}) == 3
        assert len({request.request_id for request in engine.requests}) == 3

    def test_log_probabilities(self, complete, chat, engine):
        asked = []
        for ask, body in [
            (complete, {"logprobs": 3}),
            (complete, {"logprobs": 0}),
            (chat, {"logprobs": True}),
            (chat, {"logprobs": True, "top_logprobs": 20}),
            (chat, {"logprobs": False, "top_logprobs": 0}),
        ]:
            assert ask(**body).status_code == 200
            asked.append(sampling(engine).logprobs)
        assert asked == [3, 0, 0, 20, None]

    @pytest.mark.parametrize("value", ["NaN", "Infinity", "-Infinity", "1e400"])
    @pytest.mark.parametrize("field", ["temperature", "top_p", "frequency_penalty", "logit_bias"])
    def test_numbers_that_json_does_not_have(self, call, engine, field, value):
        value = f'{{"5": {value}}}' if field == "logit_bias" else value
        response = call(
            "POST",
            "/v1/completions",
            content=f'{{"prompt": "Hi", "{field}": {value}}}',
            headers={"content-type": "application/json"},
        )
        assert_error(response, 400, field)
        assert not engine.requests


class TestAllGreedy:
    @pytest.fixture(autouse=True)
    def greedy(self, engine):
        engine.all_greedy = True
        engine.sampling_defaults = {"temperature": 0.6, "repetition_penalty": 1.1}

    def test_requests_are_greedy_unless_they_say_otherwise(self, complete, chat, engine):
        for ask in (complete, chat):
            for body in ({}, {"temperature": 0, "top_p": 0.5, "top_k": 3, "seed": 1, "n": 2}):
                assert ask(**body).status_code == 200
                assert sampling(engine).beyond_argmax == ()

    @pytest.mark.parametrize(
        ("field", "value"),
        [
            ("temperature", 0.1),
            ("repetition_penalty", 1.1),
            ("frequency_penalty", 1),
            ("logit_bias", {"5": 1}),
            ("min_tokens", 2),
        ],
    )
    def test_what_needs_more_than_argmax_is_refused(self, complete, chat, engine, field, value):
        for ask in (complete, chat):
            assert "all_greedy" in assert_error(ask(**{field: value}), 400, field)
        assert not engine.requests

    def test_log_probabilities_are_refused(self, complete, chat):
        assert_error(complete(logprobs=1), 400, "logprobs")
        assert_error(chat(logprobs=True), 400, "logprobs")


class TestChoices:
    @pytest.mark.parametrize("kind", ["complete", "chat"])
    def test_whole(self, kind, request, engine, tokenizer):
        ask = request.getfixturevalue(kind)
        engine.statistics = {"drafts": 1}
        one, three = (ask(n=n, max_tokens=50, return_token_ids=True).json() for n in (1, 3))
        assert [choice["index"] for choice in three["choices"]] == [0, 1, 2]
        for choice in three["choices"]:
            assert choice | {"index": 0} == one["choices"][0]
        assert three["usage"]["prompt_tokens"] == one["usage"]["prompt_tokens"]
        assert three["usage"]["completion_tokens"] == 3 * one["usage"]["completion_tokens"]
        assert "metrics" in one and "metrics" not in three

    @pytest.mark.parametrize("kind", ["complete", "chat"])
    def test_streamed_as_they_come(self, kind, request, engine):
        ask = request.getfixturevalue(kind)
        options = {"include_usage": True}
        *chunks, usage, done = events(ask(n=3, max_tokens=50, stream=True, stream_options=options))
        assert done == "[DONE]"
        assert all(len(chunk["choices"]) == 1 for chunk in chunks)
        choices = [chunk["choices"][0] for chunk in chunks]
        assert {choice["index"] for choice in choices[:3]} == {0, 1, 2}, "one waits for another"
        for index in range(3):
            mine = [choice for choice in choices if choice["index"] == index]
            if kind == "complete":
                texts = [choice["text"] for choice in mine]
            else:
                texts = [choice["delta"]["content"] for choice in mine]
                roles = [choice["delta"].get("role") for choice in mine]
                assert roles == ["assistant"] + [None] * (len(mine) - 1)
            assert "".join(texts) == engine.text
            reasons = [choice["finish_reason"] for choice in mine]
            assert reasons == [None] * (len(mine) - 1) + ["stop"]
        whole = ask(n=3, max_tokens=50).json()
        assert usage["usage"] == whole["usage"] and usage["choices"] == []

    def test_a_batch_of_prompts(self, complete, engine, tokenizer):
        for prompts in (["Hi", "Good day to you"], [[5, 6], [7, 8, 9]]):
            body = complete(prompt=prompts, n=2, return_token_ids=True).json()
            ids = [tokenizer.encode(p) if isinstance(p, str) else p for p in prompts]
            assert [choice["index"] for choice in body["choices"]] == [0, 1, 2, 3]
            assert [choice["prompt_token_ids"] for choice in body["choices"]] == [
                ids[0], ids[0], ids[1], ids[1],
            ]  # fmt: skip
            assert body["usage"]["prompt_tokens"] == sum(map(len, ids))

    @pytest.mark.parametrize("stream", [False, True])
    def test_a_failure_of_one_ends_all_with_a_status(self, complete, engine, stream):
        asked = []
        generate = engine.generate

        async def full() -> AsyncGenerator:
            raise QueueFull("full")
            yield

        def third_fails(request):
            asked.append(request)
            return full() if len(asked) == 3 else generate(request)

        engine.generate = third_fails
        assert_error(complete(n=4, stream=stream), 429)

    def test_a_failure_in_the_middle_is_the_last_event(self, complete, engine):
        engine.fail_after = (2, NotReady("lost the verifier"))
        *chunks, last = events(complete(n=2, stream=True))
        assert chunks and last["error"]["message"] == "lost the verifier"

    @pytest.mark.parametrize("stream", [False, True])
    def test_cancelling_closes_every_choice(self, engine, stream):
        engine.hang_after = 1
        opened, closed = [], []
        generate = engine.generate

        async def watched(request):
            opened.append(request)
            try:
                async with contextlib.aclosing(generate(request)) as outputs:
                    async for output in outputs:
                        yield output
            finally:
                closed.append(request)

        engine.generate = watched

        async def run() -> None:
            transport = httpx.ASGITransport(create_api(engine))
            async with httpx.AsyncClient(transport=transport, base_url="http://test") as client:
                body = {"prompt": "Hi", "stream": stream, "n": 4}
                task = asyncio.create_task(client.post("/v1/completions", json=body))
                await asyncio.to_thread(engine.waiting.wait, 5)
                task.cancel()
                with contextlib.suppress(asyncio.CancelledError):
                    await task
                assert len(opened) == len(closed) == 4

        asyncio.run(run())

    def test_the_openai_client(self, client, engine):
        answer = client.chat.completions.create(
            model=MODEL, messages=[{"role": "user", "content": "Hi"}], n=2, temperature=0.5, seed=3
        )
        assert [choice.message.content for choice in answer.choices] == [engine.text] * 2
        with pytest.raises(openai.BadRequestError, match="top_p is 1.5") as caught:
            client.completions.create(model=MODEL, prompt="Hi", top_p=1.5)
        assert caught.value.param == "top_p"


class TestInterleaved:
    @staticmethod
    async def source(items, closed, name):
        try:
            for item in items:
                await asyncio.sleep(0)
                if isinstance(item, Exception):
                    raise item
                yield item
            await asyncio.Event().wait()
        finally:
            closed.append(name)

    @pytest.mark.parametrize("count", [1, 3])
    def test_closing_it_closes_every_source_and_order_within_a_source_stays(self, count):
        async def run():
            closed, seen = [], []
            sources = [self.source(range(5), closed, name) for name in range(count)]
            async with contextlib.aclosing(interleaved(sources)) as items:
                async for index, item in items:
                    seen.append((index, item))
                    if len(seen) == 5 * count:
                        break
            assert sorted(closed) == list(range(count))
            for name in range(count):
                assert [item for index, item in seen if index == name] == list(range(5))

        asyncio.run(run())

    def test_an_error_closes_the_others_and_is_raised(self):
        async def run():
            closed = []
            sources = [self.source([1], closed, 0), self.source([1, KeyError("x")], closed, 1)]
            with pytest.raises(KeyError):
                async for _ in interleaved(sources):
                    pass
            assert sorted(closed) == [0, 1]

        asyncio.run(run())


class TestLogprobs:
    def test_of_a_completion(self, complete, engine, tokenizer):
        body = complete(logprobs=2, max_tokens=50, return_token_ids=True).json()
        choice = body["choices"][0]
        ids, logprobs = choice["token_ids"], choice["logprobs"]
        assert ids[-1] == EOS and logprobs["tokens"][-1] == "<|im_end|>"
        assert logprobs["token_logprobs"] == [-place for place in range(len(ids))]
        assert [len(top) for top in logprobs["top_logprobs"]] == [3] * len(ids)
        name = logprobs["tokens"][0]
        alternatives = [tokenizer.decode([ids[0] + i]) for i in (1, 2)]
        assert logprobs["top_logprobs"][0] == {
            name: 0, alternatives[0]: -1, alternatives[1]: -2,
        }  # fmt: skip
        offsets = logprobs["text_offset"]
        assert offsets == sorted(offsets) and offsets[-1] == len(engine.text)
        for token, offset in zip(logprobs["tokens"][:-1], offsets, strict=False):
            if token.startswith("bytes:"):
                assert engine.text[offset] in " 🦖"
            else:
                assert engine.text[offset:].startswith(token)

    def test_none_are_counted_but_the_tokens_own(self, complete):
        logprobs = complete(logprobs=0).json()["choices"][0]["logprobs"]
        assert all(len(top) == 1 for top in logprobs["top_logprobs"])

    def test_of_a_chat(self, chat, engine, tokenizer):
        body = chat(logprobs=True, top_logprobs=1, return_token_ids=True).json()
        choice = body["choices"][0]
        content = choice["logprobs"]["content"]
        assert choice["logprobs"]["refusal"] is None
        assert len(content) == len(choice["token_ids"])
        spoken = b"".join(bytes(entry["bytes"]) for entry in content[:-1])
        assert spoken.decode() == engine.text
        for place, (token_id, entry) in enumerate(zip(choice["token_ids"], content, strict=True)):
            assert entry["logprob"] == -place
            (top,) = entry["top_logprobs"]
            assert top["logprob"] == -1
            if not top["token"].startswith("bytes:"):
                assert top["token"] == tokenizer.decode([token_id + 1])
        names = [entry["token"] for entry in content]
        assert any(name.startswith("bytes:\\x20\\xf0\\x9f") for name in names)

    @pytest.mark.parametrize("kind", ["complete", "chat"])
    def test_a_stream_says_the_same(self, kind, request, engine):
        ask = request.getfixturevalue(kind)
        engine.block = 2
        body = {"logprobs": 1} if kind == "complete" else {"logprobs": True, "top_logprobs": 1}
        whole = ask(max_tokens=50, **body).json()["choices"][0]["logprobs"]
        *chunks, _ = events(ask(max_tokens=50, stream=True, **body))
        parts = [chunk["choices"][0]["logprobs"] for chunk in chunks]
        for name, value in whole.items():
            if value is not None:
                assert sum((part[name] for part in parts), []) == value

    def test_they_end_where_the_output_does(self, complete):
        choice = complete(logprobs=1, stop="🦖", return_token_ids=True).json()["choices"][0]
        assert choice["text"] == "Hello "
        assert len(choice["logprobs"]["tokens"]) == len(choice["token_ids"])

    def test_those_who_do_not_ask_get_none(self, complete, chat):
        assert complete().json()["choices"][0]["logprobs"] is None
        assert chat().json()["choices"][0]["logprobs"] is None

    def test_the_openai_client_reads_them(self, client):
        stream = client.chat.completions.create(
            model=MODEL,
            messages=[{"role": "user", "content": "Hi"}],
            logprobs=True,
            top_logprobs=2,
            stream=True,
        )
        entries = [entry for chunk in stream for entry in chunk.choices[0].logprobs.content]
        assert len(entries) > 8 and all(len(entry.top_logprobs) == 2 for entry in entries)
        answer = client.completions.create(model=MODEL, prompt="Hi", logprobs=5, max_tokens=4)
        assert len(answer.choices[0].logprobs.tokens) == 4


def test_the_schema_describes_the_parameters(call):
    schemas = call("GET", "/openapi.json").json()["components"]["schemas"]
    for name in ("CompletionRequest", "ChatCompletionRequest"):
        assert {"temperature", "logit_bias", "n", "seed"} <= schemas[name]["properties"].keys()
