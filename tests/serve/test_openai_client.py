"""The `openai` package, sync and async, whole and streaming, against the running application."""

from __future__ import annotations

import asyncio
from collections.abc import Iterator

import openai
import pytest

from tests.serve.application import Application, application
from tests.serve.tiny_pair import Tiny, prompt_of

MESSAGES = [{"role": "user", "content": "Hello!"}]


@pytest.fixture(scope="module")
def app(http_port: int, tiny: Tiny) -> Iterator[Application]:
    with application("clients", http_port, tiny.args()) as app:
        yield app


def options(app: Application) -> dict[str, object]:
    return {"base_url": f"{app.base_url}/v1", "api_key": "none", "max_retries": 0}


def expected_text(tiny: Tiny, prompt: list[int]) -> str:
    return tiny.tokenizer.decode(tiny.continuation(prompt, 24), skip_special_tokens=True)


def chat_prompt(tiny: Tiny) -> list[int]:
    return tiny.tokenizer.apply_chat_template(
        MESSAGES, add_generation_prompt=True, return_dict=False
    )


def test_the_sync_client(app: Application, tiny: Tiny) -> None:
    with openai.OpenAI(**options(app)) as client:
        [model] = client.models.list()
        limits = {"model": model.id, "max_tokens": 24, "temperature": 0}
        completion = client.completions.create(prompt=prompt_of(9), **limits)
        assert completion.choices[0].text == expected_text(tiny, prompt_of(9))
        assert completion.usage.completion_tokens == 24
        stream = client.chat.completions.create(messages=MESSAGES, stream=True, **limits)
        pieces = [chunk.choices[0].delta.content or "" for chunk in stream]
        assert "".join(pieces) == expected_text(tiny, chat_prompt(tiny))
        assert len(pieces) > 2
        with pytest.raises(openai.BadRequestError):
            client.completions.create(prompt="Hi", n=0, model=model.id)


def test_the_async_client_with_several_requests_at_once(app: Application, tiny: Tiny) -> None:
    limits = {"model": "tiny", "max_tokens": 24, "temperature": 0}

    async def run() -> tuple[list[str], str]:
        async with openai.AsyncOpenAI(**options(app)) as client:

            async def one(length: int) -> str:
                text = ""
                stream = await client.completions.create(
                    prompt=prompt_of(length), stream=True, **limits
                )
                async for chunk in stream:
                    text += chunk.choices[0].text
                return text

            texts = await asyncio.gather(*map(one, range(5, 11)))
            answer = await client.chat.completions.create(messages=MESSAGES, **limits)
            return list(texts), answer.choices[0].message.content

    texts, answer = asyncio.run(run())
    assert texts == [expected_text(tiny, prompt_of(length)) for length in range(5, 11)]
    assert answer == expected_text(tiny, chat_prompt(tiny))
