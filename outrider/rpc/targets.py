"""The targets of `--scorer`: addresses, Unix sockets, and DNS names that are looked up again."""

from __future__ import annotations

import asyncio
import logging
import socket
from collections.abc import AsyncGenerator, Sequence
from dataclasses import dataclass
from typing import Final

from outrider.errors import ConfigError

DNS_REFRESH_S: Final = 5.0
_DNS: Final = "dns:"
_UNIX: Final = "unix:"
_log = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True, order=True)
class Target:
    """One server to dial."""

    address: str
    """"host:port", "[v6]:port" or "unix:/path"."""
    server_name: str | None = None
    """Name that the certificate must hold; None: the host of the address."""

    @property
    def is_unix(self) -> bool:
        return self.address.startswith(_UNIX)

    @property
    def socket_path(self) -> str | None:
        return self.address.removeprefix(_UNIX) if self.is_unix else None

    def __str__(self) -> str:
        return self.address


def join_address(host: str, port: int | str) -> str:
    """Join host and port as gRPC and URLs do, with an IPv6 address in brackets."""
    return f"[{host}]:{port}" if ":" in host else f"{host}:{port}"


def no_unix_socket(address: object) -> ConfigError:
    """Return the error of a server that cannot listen on a Unix socket."""
    return ConfigError(
        f"cannot listen on {address}: its folder must exist and allow writing, nothing but a "
        "socket may lie there, and the path be at most 107 bytes long."
    )


def parse_entries(text: str) -> tuple[str, ...]:
    """Return the entries of a comma list. Raises `ConfigError` as `check_entries` does."""
    entries = tuple(entry.strip() for entry in text.split(",") if entry.strip())
    check_entries(entries)
    return entries


def check_entries(entries: Sequence[str]) -> None:
    """Raise `ConfigError` unless each is host:port, unix:/path or dns:host:port, once."""
    for entry in entries:
        if entry.startswith(_UNIX):
            good = entry.removeprefix(_UNIX).startswith("/")
        else:
            host, _, port = entry.removeprefix(_DNS).rpartition(":")
            # gRPC would look a URL up as a name.
            good = bool(host) and "//" not in host and port.isdigit() and 0 < int(port) < 2**16
        if not good:
            raise ConfigError(
                f"--scorer {entry!r} is not an address: give host:port, unix:/path/to.sock or "
                "dns:host:port, separated by commas."
            )
    if len(set(entries)) != len(entries):
        raise ConfigError("a scorer is named twice in --scorer.")


def check_refresh(seconds: float) -> None:
    """Raise `ConfigError` for an interval out of bounds."""
    if not 0.1 <= seconds <= 3600:
        raise ConfigError("--dns-refresh-seconds must be between 0.1 and 3600.")


class Targets:
    """The targets that entries currently stand for."""

    def __init__(self, entries: Sequence[str], refresh_s: float = DNS_REFRESH_S) -> None:
        check_entries(entries)
        self._fixed = tuple(Target(entry) for entry in entries if not entry.startswith(_DNS))
        self._names = tuple(e.removeprefix(_DNS) for e in entries if e.startswith(_DNS))
        self._refresh_s = refresh_s
        self._found: dict[str, tuple[Target, ...]] = {}
        self._unknown: set[str] = set()

    async def follow(self) -> AsyncGenerator[tuple[Target, ...], None]:
        """Yield all targets, and again whenever they change; end if they cannot.

        A name that cannot be looked up keeps its addresses. The resolver's own limits bound a
        look-up.
        """
        last: tuple[Target, ...] | None = None
        while True:
            await asyncio.gather(*(self._look_up(name) for name in self._names))
            found = (target for name in self._names for target in self._found.get(name, ()))
            targets = tuple(dict.fromkeys((*self._fixed, *found)))
            if targets != last:
                last = targets
                yield targets
            if not self._names:
                return
            await asyncio.sleep(self._refresh_s)

    async def _look_up(self, name: str) -> None:
        host, _, port = name.rpartition(":")
        host = host.strip("[]")
        loop = asyncio.get_running_loop()
        try:
            answers = await loop.getaddrinfo(host, int(port), type=socket.SOCK_STREAM)
        except (OSError, UnicodeError) as error:  # UnicodeError: as for "a..b"
            if name not in self._unknown:
                _log.warning("%s cannot be looked up: %s", host, error)
            self._unknown.add(name)
            return
        self._unknown.discard(name)
        # A pod of a dual-stack cluster has an address of each family, but is dialled once.
        v4 = {answer[4][0] for answer in answers if answer[0] == socket.AF_INET}
        v6 = {answer[4][0] for answer in answers if answer[0] == socket.AF_INET6}
        addresses = [join_address(str(ip), port) for ip in v4 or v6]
        self._found[name] = tuple(Target(address, host) for address in sorted(addresses))
