"""The ports of a gateway, bound before anything slow."""

from __future__ import annotations

import contextlib
import resource
import socket
from collections.abc import Iterator

from outrider.errors import ConfigError
from outrider.rpc.targets import join_address


def bind(host: str, port: int, *, share: bool = False) -> socket.socket:
    """Bind a port; processes of this user may `share` it. Raises `ConfigError`."""
    family = socket.AF_INET6 if ":" in host else socket.AF_INET
    # asyncio switches Nagle's algorithm off only where the protocol is named.
    bound = socket.socket(family, socket.SOCK_STREAM, socket.IPPROTO_TCP)
    bound.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
    if share:
        bound.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEPORT, 1)
    try:
        with readable(host, port):
            bound.bind((host, port))
    except ConfigError:
        bound.close()
        raise
    return bound


def allow_connections() -> None:
    """Let this process open as many files as its user may: the usual 1,024 are few clients."""
    most = resource.getrlimit(resource.RLIMIT_NOFILE)[1]
    with contextlib.suppress(OSError, ValueError):  # where the system's own limit is lower
        resource.setrlimit(resource.RLIMIT_NOFILE, (most, most))


@contextlib.contextmanager
def readable(host: str, port: int) -> Iterator[None]:
    """Turn the system's errors about a port into a `ConfigError`."""
    try:
        yield
    except OSError as error:
        raise ConfigError(
            f"cannot listen on {join_address(host, port)}: {error.strerror or error}. "
            "Choose another port, or 0 for a free one."
        ) from error
