"""Answers whose client may go away before they are complete.

Both kinds watch the connection while they wait for the engine, and everything that drives one
engine generator runs in one task: cancelling it closes the generator at once, wherever it waits.
"""

from __future__ import annotations

import asyncio
import contextlib
import json
import logging
from collections.abc import AsyncGenerator, Coroutine
from typing import Any, TypeVar

from starlette.responses import Response
from starlette.types import Receive, Scope, Send

from deployments.api.errors import ApiError, InternalError

T = TypeVar("T")
log = logging.getLogger(__name__)


class ClientGone(Exception):
    """The client closed the connection; there is nobody to answer."""


async def unless_client_leaves(receive: Receive, work: Coroutine[Any, Any, T]) -> T:
    """Runs `work`, cancels it as soon as the client goes away.

    Args:
        receive: of a request whose body has been read.
        work: whatever the client waits for.

    Raises:
        ClientGone: after `work` has been cancelled and has cleaned up.
    """
    working = asyncio.create_task(work)
    watching = asyncio.create_task(client_leaves(receive))
    try:
        await asyncio.wait({working, watching}, return_when=asyncio.FIRST_COMPLETED)
        if not working.done():
            raise ClientGone
        return working.result()
    finally:
        working.cancel()
        watching.cancel()
        await asyncio.gather(working, watching, return_exceptions=True)


async def client_leaves(receive: Receive) -> None:
    while (await receive())["type"] != "http.disconnect":
        pass


class EventStream(Response):
    """Server-sent events: `data: <item>` per item, then `data: [DONE]`.

    The first item is awaited before the response starts, so that whatever fails until then is an
    ordinary error response with its own status. A later failure is an event with the error object,
    after which the stream ends without `[DONE]`.

    Args:
        items: JSON texts; closed when the client has gone or the stream has ended.
    """

    media_type = "text/event-stream"

    def __init__(self, items: AsyncGenerator[str, None]) -> None:
        super().__init__(headers={"Cache-Control": "no-cache", "X-Accel-Buffering": "no"})
        del self.headers["content-length"]
        self._items = items

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        with contextlib.suppress(ClientGone):
            await unless_client_leaves(receive, self._stream(send))

    async def _stream(self, send: Send) -> None:
        async with contextlib.aclosing(self._items) as items:
            first = await anext(items)
            await send(
                {
                    "type": "http.response.start",
                    "status": self.status_code,
                    "headers": self.raw_headers,
                }
            )
            try:
                await send_event(send, first)
                async for item in items:
                    await send_event(send, item)
                await send_event(send, "[DONE]")
            except ApiError as error:
                await send_event(send, json.dumps(error.body()))
            except Exception:
                log.exception("a stream failed after it had started")
                await send_event(send, json.dumps(InternalError("The server failed.").body()))
        await send({"type": "http.response.body", "body": b"", "more_body": False})


async def send_event(send: Send, data: str) -> None:
    body = f"data: {data}\n\n".encode()
    await send({"type": "http.response.body", "body": body, "more_body": True})
