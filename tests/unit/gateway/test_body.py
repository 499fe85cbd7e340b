"""Bodies of requests: what reads them, and where."""

from __future__ import annotations

import threading

import pytest
from starlette.requests import Request
from starlette.types import Message

from gateway.openai.body import read_as
from gateway.openai.errors import BodyTooLargeError


def request(body: bytes) -> Request:
    async def receive() -> Message:
        return {"type": "http.request", "body": body, "more_body": False}

    headers = [(b"content-type", b"application/json")]
    return Request({"type": "http", "method": "POST", "headers": headers}, receive)


def size_and_thread(body: bytes) -> tuple[int, int]:
    return len(body), threading.get_ident()


async def test_large_body_is_read_off_the_event_loop() -> None:
    here = threading.get_ident()
    assert await read_as(request(b"x"), 10**6, size_and_thread) == (1, here)
    size, thread = await read_as(request(b"x" * 500_000), 10**6, size_and_thread)
    assert size == 500_000
    assert thread != here


async def test_body_above_the_limit_is_not_read() -> None:
    with pytest.raises(BodyTooLargeError):
        await read_as(request(b"x" * 500_000), 499_999, size_and_thread)
