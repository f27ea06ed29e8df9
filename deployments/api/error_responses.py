"""Whatever goes wrong with a request becomes the error object of the OpenAI API."""

from __future__ import annotations

import json
import logging

from fastapi import Request
from fastapi.exceptions import RequestValidationError
from fastapi.responses import Response
from starlette.exceptions import HTTPException
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from deployments.api.errors import ApiError, InternalError, InvalidRequest

log = logging.getLogger(__name__)


async def answer_error(request: Request, error: Exception) -> Response:
    assert isinstance(error, ApiError)
    return error_response(error)


async def answer_validation_error(request: Request, error: Exception) -> Response:
    assert isinstance(error, RequestValidationError)
    problems: dict[str, None] = {}
    params: list[str] = []
    for problem in error.errors():
        # Without "body" and the names pydantic gives to the members of a union.
        location = [
            str(part)
            for part in problem["loc"][1:]
            if isinstance(part, int) or (part.isidentifier() and part != "str")
        ]
        message = problem["msg"].removeprefix("Value error, ")
        if problem["type"] == "json_invalid":
            problems[f"The body is not valid JSON: {problem['ctx']['error']}"] = None
        elif location:
            params.append(location[0])
            problems[f"{'.'.join(location)}: {message}"] = None
        else:
            problems[f"The body must be a JSON object sent as application/json: {message}"] = None
    param = params[0] if params else None
    return error_response(InvalidRequest("; ".join(problems), param=param))


async def answer_http_exception(request: Request, error: Exception) -> Response:
    """Unknown routes, wrong methods, unreadable bodies."""
    assert isinstance(error, HTTPException)
    message = f"{request.method} {request.url.path}: {error.detail}"
    response = error_response(InvalidRequest(message))
    response.status_code = error.status_code
    response.headers.update(error.headers or {})
    return response


def error_response(error: ApiError) -> Response:
    # ASCII, because a message may quote text that UTF-8 can't carry.
    return Response(
        json.dumps(error.body()), error.status, error.headers(), media_type="application/json"
    )


EXCEPTION_HANDLERS = {
    ApiError: answer_error,
    RequestValidationError: answer_validation_error,
    HTTPException: answer_http_exception,
}


class InternalErrors:
    """ASGI middleware: a failure nobody expected is logged and answered with an error object."""

    def __init__(self, app: ASGIApp) -> None:
        self.app = app

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        started = False

        async def watched(message: Message) -> None:
            nonlocal started
            started = True
            await send(message)

        try:
            await self.app(scope, receive, watched)
        except Exception:
            if started or scope["type"] != "http":
                raise
            log.exception("%s %s failed", scope["method"], scope["path"])
            error = InternalError("The server failed; its log has the details.")
            await error_response(error)(scope, receive, send)
