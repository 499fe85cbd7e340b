"""A proposer's configuration: frozen, with every "auto" resolved before."""

from __future__ import annotations

import math
from dataclasses import dataclass, field

from outrider import flag_types
from outrider.drafting.building.config import MethodConfig, check_methods, device_of
from outrider.errors import ConfigError
from outrider.rpc.deployment import Deployment
from outrider.rpc.targets import DNS_REFRESH_S, check_entries, check_refresh
from outrider.settings import seconds, setting


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
    proposer_id: str | None = setting(None, "unique in the pool; unset: host name, method and port")
    pool: str = setting("default", "name of the pool, for metrics")
    host: str = setting(
        "127.0.0.1", "address of ProposerService and metrics", type=flag_types.some_text
    )
    port: int = setting(0, "port of ProposerService; 0: a free one", type=flag_types.port)
    metrics_port: int | None = setting(
        None, "port of /metrics; 0: a free one; unset: none", type=flag_types.port
    )
    max_sessions: int = setting(256, "sessions held at once")
    link: LinkConfig = LinkConfig()
    dns_refresh_s: float = seconds(
        DNS_REFRESH_S, "how often the names in --scorer are looked up", "dns_refresh_seconds"
    )
    start_timeout_s: float = seconds(
        600.0, "how long loading and warming up may take", "start_timeout"
    )
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
