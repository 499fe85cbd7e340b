"""Reads the body of a request, or refuses it before it does work."""

from __future__ import annotations

from starlette.requests import Request

from gateway.openai.errors import BodyTooLargeError, UnsupportedMediaError


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
