"""Settings of a gateway, fixed at its start; only `__main__` builds one from flags."""

from __future__ import annotations

import argparse
import re
from dataclasses import dataclass, field
from itertools import combinations

from gateway.answers.formats import answer_format
from gateway.processes import Worker, check_workers, default_workers
from outrider.errors import ConfigError
from outrider.flag_types import port, some_text
from outrider.rpc.deployment import Deployment
from outrider.rpc.targets import DNS_REFRESH_S, check_entries, check_refresh
from outrider.settings import seconds, setting


@dataclass(frozen=True, slots=True, kw_only=True)
class GeneratorConfig:
    """Settings of generation, wherever requests come from."""

    served_model_name: str = setting(
        "default",
        "the names clients ask for; metrics and traces carry the first",
        nargs="+",
        metavar="NAME",
        default=["default"],
    )
    served_model_aliases: tuple[str, ...] = setting(
        (),
        "another name of the served model; may be given several times; unset: none",
        flag="served_model_alias",
        action="append",
        metavar="NAME",
        default=[],
    )
    max_in_flight: int = setting(256, "completions at once; more get 429")
    request_timeout_s: float = seconds(
        600.0, "every request is answered within this time", "request_timeout"
    )
    resume_timeout_s: float = seconds(
        15.0, "how long a request waits for a scorer to continue on", "resume_timeout"
    )
    hold_timeout_s: float | None = seconds(
        None,
        "how long a new request waits while no scorer serves, where scorers are scaled to zero: "
        "health then needs none; unset: --resume-timeout, and it does",
        "hold_timeout",
    )
    default_max_tokens: int | None = setting(
        None, "for requests that set none; unset: what the context holds", type=int
    )
    ends_at_context: bool = False
    """A request for more tokens than the context holds gets as many; otherwise it is refused."""
    seed: int | None = setting(
        None, "for requests that give none; unset: a new one for each", type=int
    )
    tool_call_parser: str = setting(
        "auto", "format of tool calls; auto: as the chat template shows"
    )
    reasoning_parser: str = setting(
        "auto", "format of reasoning; auto: likewise; none: there is none"
    )

    @property
    def model_names(self) -> tuple[str, ...]:
        return self.served_model_name, *self.served_model_aliases


@dataclass(frozen=True, slots=True, kw_only=True)
class GatewayConfig(GeneratorConfig):
    """Raises `ConfigError` for values that cannot work."""

    scorers: tuple[str, ...]
    """Addresses and names of scorers, all serving the same model, as `--scorer` lists them."""
    model: str | None = setting(None, "the scorers' --model, for its tokenizer; unset: embedded")
    host: str = setting("127.0.0.1", "address to listen on", type=some_text)
    http_port: int = setting(0, "0: any free port", type=port)
    grpc_port: int = setting(0, "0: any free port", type=port)
    metrics_port: int | None = setting(
        None, "/metrics; 0: any free port; unset: on the HTTP port", type=port
    )
    vllm_metrics: bool = setting(
        False,
        "the scorers' load under vLLM's metric names, at /metrics of the HTTP port, too",
        action="store_true",
    )
    api_key_file: str | None = setting(None, "one key per line; without it, anyone may ask")
    cors_origins: tuple[str, ...] = setting(
        (),
        "a web page's origin that may call the HTTP API from a browser, such as "
        "https://app.example.com, or * for any; may be given several times; unset: none",
        flag="cors_origin",
        action="append",
        metavar="ORIGIN",
        default=[],
    )
    playground: bool = setting(
        True,
        "answer / with 404 instead of a page to try the model on",
        flag="no_playground",
        action="store_false",
        default=argparse.SUPPRESS,
    )
    max_body_bytes: int = setting(
        8 * 2**20, "larger requests get 413, over gRPC RESOURCE_EXHAUSTED"
    )
    start_timeout_s: float = seconds(
        120.0, "how long the start waits for a scorer", "start_timeout"
    )
    dns_refresh_s: float = seconds(
        DNS_REFRESH_S, "how often the names in --scorer are looked up", "dns_refresh_seconds"
    )
    workers: int = setting(
        1,
        "processes that serve on the ports together, each with a core of its own; unset: one for "
        "every four cores, at most four",
        default=default_workers(),
    )
    worker: Worker | None = None
    """Which of them this is. None: it is the only one, or their parent."""
    deployment: Deployment = field(default_factory=Deployment)

    def __post_init__(self) -> None:
        if not self.scorers:
            raise ConfigError("--scorer must name at least one scorer (HOST:PORT[,HOST:PORT...]).")
        check_entries(self.scorers)
        for one, other in combinations(("http_port", "grpc_port", "metrics_port"), 2):
            if getattr(self, one) and getattr(self, one) == getattr(self, other):
                one, other = (f"--{name.replace('_', '-')}" for name in (one, other))
                raise ConfigError(f"{one} and {other} must differ.")
        for name in ("max_in_flight", "max_body_bytes", "default_max_tokens"):
            if (value := getattr(self, name)) is not None and value < 1:
                raise ConfigError(f"--{name.replace('_', '-')} must be at least 1.")
        answer_format("", self.tool_call_parser, self.reasoning_parser)
        if not all(self.model_names):
            raise ConfigError("--served-model-name must not be empty.")
        for origin in self.cors_origins:
            if not re.fullmatch(r"\*|null|[a-z][a-z0-9+.-]*://[^/?#*\sA-Z]+", origin):
                raise ConfigError(
                    f"--cors-origin {origin!r} is not what browsers send as a page's origin, such "
                    "as https://app.example.com (lower case, no path, no last slash), nor *."
                )
        if self.seed is not None and not 0 <= self.seed < 2**64:
            raise ConfigError("--seed must be an unsigned 64-bit number.")
        for name in ("request_timeout_s", "resume_timeout_s", "start_timeout_s", "hold_timeout_s"):
            value = getattr(self, name)
            if value is not None and not 0 < value < float("inf"):
                flag = name.removesuffix("_s").replace("_", "-")
                raise ConfigError(f"--{flag} must be a positive number of seconds.")
        check_workers(self.workers)
        check_refresh(self.dns_refresh_s)
