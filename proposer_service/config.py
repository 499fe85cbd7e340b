"""A proposer's configuration: frozen, with every "auto" resolved before."""

from __future__ import annotations

import math
from dataclasses import dataclass, field
from typing import Final

from outrider.drafting.building.config import MethodConfig, check_methods, device_of
from outrider.errors import ConfigError
from outrider.rpc.deployment import Deployment
from outrider.rpc.targets import DNS_REFRESH_S, check_entries, check_refresh

START_TIMEOUT_S: Final = 600.0


@dataclass(frozen=True, slots=True)
class LinkConfig:
    """Times and limits of the streams to scorers."""

    backoff_first_s: float = 0.1
    backoff_max_s: float = 5.0
    refused_retry_s: float = 30.0
    """Wait after a refused Hello, since only a changed configuration can help."""
    answer_timeout_s: float = 10.0
    """For the connection and Welcome, and for a write to be taken."""
    connect_timeout_s: float = 2.0
    """For each step to a data connection, since a port behind a firewall may not answer."""
    max_unsent: int = 1024
    """Messages that wait to be sent; beyond, the stream is given up and dialled anew."""


@dataclass(frozen=True, slots=True)
class ProposerConfig:
    """One proposer process. Raises `ConfigError`."""

    scorers: tuple[str, ...]
    """The addresses and names of `--scorer`."""
    methods: tuple[MethodConfig, ...]
    """The first method that has a draft is used; a request may ask for another order."""
    proposer_id: str | None = None
    """None: made of host name, methods and port."""
    pool: str = "default"
    host: str = "127.0.0.1"
    port: int = 0
    metrics_port: int | None = None
    """None: metrics are not served."""
    max_sessions: int = 256
    link: LinkConfig = LinkConfig()
    dns_refresh_s: float = DNS_REFRESH_S
    """Interval of looking up the names among `scorers`."""
    start_timeout_s: float = START_TIMEOUT_S
    """Time for building the methods: download, load, compile, warm up."""
    deployment: Deployment = field(default_factory=Deployment)

    def __post_init__(self) -> None:
        check_entries(self.scorers)
        check_refresh(self.dns_refresh_s)
        if not 1 <= self.max_sessions < 2**32:  # of Hello's type
            raise ConfigError("--max-sessions is at least 1, and less than 2^32.")
        if not 0 < self.start_timeout_s < math.inf:
            raise ConfigError("--start-timeout must be a number of seconds above 0.")
        check_methods(self.methods)

    @property
    def device(self) -> str:
        return device_of(self.methods)
