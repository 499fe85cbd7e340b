"""Client channels, and the limits that both ends share."""

from __future__ import annotations

from typing import Final

import grpc

from outrider.rpc.deployment import TlsFiles
from outrider.rpc.targets import Target
from outrider.rpc.tls import channel_credentials

MAX_MESSAGE_BYTES: Final = 16 * 2**20
"""A prompt of a million tokens fits; gRPC's default of 4 MiB would not hold it."""

LIMITS: Final[tuple[tuple[str, int], ...]] = (
    ("grpc.max_receive_message_length", MAX_MESSAGE_BYTES),
    ("grpc.max_send_message_length", MAX_MESSAGE_BYTES),
)

_KEEPALIVE: Final[tuple[tuple[str, int], ...]] = (
    # A peer that vanished without a FIN is noticed within 15 s, idle or not.
    ("grpc.keepalive_time_ms", 10_000),
    ("grpc.keepalive_timeout_ms", 5_000),
    ("grpc.keepalive_permit_without_calls", 1),
    ("grpc.http2.max_pings_without_data", 0),
    # gRPC's own back-off grows to 2 minutes: too long for a peer that restarts in seconds.
    ("grpc.initial_reconnect_backoff_ms", 100),
    # Despite its name: how long one attempt to connect may take. A busy peer needs its time.
    ("grpc.min_reconnect_backoff_ms", 5_000),
    ("grpc.max_reconnect_backoff_ms", 2_000),
)


def open_channel(target: str | Target, tls: TlsFiles | None = None) -> grpc.aio.Channel:
    """A channel to `target` ("host:port", "dns:///...", "unix:/path", or a `Target`).

    With `tls`, as its files are now, except over a Unix socket: that does not leave the machine.
    Without compression: messages are a few token ids. Close it when done. Raises `ConfigError` for
    TLS files that cannot be read.
    """
    if isinstance(target, str):
        target = Target(target)
    options: list[tuple[str, int | str]] = [*LIMITS, *_KEEPALIVE]
    if tls is None or target.is_unix:
        return grpc.aio.insecure_channel(target.address, options=options)
    if target.server_name is not None:  # dialled by IP address, known by name
        options.append(("grpc.ssl_target_name_override", target.server_name))
    return grpc.aio.secure_channel(target.address, channel_credentials(tls), options=options)
