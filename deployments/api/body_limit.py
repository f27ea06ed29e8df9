"""Bodies that are too large are refused before they are parsed."""

from __future__ import annotations

from starlette.datastructures import Headers
from starlette.exceptions import HTTPException
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from deployments.api.error_responses import error_response
from deployments.api.errors import BodyTooLarge

MAX_BODY_BYTES = 4 << 20  # unless the configuration says otherwise


class BodyLimit:
    """ASGI middleware: status 413 and the error object for more than `max_bytes`.

    Starlette's own answers with plain text, which OpenAI clients cannot read.
    """

    def __init__(self, app: ASGIApp, max_bytes: int) -> None:
        self.app = app
        self.max_bytes = max_bytes

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http":
            await self.app(scope, receive, send)
            return
        announced = Headers(scope=scope).get("content-length", "")
        if announced.isdecimal() and int(announced) > self.max_bytes:
            await error_response(BodyTooLarge(self.max_bytes))(scope, receive, send)
            return
        received = 0

        async def counted() -> Message:
            nonlocal received
            message = await receive()
            received += len(message.get("body", b""))
            if received > self.max_bytes:
                # FastAPI reads the body and passes on no exception but this one.
                error = BodyTooLarge(self.max_bytes)
                raise HTTPException(error.status, error.message)
            return message

        await self.app(scope, counted, send)
