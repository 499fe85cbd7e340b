"""The exception tree, translated at each boundary: rpc/status.py and gateway/openai/errors.py."""

from __future__ import annotations

import contextlib
import sys
from typing import TextIO


class OutriderError(Exception):
    """Base of all errors that Outrider raises on purpose.

    `reason` is stable and machine-readable (`ErrorInfo.reason`); `message` says what to do.
    """

    reason = "INTERNAL"
    retry_after_s: float | None = None
    """The same request may succeed after so long; None: it has to change, or nobody knows."""

    def __init__(self, message: str, *, reason: str | None = None) -> None:
        super().__init__(message)
        self.message = message
        if reason is not None:
            self.reason = reason


class InvalidRequestError(OutriderError):
    """A field of the request is wrong. `param` is the field's name as the client wrote it."""

    reason = "INVALID_REQUEST"

    def __init__(
        self, message: str, *, param: str | None = None, reason: str | None = None
    ) -> None:
        super().__init__(message, reason=reason)
        self.param = param


class PromptTooLongError(InvalidRequestError):
    """Prompt and requested tokens exceed the context length."""

    reason = "PROMPT_TOO_LONG"


class ModelNotFoundError(OutriderError):
    """Nobody serves a model of this name."""

    reason = "MODEL_NOT_FOUND"


class UnauthenticatedError(OutriderError):
    """The API key is missing or wrong."""

    reason = "UNAUTHENTICATED"


class CapacityError(OutriderError):
    """A bounded queue is full. Try again after `retry_after_s` seconds."""

    reason = "OVERLOADED"

    def __init__(self, message: str, *, retry_after_s: float = 1.0) -> None:
        super().__init__(message)
        self.retry_after_s = retry_after_s


class UnavailableError(OutriderError):
    """The service is starting, draining or out of reach."""

    reason = "UNAVAILABLE"
    retry_after_s = 1.0


class DeadlineError(OutriderError):
    """The request's deadline passed."""

    reason = "DEADLINE_EXCEEDED"


class ProposerRefusedError(OutriderError):
    """A proposer's Hello does not fit this scorer."""

    reason = "PROPOSER_REFUSED"


class UnsupportedModelError(OutriderError):
    """The model cannot be served exactly by this engine; the message says why."""

    reason = "UNSUPPORTED_MODEL"


class ConfigError(OutriderError):
    """A flag, file or port is wrong."""

    reason = "BAD_CONFIG"


class InternalError(OutriderError):
    """A bug in Outrider."""

    reason = "INTERNAL"


def one_line(text: str) -> str:
    """Return `text` as one line without control characters, whoever wrote it."""
    return "".join(c for c in " ".join(text.split()) if c.isprintable())


def shortened(text: str, max_bytes: int = 1000) -> str:
    """Return `text`, cut if it is longer in UTF-8: what it quotes may be of any length.

    gRPC sends a message twice, escaped and in base64, and replaces a status above 8 KiB.
    """
    encoded = text.encode(errors="replace")
    if len(encoded) <= max_bytes:
        return text
    return f"{encoded[:max_bytes].decode(errors='ignore')}..."


def say(line: str, stream: TextIO | None = None) -> None:
    """Write a line on `stream`, stderr unless given.

    A line that cannot be written is lost, and a process that serves goes on: the disk is full, the
    reader is gone, the stream is closed or its encoding lacks a character.
    """
    stream = stream or sys.stderr
    if stream is not None:  # None: stderr was closed at the start; `print` would write on stdout
        with contextlib.suppress(OSError, ValueError):
            print(line, file=stream, flush=True)


def refuse(name: str, error: OutriderError) -> int:
    """Print one line on stderr that says why a process does not start; return its exit code."""
    say(f"{name}: {one_line(error.message)}")
    return 2


def fail(name: str, error: OutriderError) -> int:
    """Print one line on stderr that says why a command ends; return its exit code.

    It is 2 for a wrong set-up, as of `refuse`, and 1 for what went wrong later.
    """
    code = refuse(name, error)
    return code if isinstance(error, ConfigError) else 1
