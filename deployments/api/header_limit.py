"""Requests with a flood of headers are refused before anything looks at them."""

from __future__ import annotations

from starlette.types import ASGIApp, Receive, Scope, Send

from deployments.api.error_responses import error_response
from deployments.api.errors import TooManyHeaders

MAX_HEADERS = 256  # as in vLLM; how long they may be is limited by Serve's proxy


class HeaderLimit:
    """ASGI middleware: status 431 and the error object for more than `MAX_HEADERS`."""

    def __init__(self, app: ASGIApp) -> None:
        self.app = app

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] == "http" and len(scope["headers"]) > MAX_HEADERS:
            error = TooManyHeaders(len(scope["headers"]), MAX_HEADERS)
            await error_response(error)(scope, receive, send)
            return
        await self.app(scope, receive, send)
