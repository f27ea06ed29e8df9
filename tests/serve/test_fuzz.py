"""Whatever body is sent, the answer is a completion or the client's error, never the server's."""

from __future__ import annotations

import asyncio
import collections
import json
from typing import Any

import httpx
import pytest

from deployments.api.openai_api import create_api
from tests.serve.application import application, idle
from tests.serve.fuzz import Fuzzer
from tests.serve.test_openai_api import FakeEngine
from tests.serve.tiny_pair import Tiny, prompt_of

PATHS = ("/v1/completions", "/v1/chat/completions", "/tokenize", "/detokenize")
HEADERS = {"Content-Type": "application/json"}


def check(answer: httpx.Response, body: bytes) -> None:
    assert answer.status_code < 500, (answer.text, body)
    if answer.status_code >= 400:
        error = answer.json()["error"]
        assert error["message"] and error["type"] == "invalid_request_error", body
    else:
        assert '"error"' not in answer.text, (answer.text, body)


@pytest.mark.parametrize("path", PATHS)
def test_two_thousand_bodies_find_no_fault_of_the_api(tokenizer: Any, path: str) -> None:
    engine = FakeEngine(tokenizer)
    app = create_api(engine)
    fuzzer = Fuzzer(app.openapi(), seed=0)
    bodies = [json.dumps(fuzzer.body(path)).encode() for _ in range(500)]
    statuses: collections.Counter[int] = collections.Counter()

    async def run() -> None:
        transport = httpx.ASGITransport(app, raise_app_exceptions=False)
        async with httpx.AsyncClient(transport=transport, base_url="http://test") as client:
            for body in bodies:
                answer = await client.post(path, content=body, headers=HEADERS)
                check(answer, body)
                statuses[answer.status_code] += 1

    asyncio.run(run())
    # A fuzz that is always refused, or never, finds nothing.
    assert statuses[200] >= 10
    assert statuses[400] >= 50


def test_nor_of_the_running_application(http_port: int, tiny: Tiny) -> None:
    with application("fuzzed", http_port, tiny.args()) as app:
        fuzzer = Fuzzer(app.http.get("/openapi.json").json(), seed=1, wrong=0.02)
        served = 0
        for turn in range(160):
            path = PATHS[turn % 2]
            made = fuzzer.body(path)
            if isinstance(made, dict):  # without a limit an output may fill the context
                made.setdefault("max_tokens", 4)
            body = json.dumps(made).encode()
            answer = app.http.post(path, content=body, headers=HEADERS)
            check(answer, body)
            served += answer.status_code == 200
        assert served >= 10
        app.wait_until(idle, 10)
        assert app.token_ids(prompt_of(9), max_tokens=8) == tiny.continuation(prompt_of(9), 8)
