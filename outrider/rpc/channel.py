"""Client channels, and the options that both ends share."""

from __future__ import annotations

from typing import Final

import grpc

from outrider.rpc.deployment import TlsFiles
from outrider.rpc.targets import Target
from outrider.rpc.tls import channel_credentials

MAX_MESSAGE_BYTES: Final = 16 * 2**20
"""Holds a prompt of a million tokens, unlike gRPC's default of 4 MiB."""

LIMITS: Final[tuple[tuple[str, int], ...]] = (
    ("grpc.max_receive_message_length", MAX_MESSAGE_BYTES),
    ("grpc.max_send_message_length", MAX_MESSAGE_BYTES),
)

_PING_MS = 10_000

_RECONNECT: Final[tuple[tuple[str, int], ...]] = (
    # gRPC's own back-off grows to 2 minutes, and a peer restarts in seconds.
    ("grpc.initial_reconnect_backoff_ms", 100),
    # Despite its name, the time for one attempt to connect.
    ("grpc.min_reconnect_backoff_ms", 5_000),
    ("grpc.max_reconnect_backoff_ms", 2_000),
)


def send_pings() -> tuple[tuple[str, int], ...]:
    """Return options that notice within 20 s a peer that vanishes without a FIN."""
    return (
        ("grpc.keepalive_time_ms", _PING_MS),
        # gRPC (1.85) never starts the timer of keepalive_timeout_ms.
        ("grpc.http2.ping_timeout_ms", _PING_MS),
        ("grpc.keepalive_permit_without_calls", 1),
        ("grpc.http2.max_pings_without_data", 0),
    )


def take_pings() -> tuple[tuple[str, int], ...]:
    """Return server options that accept pings, which gRPC takes for abuse by default."""
    return (
        ("grpc.keepalive_permit_without_calls", 1),
        ("grpc.http2.min_ping_interval_without_data_ms", _PING_MS // 2),
    )


def open_channel(target: str | Target, tls: TlsFiles | None = None) -> grpc.aio.Channel:
    """Open a channel to `target` ("host:port", "dns:///...", "unix:/path", or a `Target`).

    A Unix socket does not leave the machine and needs no TLS. Raises `ConfigError` for TLS files
    that cannot be read.
    """
    if isinstance(target, str):
        target = Target(target)
    options: list[tuple[str, int | str]] = [*LIMITS, *send_pings(), *_RECONNECT]
    if tls is None or target.is_unix:
        return grpc.aio.insecure_channel(target.address, options=options)
    if target.server_name is not None:  # dialled by IP address, known by name
        options.append(("grpc.ssl_target_name_override", target.server_name))
    return grpc.aio.secure_channel(target.address, channel_credentials(tls), options=options)
