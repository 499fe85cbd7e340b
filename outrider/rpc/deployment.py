"""Flags that all services share.

This module does not import grpc, since flags are checked before.
"""

from __future__ import annotations

import argparse
import math
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from outrider.errors import ConfigError
from outrider.flag_types import port
from outrider.rpc.targets import join_address


@dataclass(frozen=True, slots=True)
class TlsFiles:
    """PEM files of one service, read again when they change. Raises `ConfigError`."""

    cert: str
    """Certificate chain that the service shows to clients and to servers."""
    key: str
    ca: str | None = None
    """Authority of the peers. None: servers ask for no certificate, clients trust the system's."""

    def __post_init__(self) -> None:
        for flag, path in (("cert", self.cert), ("key", self.key), ("ca", self.ca)):
            if path is not None and not Path(path).is_file():
                raise ConfigError(f"--tls-{flag} {path}: there is no such file.")

    @property
    def paths(self) -> tuple[str, ...]:
        return (self.cert, self.key, *(() if self.ca is None else (self.ca,)))


@dataclass(frozen=True, slots=True)
class Deployment:
    """Settings of a service's surroundings. Raises `ConfigError`."""

    drain_grace_s: float = 20.0
    """Time that running requests have after SIGTERM."""
    health_port: int | None = None
    """Port of grpc.health.v1 alone, without TLS. None: health is on the service's port only."""
    tls: TlsFiles | None = None
    """None: no TLS."""

    def __post_init__(self) -> None:
        if not 0 <= self.drain_grace_s < math.inf:
            raise ConfigError("--drain-grace-seconds must be a number of seconds, 0 or more.")

    def health_address(self, host: str) -> str | None:
        """Return the address of health alone, for a service that listens on `host`."""
        return None if self.health_port is None else join_address(host, self.health_port)


class Help(argparse.ArgumentDefaultsHelpFormatter):
    """Shows defaults, except None and False."""

    def _get_help_string(self, action: argparse.Action) -> str | None:
        no_default = action.default is None or action.default is False
        return action.help if no_default else super()._get_help_string(action)


def add_deployment_flags(parser: argparse.ArgumentParser) -> None:
    """Add the flags that `take_deployment` reads."""
    parser.add_argument(
        "--drain-grace-seconds",
        type=float,
        metavar="SECONDS",
        default=Deployment().drain_grace_s,
        help="how long running requests may go on after SIGTERM",
    )
    parser.add_argument(
        "--health-port",
        type=port,
        help="grpc.health.v1 on a port of its own, without TLS, for probes; unset: none",
    )
    parser.add_argument(
        "--tls-cert", metavar="FILE", help="PEM certificate of this service; unset: no TLS"
    )
    parser.add_argument("--tls-key", metavar="FILE", help="PEM key of --tls-cert")
    parser.add_argument(
        "--tls-ca",
        metavar="FILE",
        help="PEM certificates that sign the other services'; with it, servers demand one",
    )


def take_deployment(flags: dict[str, Any]) -> Deployment:
    """Take the parsed flags out of `flags`. Raises `ConfigError`."""
    cert, key, ca = (flags.pop(f"tls_{name}") for name in ("cert", "key", "ca"))
    if bool(cert) != bool(key) or (ca and not cert):
        raise ConfigError("--tls-cert and --tls-key go together, and --tls-ca needs both.")
    return Deployment(
        drain_grace_s=flags.pop("drain_grace_seconds"),
        health_port=flags.pop("health_port"),
        tls=TlsFiles(cert, key, ca) if cert else None,
    )
