"""Addresses of services on this machine."""

from __future__ import annotations

import os
import socket
from typing import Final

from outrider.errors import ConfigError

HOST: Final = "127.0.0.1"
_IN_MEMORY: Final = "/dev/shm"


def check_port(host: str, port: int, flag: str) -> None:
    """Raise `ConfigError` if a port cannot be listened on. 0 always passes."""
    if not port:
        return
    family = socket.AF_INET6 if ":" in host else socket.AF_INET
    with socket.socket(family) as probe:
        # As servers do: a connection in TIME_WAIT does not count as taken.
        probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        try:
            probe.bind((host, port))
        except OSError as error:
            raise ConfigError(
                f"port {port} on {host} cannot be had ({error.strerror}): choose another {flag}, "
                "or 0 for any."
            ) from error


def memory_folder() -> str | None:
    """Return a folder in memory for sockets; None if there is none.

    Whoever makes a file on a disk is held up while gigabytes of a model are written back to it.
    """
    return _IN_MEMORY if os.access(_IN_MEMORY, os.W_OK) else None
