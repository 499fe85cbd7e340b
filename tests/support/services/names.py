"""A name server for one test: the resolver of the running loop answers from a table."""

from __future__ import annotations

import asyncio
import socket
from typing import Any

import pytest


class Names:
    """`table` maps names to addresses; a name that is not in it cannot be looked up."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.table: dict[str, list[str]] = {}
        self._asked = 0
        monkeypatch.setattr(asyncio.get_running_loop(), "getaddrinfo", self._look_up)

    async def asked_again(self) -> None:
        """Returns when what the table holds now was asked for."""
        asked = self._asked
        while self._asked < asked + 2:  # noqa: ASYNC110
            await asyncio.sleep(0.005)

    async def _look_up(self, host: str, port: int, **_: Any) -> list[Any]:
        self._asked += 1
        if host not in self.table:
            raise socket.gaierror(socket.EAI_NONAME, "Name or service not known")
        return [
            (socket.AF_INET6, socket.SOCK_STREAM, 6, "", (address, port, 0, 0))
            if ":" in address
            else (socket.AF_INET, socket.SOCK_STREAM, 6, "", (address, port))
            for address in self.table[host]
        ]
