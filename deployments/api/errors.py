"""Errors that clients see: an HTTP status and the error object of the OpenAI API.

Engines raise them as well; they keep their fields when they are pickled on the way.
"""

from __future__ import annotations

from typing import Any, ClassVar


class ApiError(Exception):
    """An answer that is not a completion.

    Args:
        message: for the person who wrote the request: what is wrong and what to do.
        param: the request field to change, if there is one.
        retry_after: seconds after which the same request may succeed.
    """

    status: ClassVar[int]
    type: ClassVar[str]
    code: ClassVar[str | None] = None

    def __init__(
        self, message: str, *, param: str | None = None, retry_after: int | None = None
    ) -> None:
        super().__init__(message)
        self.message = message
        self.param = param
        self.retry_after = retry_after

    def body(self) -> dict[str, Any]:
        """`{"error": {"message", "type", "param", "code"}}`"""
        return {
            "error": {
                "message": self.message,
                "type": self.type,
                "param": self.param,
                "code": self.code,
            }
        }

    def headers(self) -> dict[str, str]:
        return {} if self.retry_after is None else {"Retry-After": str(self.retry_after)}


class InvalidRequest(ApiError):
    """The request can't be served as it stands."""

    status = 400
    type = "invalid_request_error"


class ContextLengthExceeded(InvalidRequest):
    """Prompt and requested output don't fit into the context."""

    code = "context_length_exceeded"


class Unauthorized(ApiError):
    """No API key, or none that is known here."""

    status = 401
    type = "invalid_request_error"
    code = "invalid_api_key"

    def headers(self) -> dict[str, str]:
        return super().headers() | {"WWW-Authenticate": "Bearer"}


class ModelNotFound(ApiError):
    """Another model is served here."""

    status = 404
    type = "invalid_request_error"
    code = "model_not_found"


class RequestTimeout(ApiError):
    """The request was not done by its deadline."""

    status = 408
    type = "timeout_error"
    code = "request_timeout"


class BodyTooLarge(ApiError):
    """More bytes than this server reads."""

    status = 413
    type = "invalid_request_error"

    def __init__(self, max_bytes: int) -> None:
        super().__init__(
            f"The body is larger than {max_bytes} bytes, the most that this server reads "
            "(max_body_bytes)."
        )


class TooManyHeaders(ApiError):
    """More than any client needs."""

    status = 431
    type = "invalid_request_error"

    def __init__(self, number: int, most: int) -> None:
        super().__init__(f"The request has {number} headers; this server reads at most {most}.")


class QueueFull(ApiError):
    """Too many requests wait already."""

    status = 429
    type = "rate_limit_error"
    code = "queue_full"

    def __init__(self, message: str, *, param: str | None = None, retry_after: int = 1) -> None:
        super().__init__(message, param=param, retry_after=retry_after)


class InternalError(ApiError):
    """A fault of the server; its log has the details."""

    status = 500
    type = "server_error"
    code = "internal_error"


class NotReady(ApiError):
    """The models are being loaded, or a replica is being replaced."""

    status = 503
    type = "service_unavailable_error"
    code = "not_ready"

    def __init__(self, message: str, *, param: str | None = None, retry_after: int = 5) -> None:
        super().__init__(message, param=param, retry_after=retry_after)
