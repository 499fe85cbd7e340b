"""What a proposer is told once, at start. Frozen; every "auto" is resolved before."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Literal

from outrider.errors import ConfigError
from outrider.rpc.deployment import Deployment
from outrider.rpc.targets import DNS_REFRESH_S, check_entries, check_refresh


@dataclass(frozen=True, slots=True)
class NgramConfig:
    """Prompt lookup."""

    prompt_lookup_min: int = 2
    prompt_lookup_max: int = 4


@dataclass(frozen=True, slots=True)
class DraftModelConfig:
    """An independent small language model."""

    model: str = "embedded"
    """"embedded", a folder, or a Hugging Face id."""
    dtype: Literal["float32", "bfloat16"] = "float32"
    threads: int = 1
    """CPU threads of torch."""
    kv_cache_memory: int = 256
    """MiB for keys and values."""
    max_model_len: int | None = None
    """None: what the model allows."""
    device: Literal["cpu", "cuda"] = "cpu"
    attention_backend: str | None = None
    """None: the best that fits."""


@dataclass(frozen=True, slots=True)
class LinkConfig:
    """How the proposer keeps its streams to the scorers. Times in seconds."""

    backoff_first_s: float = 0.1
    backoff_max_s: float = 5.0
    refused_retry_s: float = 30.0
    """Wait after a refused Hello: only a changed configuration can help."""
    answer_timeout_s: float = 10.0
    """For the connection and Welcome, and for a write to be taken."""
    max_unsent: int = 1024
    """Messages waiting to be sent; beyond, the stream is given up and dialled anew."""


@dataclass(frozen=True, slots=True)
class ProposerConfig:
    """One proposer process. Raises `ConfigError`."""

    scorers: tuple[str, ...]
    """What `--scorer` lists: addresses and names."""
    method: NgramConfig | DraftModelConfig
    proposer_id: str | None = None
    """None: from host name, method and port."""
    pool: str = "default"
    host: str = "127.0.0.1"
    port: int = 0
    metrics_port: int | None = None
    """None: metrics are not served."""
    max_sessions: int = 256
    max_draft_tokens: int = 16
    max_branches: int = 16
    """Outcomes of a verification that are drafted for ahead of it, per session at most; 0: none."""
    link: LinkConfig = LinkConfig()
    dns_refresh_s: float = DNS_REFRESH_S
    """How often the names among `scorers` are looked up."""
    deployment: Deployment = field(default_factory=Deployment)

    def __post_init__(self) -> None:
        check_entries(self.scorers)
        check_refresh(self.dns_refresh_s)
        if self.max_sessions < 1 or self.max_draft_tokens < 1:
            raise ConfigError("--max-sessions and --max-draft-tokens are at least 1.")
        if self.max_branches < 0:
            raise ConfigError("--max-branches is at least 0.")
