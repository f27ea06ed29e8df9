"""The HTTP API in front of a scripted engine: no models, no Ray."""

from __future__ import annotations

import asyncio
import contextlib
import json
import pickle
import socket
import threading
from dataclasses import dataclass, field, replace
from typing import Any

import httpx
import openai
import pytest
import uvicorn

from deployments.api.errors import NotReady, QueueFull
from deployments.api.openai_api import create_api
from deployments.health import Health
from dflash_core.request import GenerationOutput, GenerationRequest, TokenLogprobs
from dflash_core.stopping import Stopping

EOS = 2
MODEL = "package://smollm2/135m"


@dataclass
class FakeEngine:
    """Says `text` in blocks of tokens, whatever it is asked.

    The log probability of a token is minus its place in the output; the alternatives are the ids
    that follow its own.
    """

    tokenizer: Any
    text: str = "Hello 🦖! The quick brown fox."
    block: int = 3
    fail_before: Exception | None = None
    fail_after: tuple[int, Exception] | None = None
    hang_after: int | None = None
    current_health: Health = Health("ready")
    statistics: dict[str, Any] | None = None
    sampling_defaults: dict[str, float] = field(default_factory=dict)
    all_greedy: bool = False
    requests: list[GenerationRequest] = field(default_factory=list)
    waiting: threading.Event = field(default_factory=threading.Event)
    closed: threading.Event = field(default_factory=threading.Event)

    model_name = MODEL
    model_root = "some/folder"
    max_model_len = 128
    max_token_chars = 81
    vocab_size = 49152

    async def generate(self, request):
        self.requests.append(request)
        try:
            if self.fail_before is not None:
                raise self.fail_before
            stopping = Stopping(
                self.tokenizer,
                request,
                eos_token_ids=[EOS],
                max_model_len=self.max_model_len,
            )
            token_ids = [*self.tokenizer.encode(self.text), EOS] * 20
            for step, start in enumerate(range(0, len(token_ids), self.block)):
                await asyncio.sleep(0)
                if self.fail_after is not None and step == self.fail_after[0]:
                    raise self.fail_after[1]
                if step == self.hang_after:
                    self.waiting.set()
                    await asyncio.Event().wait()
                output = stopping.append(token_ids[start : start + self.block])
                if (count := request.sampling.logprobs) is not None:
                    logprobs = [
                        TokenLogprobs(-place, tuple((t + i, -i) for i in range(1, count + 1)))
                        for place, t in enumerate(output.token_ids, start)
                    ]
                    output = replace(output, logprobs=logprobs)
                if output.finish_reason:
                    yield replace(output, statistics=self.statistics)
                    return
                yield output
        finally:
            await asyncio.sleep(0)  # cleaning up may take awaiting
            self.closed.set()

    async def health(self):
        return self.current_health

    async def stats(self):
        return {"drafts": 7}


@pytest.fixture
def engine(tokenizer):
    return FakeEngine(tokenizer)


@pytest.fixture
def call(engine):
    """One request to the application, in this process."""

    def run(method: str, path: str, **options: Any) -> httpx.Response:
        async def send() -> httpx.Response:
            transport = httpx.ASGITransport(create_api(engine))
            async with httpx.AsyncClient(transport=transport, base_url="http://test") as client:
                return await client.request(method, path, **options)

        return asyncio.run(send())

    return run


@pytest.fixture
def complete(call):
    return lambda **body: call("POST", "/v1/completions", json={"prompt": "Hi"} | body)


@pytest.fixture
def chat(call):
    messages = [{"role": "user", "content": "Hi"}]
    return lambda **body: call("POST", "/v1/chat/completions", json={"messages": messages} | body)


class Server(uvicorn.Server):
    """uvicorn in a thread, on a free port of the loopback interface."""

    def __init__(self, app: Any) -> None:
        super().__init__(uvicorn.Config(app, port=0, log_level="warning"))
        self.up = threading.Event()

    async def startup(self, sockets=None) -> None:
        await super().startup(sockets)
        self.port = self.servers[0].sockets[0].getsockname()[1]
        self.up.set()


@pytest.fixture
def server(engine):
    server = Server(create_api(engine))
    thread = threading.Thread(target=server.run, daemon=True)
    thread.start()
    assert server.up.wait(10)
    yield server
    server.should_exit = True
    thread.join(10)
    assert not thread.is_alive()


@pytest.fixture
def client(server):
    url = f"http://127.0.0.1:{server.port}/v1"
    with openai.OpenAI(base_url=url, api_key="none", max_retries=0) as client:
        yield client


def events(response: httpx.Response) -> list[Any]:
    """The data of a stream's events, parsed; `[DONE]` as it is."""
    assert response.status_code == 200
    assert response.headers["content-type"].startswith("text/event-stream")
    lines = response.text.split("\n\n")
    assert lines.pop() == ""
    assert all(line.startswith("data: ") for line in lines)
    data = [line.removeprefix("data: ") for line in lines]
    return [item if item == "[DONE]" else json.loads(item) for item in data]


def assert_error(response: httpx.Response, status: int, param: str | None = None) -> str:
    assert response.status_code == status, response.text
    error = response.json()["error"]
    assert set(error) == {"message", "type", "param", "code"}
    assert error["param"] == param
    assert "Traceback" not in response.text
    return error["message"]


class TestAnswers:
    def test_a_completion(self, complete, engine, tokenizer):
        body = complete(max_tokens=50).json()
        count = len(tokenizer.encode(engine.text)) + 1
        assert body["object"] == "text_completion"
        assert body["id"].startswith("cmpl-")
        assert body["model"] == MODEL
        assert body["system_fingerprint"] is None
        assert body["choices"] == [
            {
                "index": 0,
                "text": engine.text,
                "logprobs": None,
                "finish_reason": "stop",
                "stop_reason": None,
            }
        ]
        assert body["usage"] == {
            "prompt_tokens": 1,
            "completion_tokens": count,
            "total_tokens": 1 + count,
        }

    def test_a_chat_completion(self, chat, engine):
        body = chat().json()
        assert body["object"] == "chat.completion"
        assert body["id"].startswith("chatcmpl-")
        assert body["choices"] == [
            {
                "index": 0,
                "message": {"role": "assistant", "content": engine.text, "refusal": None},
                "logprobs": None,
                "finish_reason": "stop",
                "stop_reason": None,
            }
        ]

    @pytest.mark.parametrize("kind", ["complete", "chat"])
    def test_a_stream_says_the_same(self, kind, request, engine, tokenizer):
        ask = request.getfixturevalue(kind)
        engine.block = 1
        *chunks, done = events(ask(stream=True, max_tokens=50))
        assert len(chunks) < len(tokenizer.encode(engine.text))  # the emoji has several tokens
        assert done == "[DONE]"
        choices = [chunk["choices"][0] for chunk in chunks]
        assert [choice["finish_reason"] for choice in choices[:-1]] == [None] * (len(choices) - 1)
        assert choices[-1]["finish_reason"] == "stop"
        assert len({chunk["id"] for chunk in chunks}) == 1
        assert not any("usage" in chunk for chunk in chunks)
        if kind == "complete":
            texts = [choice["text"] for choice in choices]
        else:
            texts = [choice["delta"]["content"] for choice in choices]
            assert choices[0]["delta"]["role"] == "assistant"
            assert not any("role" in choice["delta"] for choice in choices[1:])
        assert "".join(texts) == engine.text
        assert all(texts[:-1])  # no chunk without text, not even the first

    @pytest.mark.parametrize("kind", ["complete", "chat"])
    def test_usage_comes_last_without_choices(self, kind, request):
        ask = request.getfixturevalue(kind)
        usage = ask(max_tokens=5).json()["usage"]
        *chunks, last, done = events(
            ask(max_tokens=5, stream=True, stream_options={"include_usage": True})
        )
        assert (last["choices"], last["usage"], done) == ([], usage, "[DONE]")
        assert usage["completion_tokens"] == 5
        assert all(chunk["usage"] is None for chunk in chunks)

    def test_usage_may_come_with_every_chunk(self, complete):
        options = {"include_usage": True, "continuous_usage_stats": True}
        *chunks, _ = events(complete(max_tokens=7, stream=True, stream_options=options))
        counts = [chunk["usage"]["completion_tokens"] for chunk in chunks]
        assert counts == sorted(counts)
        assert counts[-2:] == [7, 7]

    def test_ids_are_returned_on_demand(self, complete, chat, engine, tokenizer):
        expected = [*tokenizer.encode(engine.text), EOS]
        choice = complete(max_tokens=50, return_token_ids=True).json()["choices"][0]
        assert choice["token_ids"] == expected
        assert choice["prompt_token_ids"] == tokenizer.encode("Hi")
        body = chat(return_token_ids=True).json()
        assert body["choices"][0]["token_ids"] == expected
        assert body["prompt_token_ids"] == engine.requests[-1].prompt_token_ids
        for ask in (complete, chat):
            *chunks, _ = events(ask(max_tokens=50, return_token_ids=True, stream=True))
            blocks = [chunk["choices"][0]["token_ids"] for chunk in chunks]
            assert sum(blocks, []) == expected
            assert max(map(len, blocks)) == engine.block

    def test_statistics_of_the_request_are_its_metrics(self, complete, engine):
        engine.statistics = {"drafts": 3}
        assert complete().json()["metrics"] == {"drafts": 3}
        *chunks, _ = events(complete(stream=True))
        assert [chunk.get("metrics") for chunk in chunks if "metrics" in chunk] == [{"drafts": 3}]

    def test_models(self, call):
        listed = call("GET", "/v1/models").json()
        assert listed["object"] == "list"
        (model,) = listed["data"]
        assert (model["id"], model["root"], model["object"]) == (MODEL, "some/folder", "model")
        assert model["max_model_len"] == 128
        assert call("GET", f"/v1/models/{MODEL}").json() == model
        assert "gpt-4" in assert_error(call("GET", "/v1/models/gpt-4"), 404, "model")

    def test_health_and_stats(self, call, engine):
        assert call("GET", "/health").json() == {"status": "ready", "reason": None}
        assert call("GET", "/stats").json() == {"drafts": 7}
        engine.current_health = Health("degraded", "no drafter")
        assert call("GET", "/health").json() == {"status": "degraded", "reason": "no drafter"}
        engine.current_health = Health("unavailable", "the verifier is loading")
        response = call("GET", "/health")
        assert assert_error(response, 503) == "the verifier is loading"
        assert response.headers["retry-after"]

    def test_a_request_id_is_honoured_and_returned(self, call):
        body = {"prompt": "Hi"}
        for stream in (False, True):
            response = call(
                "POST",
                "/v1/completions",
                json=body | {"stream": stream},
                headers={"X-Request-Id": "abc"},
            )
            assert response.headers.get_list("x-request-id") == ["abc"]
            assert '"id":"cmpl-abc"' in response.text
        assert len(call("GET", "/nowhere").headers["x-request-id"]) >= 16

    def test_requests_with_the_same_id_are_different_for_the_engine(self, call, engine):
        for _ in range(2):
            call("POST", "/v1/completions", json={"prompt": "Hi"}, headers={"X-Request-Id": "abc"})
        assert engine.requests[0].request_id != engine.requests[1].request_id

    def test_the_schema_can_be_fetched(self, call):
        assert "/v1/chat/completions" in call("GET", "/openapi.json").json()["paths"]


class TestEcho:
    @pytest.mark.parametrize("stream", [False, True])
    def test_the_prompt_goes_before_each_of_its_answers(self, complete, engine, tokenizer, stream):
        prompts = ["One two", "Three"]
        if stream:
            ids = [tokenizer.encode(prompt) for prompt in prompts]
            chunks = events(complete(prompt=ids, n=2, echo=True, stream=True))
            texts = ["", "", "", ""]
            for chunk in chunks[:-1]:
                [choice] = chunk["choices"]
                texts[choice["index"]] += choice["text"]
        else:
            answer = complete(prompt=prompts, n=2, echo=True).json()
            texts = [choice["text"] for choice in answer["choices"]]
            own = complete().json()["usage"]["completion_tokens"]
            assert answer["usage"]["completion_tokens"] == 4 * own
        plain = complete().json()["choices"][0]["text"]
        assert texts == ["One two" + plain] * 2 + ["Three" + plain] * 2

    def test_without_log_probabilities(self, complete, engine):
        message = assert_error(complete(echo=True, logprobs=2), 400, "echo")
        assert "log probabilities" in message
        assert not engine.requests


class TestWhatTheEngineIsAsked:
    def test_prompts(self, complete, engine, tokenizer):
        ids = tokenizer.encode("Hi there")
        for prompt in ("Hi there", ids, ["Hi there"], [ids]):
            assert complete(prompt=prompt).status_code == 200
            assert engine.requests[-1].prompt_token_ids == ids

    def test_messages(self, chat, engine, tokenizer):
        expected = (
            "<|im_start|>system\nBe brief.<|im_end|>\n"
            "<|im_start|>user\nOne\nTwo<|im_end|>\n<|im_start|>assistant\n"
        )
        parts = [{"type": "text", "text": "One"}, {"type": "text", "text": "Two"}]
        for content in ("One\nTwo", parts):
            messages = [
                {"role": "system", "content": "Be brief."},
                {"role": "user", "content": content, "name": "Ann"},
            ]
            assert chat(messages=messages).status_code == 200
            assert tokenizer.decode(engine.requests[-1].prompt_token_ids) == expected

    def test_template_arguments(self, chat, engine, tokenizer):
        chat(chat_template_kwargs={"add_generation_prompt": False})
        assert tokenizer.decode(engine.requests[-1].prompt_token_ids).endswith("<|im_end|>\n")

    def test_how_many_tokens(self, complete, chat, engine):
        complete()
        complete(max_tokens=None)
        complete(max_tokens=127)
        chat(max_tokens=9)
        chat(max_tokens=9, max_completion_tokens=4)
        chat()
        room_in_chat = 128 - len(engine.requests[-1].prompt_token_ids)
        asked = [request.max_tokens for request in engine.requests]
        assert asked == [16, 127, 127, 9, 4, room_in_chat]

    def test_stops(self, complete, engine):
        body = complete(stop="fox", max_tokens=50).json()
        assert body["choices"][0]["stop_reason"] == "fox"
        assert body["choices"][0]["text"].endswith("quick brown ")
        complete(stop=list("abcdefgh"), stop_token_ids=[7, 8], ignore_eos=True)
        request = engine.requests[-1]
        assert request.stop == tuple("abcdefgh")
        assert (request.stop_token_ids, request.ignore_eos) == ((7, 8), True)

    def test_what_does_not_change_the_answer_is_accepted(self, complete, chat):
        neutral = {
            "model": MODEL,
            "temperature": 0.0,
            "seed": 3,
            "top_p": 0.9,
            "top_k": 5,
            "min_p": 0.1,
            "n": 1,
            "presence_penalty": 0,
            "logit_bias": {},
            "user": "me",
            "never_heard_of_it": {"x": [1]},
            "stop": None,
            "stream": None,
        }
        assert complete(**neutral, best_of=1, echo=False, suffix=None).status_code == 200
        more = {"response_format": {"type": "text"}, "tools": [], "logprobs": False}
        assert chat(**neutral, **more).status_code == 200


class TestBadRequests:
    @pytest.mark.parametrize(
        ("param", "value"),
        [
            ("max_tokens", "5"),
            ("max_tokens", -1),
            ("max_tokens", 0),
            ("max_tokens", 1.5),
            ("max_tokens", True),
            ("temperature", -1),
            ("temperature", "0"),
            ("temperature", False),
            ("top_p", 0),
            ("top_p", 1.5),
            ("top_k", "all"),
            ("seed", "x"),
            ("stop", ""),
            ("stop", 5),
            ("stop", ["a", ""]),
            ("stop", ["a"] * 65),
            ("stop", "a" * 1025),
            ("stop_token_ids", [-1]),
            ("stop_token_ids", 7),
            ("stream", "yes"),
            ("stream_options", {"include_usage": True}),
            ("model", 5),
            ("n", 0),
            ("n", 129),
            ("n", "1"),
            ("logprobs", -1),
            ("logprobs", "yes"),
            ("seed", 1 << 63),
            ("seed", 1.5),
            ("top_k", -2),
            ("min_p", 1.5),
            ("presence_penalty", 2.5),
            ("frequency_penalty", -3),
            ("repetition_penalty", 0),
            ("logit_bias", {"x": 1}),
            ("logit_bias", {"-5": 1}),
            ("logit_bias", {"5": "1"}),
            ("logit_bias", {"49152": 1}),
            ("logit_bias", [5]),
            ("logit_bias", {str(token): 1 for token in range(1025)}),
            ("min_tokens", -1),
            ("min_tokens", 1000),
            ("stop_token_ids", [5] * 1025),
        ],
    )
    def test_a_parameter_is_named(self, param, value, complete, chat, engine):
        for response in (complete(**{param: value}), chat(**{param: value})):
            assert param in assert_error(response, 400, param)
            assert response.json()["error"]["type"] == "invalid_request_error"
        assert not engine.requests

    @pytest.mark.parametrize(
        ("param", "value"),
        [
            ("prompt", None),
            ("prompt", ""),
            ("prompt", []),
            ("prompt", 5),
            ("prompt", {"text": "x"}),
            ("prompt", [[]]),
            ("prompt", ["a", ""]),
            ("prompt", ["a"] * 129),
            ("prompt", ["a", [1]]),
            ("prompt", [1, "a"]),
            ("prompt", [-1]),
            ("prompt", [49152]),
            ("prompt", [2**70]),
            ("prompt", "word " * 400),
            ("prompt", [5] * 128),
            ("best_of", 3),
            ("echo", "yes"),
            ("suffix", "end"),
            ("logprobs", True),
            ("logprobs", 21),
            ("top_logprobs", 2),
        ],
    )
    def test_of_a_completion(self, param, value, complete, engine):
        assert_error(complete(**{param: value}), 400, param)
        assert not engine.requests

    @pytest.mark.parametrize(
        ("param", "value"),
        [
            ("messages", []),
            ("messages", "hi"),
            ("messages", [{"role": "user"}]),
            ("messages", [{"content": "hi"}]),
            ("messages", [{"role": "user", "content": 5}]),
            ("messages", [{"role": "user", "content": [{"type": "image_url"}]}]),
            ("messages", [{"role": "user", "content": "x", "tool_calls": [{}]}]),
            ("messages", [{"role": "user", "content": "word " * 400}]),
            ("max_completion_tokens", 0),
            ("tools", [{"type": "function"}]),
            ("tool_choice", "required"),
            ("response_format", {"type": "json_object"}),
            ("logprobs", 1),
            ("top_logprobs", 2),
            ("chat_template_kwargs", {"tokenize": True}),
            ("chat_template_kwargs", [1]),
        ],
    )
    def test_of_a_chat(self, param, value, chat, engine):
        assert_error(chat(**{param: value}), 400, param)
        assert not engine.requests

    def test_a_prompt_that_is_too_long_says_by_how_much(self, complete):
        response = complete(prompt=[5] * 120, max_tokens=9)
        assert_error(response, 400, "max_tokens")
        error = response.json()["error"]
        assert error["code"] == "context_length_exceeded"
        assert "maximum context length is 128 tokens" in error["message"]
        assert "total of 129 tokens" in error["message"]
        assert complete(prompt=[5] * 120, max_tokens=8).status_code == 200

    @pytest.mark.parametrize("max_tokens", [128, 10**40])
    def test_more_output_than_the_context_holds(self, max_tokens, complete, chat, engine):
        for ask in (complete, chat):
            assert_error(ask(max_tokens=max_tokens), 400, "max_tokens")
        assert not engine.requests

    def test_what_the_template_refuses(self, chat, tokenizer, monkeypatch):
        template = "{{ raise_exception('roles must alternate') }}"
        monkeypatch.setattr(tokenizer, "chat_template", template)
        assert "roles must alternate" in assert_error(chat(), 400, "messages")

    @pytest.mark.parametrize(
        ("content", "content_type"),
        [
            (b"{", "application/json"),
            (b"", "application/json"),
            (b"[]", "application/json"),
            (b"null", "application/json"),
            (b"\xff\xfe", "application/json"),
            (b"[" * 100_000, "application/json"),
            (b'{"prompt": "Hi"}', "text/plain"),
        ],
    )
    def test_a_body_that_is_no_request(self, call, content, content_type):
        headers = {"content-type": content_type}
        for path in ("/v1/completions", "/v1/chat/completions"):
            assert_error(call("POST", path, content=content, headers=headers), 400)

    @pytest.mark.parametrize("field", ["prompt", "model", "suffix"])
    def test_text_that_is_not_unicode(self, call, field):
        body = b'{"prompt": "Hi", "%s": "\\ud800"}' % field.encode()
        headers = {"content-type": "application/json"}
        response = call("POST", "/v1/completions", content=body, headers=headers)
        assert_error(response, 404 if field == "model" else 400, field)

    def test_an_unknown_model(self, complete, chat, engine):
        for ask in (complete, chat):
            response = ask(model="gpt-4")
            assert "'gpt-4'" in assert_error(response, 404, "model")
            assert response.json()["error"]["code"] == "model_not_found"
        assert not engine.requests

    def test_unknown_routes_and_methods(self, call):
        assert "/v1/nothing" in assert_error(call("GET", "/v1/nothing"), 404)
        response = call("GET", "/v1/completions")
        assert_error(response, 405)
        assert response.headers["allow"] == "POST"


class TestFailures:
    @pytest.mark.parametrize("stream", [False, True])
    @pytest.mark.parametrize("kind", ["complete", "chat"])
    def test_before_the_first_token_they_have_a_status(self, stream, kind, request, engine):
        ask = request.getfixturevalue(kind)
        engine.fail_before = QueueFull("16 requests wait already", retry_after=3)
        response = ask(stream=stream)
        assert assert_error(response, 429) == "16 requests wait already"
        assert response.headers["retry-after"] == "3"
        engine.fail_before = NotReady("no verifier")
        assert_error(ask(stream=stream), 503)
        assert engine.closed.is_set()

    @pytest.mark.parametrize("stream", [False, True])
    def test_unexpected_ones_hide_their_details_and_are_logged(
        self, stream, complete, engine, caplog
    ):
        engine.fail_before = RuntimeError("secret")
        response = complete(stream=stream)
        assert "secret" not in assert_error(response, 500)
        assert response.headers["x-request-id"]
        assert "secret" in caplog.text

    @pytest.mark.parametrize(
        ("error", "kind"),
        [(NotReady("lost it"), "service_unavailable_error"), (KeyError(), "server_error")],
    )
    def test_in_the_middle_of_a_stream_they_are_its_last_event(self, error, kind, complete, engine):
        engine.fail_after = (2, error)
        *chunks, last = events(complete(stream=True))
        assert len(chunks) >= 1
        assert all("choices" in chunk for chunk in chunks)
        assert last["error"]["type"] == kind

    def test_in_the_middle_of_a_whole_answer_they_have_a_status(self, complete, engine):
        engine.fail_after = (2, NotReady("lost the verifier"))
        assert_error(complete(), 503)

    def test_an_output_without_an_end_is_one(self, complete, engine):
        async def breaks_off(request):
            yield GenerationOutput([5], "word")

        engine.generate = breaks_off
        assert_error(complete(), 500)
        chunk, last = events(complete(stream=True))
        assert chunk["choices"][0]["text"] == "word"
        assert last["error"]["type"] == "server_error"

    def test_errors_survive_pickling(self):
        error = pickle.loads(pickle.dumps(QueueFull("full", param="n", retry_after=9)))
        assert (error.message, error.param, error.retry_after) == ("full", "n", 9)
        assert error.body()["error"]["message"] == "full"


class TestOverTheWire:
    """A real server, and the client that most people use."""

    def test_the_openai_client_completes(self, client, engine):
        answer = client.completions.create(model=MODEL, prompt="Hi", max_tokens=50)
        assert answer.choices[0].text == engine.text
        assert answer.usage.completion_tokens == len(engine.tokenizer.encode(engine.text)) + 1

    def test_the_openai_client_streams_a_completion(self, client, engine):
        stream = client.completions.create(
            model=MODEL,
            prompt="Hi",
            max_tokens=50,
            stream=True,
            stream_options={"include_usage": True},
        )
        *chunks, last = list(stream)
        assert "".join(chunk.choices[0].text for chunk in chunks) == engine.text
        assert chunks[-1].choices[0].finish_reason == "stop"
        assert last.choices == []
        assert last.usage.prompt_tokens == 1

    def test_the_openai_client_chats(self, client, engine):
        messages = [{"role": "user", "content": "Hi"}]
        answer = client.chat.completions.create(model=MODEL, messages=messages)
        assert answer.choices[0].message.content == engine.text
        stream = client.chat.completions.create(model=MODEL, messages=messages, stream=True)
        chunks = list(stream)
        assert "".join(chunk.choices[0].delta.content for chunk in chunks) == engine.text
        assert chunks[0].choices[0].delta.role == "assistant"
        assert chunks[-1].choices[0].finish_reason == "stop"

    def test_the_openai_client_lists_models(self, client):
        assert [model.id for model in client.models.list()] == [MODEL]
        assert client.models.retrieve(MODEL).id == MODEL

    def test_the_openai_client_raises_what_it_should(self, client, engine):
        with pytest.raises(openai.BadRequestError) as caught:
            client.completions.create(model=MODEL, prompt="Hi", temperature=-0.5)
        assert caught.value.param == "temperature"
        with pytest.raises(openai.NotFoundError):
            client.completions.create(model="gpt-4", prompt="Hi")
        engine.fail_before = QueueFull("full")
        with pytest.raises(openai.RateLimitError):
            client.completions.create(model=MODEL, prompt="Hi", stream=True)
        engine.fail_before = None
        engine.fail_after = (1, NotReady("lost the verifier"))
        with pytest.raises(openai.APIError, match="lost the verifier"):
            list(client.completions.create(model=MODEL, prompt="Hi", stream=True))

    def test_a_first_event_is_sent_while_the_engine_works_on(self, client, engine):
        engine.hang_after = 1
        stream = client.completions.create(model=MODEL, prompt="Hi", stream=True)
        assert next(iter(stream)).choices[0].text
        assert not engine.closed.is_set()
        stream.close()

    @pytest.mark.parametrize("hang_after", [0, 2])
    @pytest.mark.parametrize("stream", [False, True])
    def test_a_client_that_leaves_closes_the_generator(self, stream, hang_after, server, engine):
        engine.hang_after = hang_after
        for _ in range(3):
            engine.waiting.clear()
            engine.closed.clear()
            body = json.dumps({"prompt": "Hi", "max_tokens": 50, "stream": stream}).encode()
            head = (
                "POST /v1/completions HTTP/1.1\r\nHost: test\r\n"
                f"Content-Type: application/json\r\nContent-Length: {len(body)}\r\n\r\n"
            )
            with socket.create_connection(("127.0.0.1", server.port)) as connection:
                connection.sendall(head.encode() + body)
                assert engine.waiting.wait(5)
                assert not engine.closed.is_set()
            assert engine.closed.wait(1), "the generator is still open a second later"
        engine.hang_after = None
        with httpx.Client() as client:
            url = f"http://127.0.0.1:{server.port}/v1/completions"
            assert client.post(url, json={"prompt": "Hi"}).status_code == 200

    def test_a_client_that_leaves_while_events_flow_closes_the_generator(self, server, engine):
        engine.text = "word " * 20
        engine.block = 1
        url = f"http://127.0.0.1:{server.port}/v1/completions"
        body = {"prompt": "Hi", "max_tokens": 100, "stream": True}
        with httpx.Client() as client, client.stream("POST", url, json=body) as response:
            next(response.iter_lines())
        assert engine.closed.wait(1)

    def test_cancelling_the_request_closes_the_generator(self, engine):
        # Ray Serve cancels the task of a request whose client has gone.
        engine.hang_after = 1

        async def run(stream: bool) -> None:
            transport = httpx.ASGITransport(create_api(engine))
            async with httpx.AsyncClient(transport=transport, base_url="http://test") as client:
                body = {"prompt": "Hi", "stream": stream}
                task = asyncio.create_task(client.post("/v1/completions", json=body))
                await asyncio.to_thread(engine.waiting.wait, 5)
                task.cancel()
                with contextlib.suppress(asyncio.CancelledError):
                    await task
                assert engine.closed.is_set()

        for stream in (False, True):
            engine.waiting.clear()
            engine.closed.clear()
            asyncio.run(run(stream))
