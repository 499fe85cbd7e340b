"""The stack that all clients share."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from tests.support.clients import Server
from tests.support.ports import reserved_port
from tests.support.services.up import EVERY_ROUND, running


@pytest.fixture(scope="session")
def stack() -> Iterator[Server]:
    """The embedded pair, as `outrider serve` starts it, which must call tools if it is told to."""
    pages = reserved_port()
    origin = f"http://localhost:{pages}"
    flags = ("--cors-origin", origin, "--tool-call-parser", "hermes", *EVERY_ROUND)
    with running(*flags, beside=False) as up:
        yield Server(up.http, pages)
