"""API keys: where they come from, and who may pass.

A key is never part of the application's arguments: Ray logs those and shows them in its dashboard.
The arguments name the place where the Router finds it.
"""

from __future__ import annotations

import hashlib
import hmac
import os
from collections.abc import Sequence
from pathlib import Path

from starlette.datastructures import Headers
from starlette.types import ASGIApp, Receive, Scope, Send

from deployments.api.error_responses import error_response
from deployments.api.errors import Unauthorized

OPEN_PATHS = frozenset({"/health", "/metrics"})  # load balancers and Prometheus have no key


class ApiKeyError(Exception):
    """The place that should hold an API key does not."""


def load_api_keys(variable: str | None, file: str | None) -> list[str]:
    """The keys of an environment variable (one key) and of a file (one a line).

    Raises:
        ApiKeyError: a place is named but holds no key. An API that was meant to be closed must
            not come up open.
    """
    keys: list[str] = []
    if variable is not None:
        key = os.environ.get(variable, "").strip()
        if not key:
            raise ApiKeyError(
                f"api_key_env = {variable}: the Router's process has no such variable, or it is "
                "empty; set it before `ray start` on its node, or use api_key_file"
            )
        keys.append(key)
    if file is not None:
        try:
            lines = Path(file).read_text(encoding="utf-8").splitlines()
        except (OSError, UnicodeDecodeError) as error:
            raise ApiKeyError(f"api_key_file = {file} cannot be read: {error}") from error
        found = [line.strip() for line in lines if line.strip()]
        if not found:
            raise ApiKeyError(f"api_key_file = {file} holds no key: write one a line")
        keys += found
    return keys


class RequireApiKey:
    """ASGI middleware: `Authorization: Bearer <key>` or 401.

    Open to everybody are OPEN_PATHS, and OPTIONS, which browsers send before a request that carries
    a key.
    """

    def __init__(self, app: ASGIApp, api_keys: Sequence[str]) -> None:
        self.app = app
        self._digests = [digest(key) for key in api_keys]

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http" or scope["method"] == "OPTIONS" or self._open(scope):
            await self.app(scope, receive, send)
            return
        scheme, _, key = Headers(scope=scope).get("authorization", "").partition(" ")
        if scheme.lower() == "bearer" and self._known(key.strip()):
            await self.app(scope, receive, send)
            return
        message = (
            "You did not provide an API key: send it as `Authorization: Bearer <key>`."
            if not key
            else "Incorrect API key provided."
        )
        await error_response(Unauthorized(message))(scope, receive, send)

    def _open(self, scope: Scope) -> bool:
        return scope["path"].removeprefix(scope.get("root_path", "")) in OPEN_PATHS

    def _known(self, key: str) -> bool:
        """Takes the same time for every wrong key: digests of one length, all of them compared."""
        given = digest(key)
        return sum([hmac.compare_digest(given, known) for known in self._digests]) > 0


def digest(key: str) -> bytes:
    return hashlib.sha256(key.encode("utf-8", "surrogateescape")).digest()
