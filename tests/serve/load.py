"""Constant load on an application, whose every answer is compared with what it must be."""

from __future__ import annotations

import asyncio
import json
import threading

import httpx

from tests.serve.application import Application
from tests.serve.tiny_pair import prompt_of


class Load:
    """One stream after the other for every prompt at once, until the context is left.

    Args:
        app: under load.
        expected: length of a prompt to what must follow it.

    Attributes:
        finished: streams that were whole.
        wrong: what went wrong with the others.
    """

    def __init__(self, app: Application, expected: dict[int, list[int]]) -> None:
        self.app = app
        self.expected = expected
        self.finished = 0
        self.wrong: list[str] = []
        self._stop = threading.Event()
        self._thread = threading.Thread(target=lambda: asyncio.run(self._run()))

    def __enter__(self) -> Load:
        self._thread.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._stop.set()
        self._thread.join()

    async def _run(self) -> None:
        async with httpx.AsyncClient(base_url=self.app.base_url, timeout=300) as client:
            await asyncio.gather(*(self._repeat(client, n) for n in self.expected))

    async def _repeat(self, client: httpx.AsyncClient, length: int) -> None:
        while not self._stop.is_set():
            try:
                ids = await self._stream(client, length)
            except Exception as error:
                self.wrong.append(repr(error))
            else:
                self.finished += 1
                if ids != self.expected[length]:
                    self.wrong.append(difference(length, ids, self.expected[length]))

    async def _stream(self, client: httpx.AsyncClient, length: int) -> list[int]:
        body = {
            "prompt": prompt_of(length),
            "max_tokens": len(self.expected[length]),
            "temperature": 0,
            "ignore_eos": True,
            "stream": True,
            "return_token_ids": True,
        }
        ids: list[int] = []
        async with client.stream("POST", "/v1/completions", json=body) as response:
            if response.is_error:
                raise AssertionError(f"{response.status_code}: {(await response.aread()).decode()}")
            async for line in response.aiter_lines():
                if line.startswith("data: {"):
                    ids += json.loads(line.removeprefix("data: "))["choices"][0]["token_ids"]
        return ids


def difference(length: int, ids: list[int], expected: list[int]) -> str:
    pairs = zip(ids, expected, strict=False)
    place = next((i for i, (got, wanted) in enumerate(pairs) if got != wanted), len(ids))
    return (
        f"prompt {length}: {len(ids)} tokens, from {place} on {ids[place : place + 4]} "
        f"for {expected[place : place + 4]}"
    )
