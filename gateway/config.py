"""Settings of a gateway, fixed at its start; only `__main__` builds one from flags."""

from __future__ import annotations

from dataclasses import dataclass, field
from itertools import combinations

from gateway.answers.formats import answer_format
from gateway.processes import Worker, check_workers
from outrider.errors import ConfigError
from outrider.rpc.deployment import Deployment
from outrider.rpc.targets import DNS_REFRESH_S, check_entries, check_refresh


@dataclass(frozen=True, slots=True, kw_only=True)
class GeneratorConfig:
    """Settings of generation, wherever requests come from."""

    served_model_name: str = "default"
    """The name clients ask for."""
    served_model_aliases: tuple[str, ...] = ()
    """Further names that clients may ask for."""
    max_in_flight: int = 256
    """Completions at once; more are refused with CapacityError."""
    request_timeout_s: float = 600.0
    """Every request has its answer, or a DeadlineError, within this time."""
    resume_timeout_s: float = 15.0
    """Seconds that a request whose scorer died waits for another one."""
    hold_timeout_s: float | None = None
    """Seconds that a new request waits while no scorer serves, since they are scaled to zero; the
    gateway then starts and stays healthy without any. None: `resume_timeout_s`, and it does not.
    """
    default_max_tokens: int | None = None
    """For requests that set none; less where the context ends sooner. None: what it holds."""
    ends_at_context: bool = False
    """A request for more tokens than the context holds gets as many; otherwise it is refused."""
    seed: int | None = None
    """For requests that give none. None: a new one is drawn for each."""
    tool_call_parser: str = "auto"
    """The format of the model's tool calls; "auto": the one that its chat template shows."""
    reasoning_parser: str = "auto"
    """The format of its reasoning, likewise; "none": it has none."""

    @property
    def model_names(self) -> tuple[str, ...]:
        return self.served_model_name, *self.served_model_aliases


@dataclass(frozen=True, slots=True, kw_only=True)
class GatewayConfig(GeneratorConfig):
    """Raises `ConfigError` for values that cannot work."""

    scorers: tuple[str, ...]
    """Addresses and names of scorers, all serving the same model, as `--scorer` lists them."""
    model: str | None = None
    """Source of the tokenizer: "embedded" (None), a folder or a Hugging Face id."""
    host: str = "127.0.0.1"
    http_port: int = 0
    grpc_port: int = 0
    metrics_port: int | None = None
    """For metrics until the process ends, and there alone. None: `http_port` has them."""
    vllm_metrics: bool = False
    """True: `http_port` has the scorers' load under vLLM's names, for routers that read them."""
    api_key_file: str | None = None
    """One key per line. None: anyone may ask."""
    cors_origins: tuple[str, ...] = ()
    """Origins whose pages may call the HTTP API from a browser; "*": any. None by default."""
    playground: bool = True
    """True: `/` answers anyone with a page to try the model on."""
    max_body_bytes: int = 8 * 2**20
    start_timeout_s: float = 120.0
    """Seconds that the start waits for the first scorer to serve."""
    dns_refresh_s: float = DNS_REFRESH_S
    """Seconds between two lookups of the names among `scorers`."""
    workers: int = 1
    """Processes that serve on the ports together."""
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
        if self.seed is not None and not 0 <= self.seed < 2**64:
            raise ConfigError("--seed must be an unsigned 64-bit number.")
        for name in ("request_timeout_s", "resume_timeout_s", "start_timeout_s", "hold_timeout_s"):
            value = getattr(self, name)
            if value is not None and not 0 < value < float("inf"):
                flag = name.removesuffix("_s").replace("_", "-")
                raise ConfigError(f"--{flag} must be a positive number of seconds.")
        check_workers(self.workers)
        check_refresh(self.dns_refresh_s)
