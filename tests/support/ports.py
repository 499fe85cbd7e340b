"""Ports for servers that start later."""

from __future__ import annotations

import atexit
import socket

HOST = "127.0.0.1"


def reserved_port(*hosts: str) -> int:
    """A port on which nobody listens, the same on all `hosts`; without any, on 127.0.0.1.

    It stays bound until this process ends, so that neither a connection nor a server of another
    test gets it meanwhile. Servers that set SO_REUSEADDR, as all here do, may listen on it.
    """
    while True:
        port, bound = 0, []
        for host in hosts or (HOST,):
            bound.append(reserved := socket.socket())
            reserved.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
            try:
                reserved.bind((host, port))
            except OSError:
                break
            port = reserved.getsockname()[1]
        else:
            for reserved in bound:
                atexit.register(reserved.close)
            return port
        for reserved in bound:
            reserved.close()
