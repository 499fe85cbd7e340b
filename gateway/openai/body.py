"""Reads the body of a request, or refuses it before it does work."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from typing import Final, TypeVar

from starlette.requests import Request

from gateway.openai.errors import BodyTooLargeError, UnsupportedMediaError

_LARGE_BYTES: Final = 2**17
"""From here on a body of many small objects takes tens of milliseconds."""
T = TypeVar("T")


async def read_as(request: Request, max_bytes: int, make: Callable[[bytes], T]) -> T:
    """Return what `make` does of a JSON body; a large one has a thread, so that others go on.

    Raises what `read_body` and `make` raise.
    """
    body = await read_body(request, max_bytes)
    return make(body) if len(body) < _LARGE_BYTES else await asyncio.to_thread(make, body)


async def read_body(request: Request, max_bytes: int) -> bytes:
    """Return the bytes of a JSON body.

    Raises `UnsupportedMediaError`, and `BodyTooLargeError` as soon as it is known to be too large.
    """
    _check_media(request)
    body = bytearray()
    declared = request.headers.get("content-length", "")
    too_large = declared.isdigit() and int(declared) > max_bytes
    if not too_large:
        async for piece in request.stream():
            body += piece
            if too_large := len(body) > max_bytes:
                break
    if too_large:
        raise BodyTooLargeError(f"The body is larger than {max_bytes} bytes.")
    return bytes(body)


def _check_media(request: Request) -> None:
    """Raise `UnsupportedMediaError` for what is not plain JSON.

    A browser lets any page send forms, text and untyped bytes to any server, and asks the server
    first (CORS) only before it sends JSON. A program that is no browser may leave the type out.
    """
    headers = request.headers
    encoding = headers.get("content-encoding", "identity")
    if encoding.lower() != "identity":
        raise UnsupportedMediaError(
            f"The body has Content-Encoding {encoding}; send it uncompressed.",
            param="content-encoding",
        )
    media = headers.get("content-type", "").partition(";")[0].strip().lower()
    if media == "application/json" or (not media and "origin" not in headers):
        return
    raise UnsupportedMediaError(
        f"The body is {media or 'of no type'}; send JSON with Content-Type: application/json.",
        param="content-type",
    )
