"""What the HTTP API offers besides generating: keys, CORS, tokens, version, metrics."""

from __future__ import annotations

import asyncio
import hmac
import json
import tomllib
from pathlib import Path
from typing import Any

import httpx
import pytest

from deployments.api.api_key import ApiKeyError, load_api_keys
from deployments.api.openai_api import create_api
from deployments.app_args import AppArgs
from tests.serve.application import application
from tests.serve.test_openai_api import MODEL, FakeEngine, assert_error, events
from tests.serve.tiny_pair import Tiny

KEY = "sk-one"
MESSAGES = [{"role": "user", "content": "Hi"}]


class MeasuredEngine(FakeEngine):
    async def metrics(self) -> bytes:
        return b"vllm:num_requests_running 3.0\n"


@pytest.fixture
def engine(tokenizer):
    return MeasuredEngine(tokenizer)


@pytest.fixture
def call(engine):
    """One request to an application made with the given options, mounted where Serve mounts it."""

    def run(method: str, path: str, *, root: str = "", api: Any = None, **options: Any):
        async def send() -> httpx.Response:
            transport = httpx.ASGITransport(create_api(engine, **(api or {})), root_path=root)
            async with httpx.AsyncClient(transport=transport, base_url="http://test") as client:
                return await client.request(method, root + path, **options)

        return asyncio.run(send())

    return run


class TestApiKey:
    API = {"api_keys": [KEY, "sk-two"]}

    @pytest.fixture
    def ask(self, call):
        def run(authorization: str | None, method: str = "GET", path: str = "/v1/models", **more):
            headers = {} if authorization is None else {"Authorization": authorization}
            return call(method, path, api=self.API, headers=headers, **more)

        return run

    @pytest.mark.parametrize("authorization", ["Bearer sk-one", "bearer sk-two", "Bearer  sk-one "])
    def test_each_key_opens(self, ask, authorization):
        assert ask(authorization).status_code == 200

    @pytest.mark.parametrize(
        "authorization",
        [None, "", "Bearer", "Bearer ", "sk-one", "Basic sk-one", "Bearer sk-on", "Bearer sk-one2"],
    )
    def test_everything_else_does_not(self, ask, authorization):
        response = ask(authorization)
        assert "API key" in assert_error(response, 401)
        assert response.json()["error"]["code"] == "invalid_api_key"
        assert response.headers["www-authenticate"] == "Bearer"
        assert response.headers["x-request-id"]

    def test_the_key_is_not_in_the_answer(self, ask):
        assert "sk-wrong" not in ask("Bearer sk-wrong").text

    @pytest.mark.parametrize("root", ["", "/tiny"])
    @pytest.mark.parametrize(
        ("path", "status"),
        [
            ("/health", 200),
            ("/metrics", 200),
            ("/stats", 401),
            ("/version", 401),
            ("/openapi.json", 401),
            ("/v1/models/health", 401),
            ("/metrics/", 401),
            ("/nowhere", 401),
        ],
    )
    def test_only_health_and_metrics_are_open(self, ask, root, path, status):
        assert ask(None, path=path, root=root).status_code == status

    def test_a_request_without_a_key_does_not_reach_the_engine(self, ask, engine):
        body = {"prompt": "Hi", "stream": True}
        assert ask(None, "POST", "/v1/completions", json=body).status_code == 401
        assert engine.requests == []

    def test_every_key_is_compared_in_constant_time(self, ask, monkeypatch):
        compared = []
        original = hmac.compare_digest

        def compare(given: bytes, known: bytes) -> bool:
            compared.append((len(given), len(known)))
            return original(given, known)

        monkeypatch.setattr("deployments.api.api_key.hmac.compare_digest", compare)
        ask("Bearer x")
        ask(f"Bearer {KEY}")
        assert compared == [(32, 32)] * 4

    def test_no_key_is_asked_for_by_default(self, call):
        assert call("GET", "/v1/models").status_code == 200


class TestWhereKeysComeFrom:
    def test_the_environment_and_a_file(self, monkeypatch, tmp_path: Path):
        monkeypatch.setenv("THE_KEY", " sk-env ")
        file = tmp_path / "keys"
        file.write_text("sk-a\n\n  sk-b\n")
        assert load_api_keys("THE_KEY", str(file)) == ["sk-env", "sk-a", "sk-b"]
        assert load_api_keys(None, None) == []

    def test_a_place_without_a_key_is_an_error_not_an_open_api(self, monkeypatch, tmp_path: Path):
        monkeypatch.setenv("EMPTY", "")
        for variable in ("EMPTY", "NEVER_SET_ANYWHERE"):
            with pytest.raises(ApiKeyError, match=f"api_key_env = {variable}"):
                load_api_keys(variable, None)
        empty = tmp_path / "empty"
        empty.write_text("\n \n")
        for file in (empty, tmp_path / "missing"):
            with pytest.raises(ApiKeyError, match=f"api_key_file = {file}"):
                load_api_keys(None, str(file))

    def test_the_arguments_name_the_place_only(self):
        fields = {name for name in AppArgs.model_fields if "key" in name}
        assert fields == {"api_key_env", "api_key_file"}


class TestCors:
    API = {"cors_allow_origins": ["https://app.example"], "api_keys": [KEY]}

    def test_a_preflight_passes_without_a_key(self, call):
        headers = {
            "Origin": "https://app.example",
            "Access-Control-Request-Method": "POST",
            "Access-Control-Request-Headers": "authorization,content-type",
        }
        response = call("OPTIONS", "/v1/chat/completions", api=self.API, headers=headers)
        assert response.status_code == 200
        assert response.headers["access-control-allow-origin"] == "https://app.example"
        assert "authorization" in response.headers["access-control-allow-headers"]

    @pytest.mark.parametrize("stream", [False, True])
    @pytest.mark.parametrize("key", [KEY, "wrong"])
    def test_answers_and_refusals_can_be_read_by_the_page(self, call, stream, key):
        headers = {"Origin": "https://app.example", "Authorization": f"Bearer {key}"}
        body = {"prompt": "Hi", "stream": stream}
        response = call("POST", "/v1/completions", api=self.API, headers=headers, json=body)
        assert response.status_code == (200 if key == KEY else 401)
        assert response.headers["access-control-allow-origin"] == "https://app.example"
        assert "x-request-id" in response.headers["access-control-expose-headers"].lower()

    def test_another_origin_gets_nothing(self, call):
        headers = {"Origin": "https://evil.example", "Authorization": f"Bearer {KEY}"}
        response = call("GET", "/v1/models", api=self.API, headers=headers)
        assert "access-control-allow-origin" not in response.headers

    def test_without_the_option_there_are_no_such_headers(self, call):
        response = call("GET", "/v1/models", headers={"Origin": "https://app.example"})
        assert not any(name.startswith("access-control") for name in response.headers)


class TestTokens:
    def test_a_prompt_and_back(self, call, tokenizer):
        text = "Hello 🦖!\n日本"
        body = call("POST", "/tokenize", json={"prompt": text, "model": MODEL}).json()
        ids = tokenizer.encode(text)
        expected = {"count": len(ids), "max_model_len": 128, "tokens": ids, "token_strs": None}
        assert body == expected
        assert call("POST", "/detokenize", json={"tokens": ids}).json() == {"prompt": text}

    def test_special_tokens_are_text_too(self, call):
        body = call("POST", "/tokenize", json={"prompt": "a<|im_end|>"}).json()
        assert body["tokens"][-1] == 2
        text = call("POST", "/detokenize", json={"tokens": body["tokens"]}).json()["prompt"]
        assert text == "a<|im_end|>"

    def test_a_conversation_has_the_tokens_that_the_engine_gets(self, call, engine):
        body = {"messages": MESSAGES}
        call("POST", "/v1/chat/completions", json=body | {"max_tokens": 3})
        asked = engine.requests[-1].prompt_token_ids
        tokens = call("POST", "/tokenize", json=body).json()["tokens"]
        assert tokens == asked
        shorter = call("POST", "/tokenize", json=body | {"add_generation_prompt": False}).json()
        assert shorter["tokens"] == asked[: shorter["count"]] and shorter["count"] < len(asked)

    def test_the_texts_of_tokens_on_demand(self, call):
        body = call("POST", "/tokenize", json={"prompt": "a b", "return_token_strs": True}).json()
        assert body["token_strs"] == ["a", "Ġb"]

    def test_nothing_to_convert(self, call):
        assert call("POST", "/tokenize", json={"prompt": ""}).json()["tokens"] == []
        assert call("POST", "/detokenize", json={"tokens": []}).json() == {"prompt": ""}

    @pytest.mark.parametrize(
        ("path", "body", "status", "param"),
        [
            ("/tokenize", {}, 400, "prompt"),
            ("/tokenize", {"prompt": "x", "messages": MESSAGES}, 400, "prompt"),
            ("/tokenize", {"prompt": 5}, 400, "prompt"),
            ("/tokenize", {"prompt": "x", "model": "gpt-5"}, 404, "model"),
            ("/tokenize", {"messages": []}, 400, "messages"),
            ("/tokenize", {"prompt": "\ud800"}, 400, "prompt"),
            ("/detokenize", {}, 400, "tokens"),
            ("/detokenize", {"tokens": [49152]}, 400, "tokens"),
            ("/detokenize", {"tokens": [-1]}, 400, "tokens"),
            ("/detokenize", {"tokens": ["5"]}, 400, "tokens"),
            ("/detokenize", {"tokens": [5], "model": "gpt-5"}, 404, "model"),
        ],
    )
    def test_bad_bodies(self, call, path, body, status, param):
        content, headers = json.dumps(body), {"Content-Type": "application/json"}
        assert_error(call("POST", path, content=content, headers=headers), status, param)


class TestPromptBatches:
    PROMPTS = ["Hi", "Hi there", "Once upon a time"]

    def test_a_stream_has_the_choices_of_all_prompts(self, call, engine, tokenizer):
        ids = [tokenizer.encode(prompt) for prompt in self.PROMPTS]
        for prompt in (self.PROMPTS, ids):
            body = {
                "prompt": prompt,
                "max_tokens": 50,
                "n": 2,
                "stream": True,
                "stream_options": {"include_usage": True},
                "return_token_ids": True,
            }
            *chunks, last, done = events(call("POST", "/v1/completions", json=body))
            assert done == "[DONE]"
            texts, prompts, ends = [""] * 6, [None] * 6, [None] * 6
            for chunk in chunks:
                [choice] = chunk["choices"]
                index = choice["index"]
                assert ends[index] is None, "a chunk after the last of its choice"
                texts[index] += choice["text"]
                prompts[index] = prompts[index] or choice.get("prompt_token_ids")
                ends[index] = choice["finish_reason"]
            assert texts == [engine.text] * 6
            assert ends == ["stop"] * 6
            # Prompt after prompt, each with its n choices.
            assert prompts == [prompt for prompt in ids for _ in range(2)]
            assert last["usage"]["prompt_tokens"] == sum(map(len, ids))
            assert len(engine.requests) % 6 == 0

    def test_one_bad_prompt_refuses_the_batch(self, call, engine):
        for prompt in (["Hi", ""], [[5], [49152]], [[5], []], [[1] * 128, [5]], []):
            response = call("POST", "/v1/completions", json={"prompt": prompt, "max_tokens": 1})
            assert_error(response, 400, "prompt")
        assert engine.requests == []


def test_the_version_is_that_of_the_project(call):
    project = tomllib.loads((Path(__file__).parents[2] / "pyproject.toml").read_text())
    assert call("GET", "/version").json() == {"version": project["project"]["version"]}


def test_metrics_are_prometheus_text(call):
    response = call("GET", "/metrics")
    assert response.headers["content-type"].startswith("text/plain; version=0.0.4")
    assert response.text == "vllm:num_requests_running 3.0\n"


def test_keys_and_cors_behind_serves_proxy(
    http_port: int,
    tiny: Tiny,
    tmp_path: Path,  # noqa: F811
) -> None:
    file = tmp_path / "keys"
    file.write_text(f"{KEY}\n")
    options = {"api_key_file": str(file), "cors_allow_origins": ["https://app.example"]}
    with application("guarded", http_port, tiny.args() | options) as app:
        assert app.http.get("/metrics").status_code == 200
        assert_error(app.http.get("/stats"), 401)
        assert_error(app.http.post("/v1/completions", json={"prompt": "Hi"}), 401)
        headers = {"Authorization": f"Bearer {KEY}", "Origin": "https://app.example"}
        body = {"prompt": "Hi", "temperature": 0, "max_tokens": 3, "stream": True}
        answer = app.http.post("/v1/completions", json=body, headers=headers)
        assert answer.status_code == 200
        assert answer.headers["access-control-allow-origin"] == "https://app.example"
        preflight = {"Origin": "https://app.example", "Access-Control-Request-Method": "POST"}
        assert app.http.options("/v1/completions", headers=preflight).status_code == 200
        app.http.headers["Authorization"] = f"Bearer {KEY}"
        assert app.stats()["requests"] == {"running": 0, "waiting": 0}


class TestTooLarge:
    def test_a_text_that_cannot_fit_is_not_even_tokenised(self, call, engine, monkeypatch):
        monkeypatch.setattr(engine, "tokenizer", None)
        text = "a" * (engine.max_model_len * engine.max_token_chars + 1)
        response = call("POST", "/v1/completions", json={"prompt": text})
        assert "10369 characters" in assert_error(response, 400, "prompt")
        assert response.json()["error"]["code"] == "context_length_exceeded"

    @pytest.mark.parametrize("path", ["/v1/completions", "/v1/chat/completions", "/tokenize"])
    def test_a_large_body_is_refused(self, call, engine, path):
        body = json.dumps({"prompt": "a" * 2000}).encode()
        response = call("POST", path, api={"max_body_bytes": 1000}, content=body)
        assert "max_body_bytes" in assert_error(response, 413)
        assert engine.requests == []

    def test_a_large_body_that_does_not_say_so_is_refused(self, call):
        async def pieces():
            for _ in range(20):
                yield b" " * 100

        response = call("POST", "/tokenize", api={"max_body_bytes": 1000}, content=pieces())
        assert "max_body_bytes" in assert_error(response, 413)

    def test_a_flood_of_headers_is_refused(self, call):
        few, many = ({f"X-{i}": "1" for i in range(n)} for n in (200, 300))
        assert call("GET", "/v1/models", headers=few).status_code == 200
        response = call("GET", "/v1/models", headers=many)
        assert "this server reads at most 256" in assert_error(response, 431)

    def test_a_body_of_just_that_size_is_read(self, call):
        body = json.dumps({"prompt": "Hi"}).encode()
        headers = {"Content-Type": "application/json"}
        api = {"max_body_bytes": len(body)}
        response = call("POST", "/tokenize", api=api, content=body, headers=headers)
        assert response.status_code == 200
