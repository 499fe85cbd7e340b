"""A scorer's configuration: frozen, with every "auto" resolved before."""

from __future__ import annotations

from dataclasses import dataclass, fields
from typing import Any

from outrider.drafting.building.config import MethodConfig
from outrider.features import FeatureSpec
from outrider.rpc.deployment import Deployment
from outrider.vllm.flags import VllmOptions


@dataclass(frozen=True, slots=True)
class ScorerOptions:
    """The resolved command line: each field is a flag of `python -m scorer_service`."""

    host: str
    port: int
    data_port: int
    metrics_port: int
    model: str
    served_model_name: str
    scorer_id: str
    dtype: str
    quantization: str | None  # of weights, on load; None: as the checkpoint has them
    kv_cache_dtype: str  # a name of KV_CACHE_DTYPES
    device: str
    attention_backend: str | None
    threads: int
    num_speculative_tokens: int
    speculation_policy: str
    synthetic_acceptance_rates: tuple[float, ...]
    max_num_seqs: int
    max_num_batched_tokens: int  # 0: vLLM's own choice
    max_model_len: int | None
    kv_cache_memory: int | None  # MiB; None: all of gpu_memory_utilization that is left
    gpu_memory_utilization: float
    page_size: int  # 0: vLLM's own choice
    enable_prefix_caching: bool
    hidden_features: str | None
    listen_unix: str | None
    start_timeout: float  # seconds
    in_process_proposer: tuple[MethodConfig, ...]
    deployment: Deployment
    engine: str  # native or vllm
    vllm_flags: tuple[str, ...]
    """In vLLM's own words: the flags of several devices, and those after "--"."""

    def for_vllm(self) -> VllmOptions:
        """Return what vLLM is to serve."""
        own: dict[str, Any] = {"draft_flags": self._draft_flags(), "more": self.vllm_flags}
        names = {each.name for each in fields(VllmOptions)} - own.keys()
        return VllmOptions(**{name: getattr(self, name) for name in names}, **own)

    def _draft_flags(self) -> tuple[str, ...]:
        """Return the flags of the draft side in vLLM's worker; its gRPC is reached through ours."""
        flags: list[object] = ["--host", self.host, "--port", 0, "--data-port", self.data_port]
        flags += ["--scorer-id", self.scorer_id, "--speculation-policy", self.speculation_policy]
        if self.listen_unix is not None:  # in the same folder, where proposers look for its data
            flags += ["--listen-unix", f"{self.listen_unix}.vllm"]
        if (tls := self.deployment.tls) is not None:
            flags += ["--tls-cert", tls.cert, "--tls-key", tls.key]
            flags += [] if tls.ca is None else ["--tls-ca", tls.ca]
        return tuple(map(str, flags))


@dataclass(frozen=True, slots=True)
class ServedModel:
    """The model of this scorer, as clients and proposers see it."""

    scorer_id: str
    model: str
    served_model_name: str
    tokenizer_hash: str
    """Hex SHA-256. Empty if the model's folder holds no tokenizer: proposers' is not compared."""
    vocab_size: int
    max_model_len: int
    dtype: str
    eos_token_ids: frozenset[int]
    num_speculative_tokens: int
    """K where a request names none."""
    page_size: int = 0
    """Tokens in a page of the KV cache."""
    features: FeatureSpec | None = None
    """Captured hidden states, which proposers may ask for."""
    no_features: str = "start it with --hidden-features {states}"
    """The advice for who needs hidden states where none are captured."""
    device: str = ""
    """The device's name, as proposers name theirs. Empty: several devices, or unknown."""
    adapters: tuple[str, ...] = ()
    """Names of adapters that requests may ask for."""
    drafted_elsewhere: bool = False
    """Proposers attach to another process, which is the engine's."""


@dataclass(frozen=True, slots=True)
class DraftLimits:
    """Bounds on what proposers may ask of this scorer."""

    hello_timeout_s: float = 10.0
    max_proposers: int = 64
    max_sessions: int = 1 << 16
    """Requests that the scorer holds at most: a proposer's room for more says nothing."""
    max_block_tokens: int = 512
    """Nodes of a block."""
    max_bad_blocks: int = 8
    """Malformed messages of one stream until it is ended with BAD_BLOCKS."""
    max_reopens: int = 3
    """Lost messages of one session and proposer until the session is drafted for elsewhere."""
    full_s: float = 1.0
    """Time in which a proposer that had no room is given no further sessions."""
    max_backlog_tokens: int = 1 << 20
    """Tokens and messages waiting for one proposer to read them; beyond, it is detached."""
    max_projection_bytes: int = 512 * 2**20
    max_projections: int = 4
    """Different projections that the device keeps."""
    projection_timeout_s: float = 60.0
    """From Welcome until a requested projection is complete."""
    set_aside_s: float = 2.0
    """Time in which other proposers are preferred to one that kept missing deadlines."""
