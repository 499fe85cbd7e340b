"""Errors as OpenAI's API shapes them: one table from `OutriderError` to HTTP."""

from __future__ import annotations

import logging
import math
from dataclasses import dataclass

from starlette.responses import JSONResponse

from outrider.errors import (
    CapacityError,
    DeadlineError,
    InternalError,
    InvalidRequestError,
    ModelNotFoundError,
    OutriderError,
    PromptTooLongError,
    UnauthenticatedError,
    UnavailableError,
    shortened,
)

_log = logging.getLogger(__name__)


class BodyTooLargeError(InvalidRequestError):
    """The request's body exceeds the gateway's limit."""

    reason = "BODY_TOO_LARGE"


class UnsupportedMediaError(InvalidRequestError):
    """The request's body is not plain JSON."""

    reason = "UNSUPPORTED_MEDIA"


class NotServedError(InvalidRequestError):
    """The path is one of servers for other kinds of models."""

    reason = "NOT_SERVED"


@dataclass(frozen=True, slots=True)
class _Shape:
    status: int
    type: str
    code: str | None = None


# The nearest class of an error's ancestry counts.
_TABLE: dict[type[OutriderError], _Shape] = {
    InvalidRequestError: _Shape(400, "invalid_request_error"),
    PromptTooLongError: _Shape(400, "invalid_request_error", "context_length_exceeded"),
    BodyTooLargeError: _Shape(413, "invalid_request_error", "request_too_large"),
    UnsupportedMediaError: _Shape(415, "invalid_request_error", "unsupported_media_type"),
    NotServedError: _Shape(404, "invalid_request_error", "not_served"),
    UnauthenticatedError: _Shape(401, "authentication_error", "invalid_api_key"),
    ModelNotFoundError: _Shape(404, "invalid_request_error", "model_not_found"),
    CapacityError: _Shape(429, "rate_limit_error", "rate_limit_exceeded"),
    UnavailableError: _Shape(503, "service_unavailable_error", "service_unavailable"),
    DeadlineError: _Shape(504, "timeout_error", "timeout"),
    OutriderError: _Shape(500, "server_error", "internal_error"),
}


def public_error(error: Exception) -> OutriderError:
    """Return the error that the client may see, and log one that is no `OutriderError`."""
    if isinstance(error, OutriderError):
        return error
    _log.error("unexpected error in a request", exc_info=error)
    return InternalError("Internal error; the gateway's log has the details.")


def error_body(error: OutriderError) -> dict[str, object]:
    """{"error": {message, type, param, code}}, the first and the third cut if they are long."""
    shape = _shape(error)
    param = "model" if isinstance(error, ModelNotFoundError) else getattr(error, "param", None)
    return {
        "error": {
            "message": shortened(error.message),
            "type": shape.type,
            "param": None if param is None else shortened(param),
            "code": shape.code,
        }
    }


def error_response(error: OutriderError) -> JSONResponse:
    """Return the body with its status, and Retry-After in whole seconds where it may help."""
    headers = {}
    if error.retry_after_s is not None:
        headers["Retry-After"] = str(max(1, math.ceil(error.retry_after_s)))
    if isinstance(error, UnauthenticatedError):
        headers["WWW-Authenticate"] = "Bearer"
    return JSONResponse(error_body(error), _shape(error).status, headers)


def _shape(error: OutriderError) -> _Shape:
    return next(_TABLE[cls] for cls in type(error).__mro__ if cls in _TABLE)
