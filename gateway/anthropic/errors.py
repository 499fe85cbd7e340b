"""Errors as Anthropic's API shapes them."""

from __future__ import annotations

from typing import Any, Final

from starlette.responses import JSONResponse

from gateway.anthropic.requests import NAMES, NO_THREADS
from gateway.openai import errors as openai_errors
from gateway.openai.translation import renamed
from outrider.errors import OutriderError, PromptTooLongError, shortened

_TYPES: Final = {
    400: "invalid_request_error",
    401: "authentication_error",
    404: "not_found_error",
    413: "request_too_large",
    415: "invalid_request_error",
    429: "rate_limit_error",
    503: "overloaded_error",
    504: "timeout_error",
}
"""By status; any other is an `api_error`."""


def error_body(error: OutriderError) -> dict[str, Any]:
    """{"type": "error", "error": {type, message}}, and details where clients act on them."""
    status = openai_errors.error_response(error).status_code
    message = renamed(error, NAMES).message
    if isinstance(error, PromptTooLongError):
        message = f"prompt is too long: {message}"  # by which clients know it
    fault: dict[str, Any] = {"type": _TYPES.get(status, "api_error"), "message": shortened(message)}
    if error.reason == NO_THREADS:
        fault["details"] = {"error_code": NO_THREADS.lower()}
    return {"type": "error", "error": fault}


def error_response(error: OutriderError) -> JSONResponse:
    """Return the body with its status and headers, which are those of OpenAI's API."""
    answer = openai_errors.error_response(error)
    headers = {
        name: value
        for name, value in answer.headers.items()
        if name in ("retry-after", "www-authenticate")
    }
    return JSONResponse(error_body(error), answer.status_code, headers)
