"""A scorer's configuration: frozen, with every "auto" resolved before."""

from __future__ import annotations

import argparse
import os
from dataclasses import dataclass, fields
from functools import partial
from typing import Any

from outrider import engines, flag_types
from outrider.config import (
    DTYPES,
    KV_CACHE_DTYPES,
    NUM_SPECULATIVE_TOKENS,
    QUANTIZATIONS,
    SPECULATION_POLICIES,
)
from outrider.drafting.building.config import MethodConfig
from outrider.features import FeatureSpec
from outrider.models.resolve import EMBEDDED
from outrider.rpc.deployment import Deployment
from outrider.settings import seconds, setting
from outrider.vllm.flags import VllmOptions


def _socket_path(text: str) -> str:
    flag_types.some_text(text)
    if len(os.fsencode(text)) > flag_types.MAX_SOCKET_PATH:
        raise argparse.ArgumentTypeError(
            f"{text!r} is longer than {flag_types.MAX_SOCKET_PATH} bytes: the system allows 107, "
            "and the sockets for data connections, which lie beside it, add .data or .vllm.data"
        )
    return text


def _quantization(text: str) -> str | None:
    if text not in (*QUANTIZATIONS, "none"):
        raise argparse.ArgumentTypeError(f"{text!r} is not int8, fp8 or none")
    return None if text == "none" else text


@dataclass(frozen=True, slots=True, kw_only=True)
class ScorerOptions:
    """The resolved command line."""

    host: str = setting("127.0.0.1", "address to listen on", type=flag_types.some_text)
    port: int = setting(0, "gRPC port; 0: a free one", type=flag_types.port)
    data_port: int = setting(
        0,
        "port of the plain connections that proposers are offered beside gRPC; 0: a free one",
        type=flag_types.port,
    )
    metrics_port: int = setting(0, "HTTP port of /metrics; 0: free", type=flag_types.port)
    model: str = setting("embedded", '"embedded", a folder, or a Hugging Face id')
    served_model_name: str = setting("default", "the name clients ask for")
    scorer_id: str = setting(None, "name in traces; default: host name and pid", resolved=True)
    dtype: str = setting(
        "float32",
        "float32: text equal to the last bit with any draft, or none; else faster, and near ties "
        "may fall differently",
        choices=DTYPES,
    )
    quantization: str | None = setting(
        None,
        "round the weights of linear layers when they are loaded: int8 or float8 (e4m3), a scale "
        "for each output; half the memory, and faster on CUDA in bfloat16; default: none",
        type=_quantization,
        metavar="{int8,fp8,none}",
    )
    kv_cache_dtype: str = setting(
        KV_CACHE_DTYPES[0],
        "of keys and values. fp8: float8 (e4m3) with a scale for each token and head, so that "
        "nearly twice the tokens fit; steps are slower, text changes a little; auto: the model's",
        choices=KV_CACHE_DTYPES,
    )
    device: str = setting("cpu", '"cpu" or "cuda"')
    engine: str = setting(  # native or vllm
        engines.AUTO,
        "native: Outrider's own; vllm: everything that vLLM serves; auto: native for what it "
        "serves exactly and faster, else vllm",
        choices=engines.ENGINES,
        resolved=True,
    )
    attention_backend: str | None = setting(
        None, "flash, triton, numba or sdpa; default: the best that fits"
    )
    threads: int = setting(2, "threads that torch uses", type=flag_types.positive)
    num_speculative_tokens: int = setting(
        NUM_SPECULATIVE_TOKENS,
        "K: draft tokens verified per request and round; 0 switches speculation off",
        type=flag_types.speculative_tokens,
    )
    speculation_policy: str = setting(
        SPECULATION_POLICIES[0],
        "adaptive: as many draft tokens as are measured to be the fastest, down to none; fixed: K "
        "in every round, and rows wait for them up to a second: to compare drafts; off: proposers "
        "may attach, but nothing is drafted: to compare with no speculation",
        choices=SPECULATION_POLICIES,
    )
    synthetic_acceptance_rates: tuple[float, ...] = setting(
        (),
        "for benchmarks only: how likely a round accepts at least 1, 2, ... K draft tokens, "
        "whatever they are; texts are then not the model's",
        type=flag_types.rates,
        metavar="P[,...]",
    )
    max_num_seqs: int = setting(128, "requests in a batch", type=flag_types.positive)
    max_num_batched_tokens: int = setting(  # 0: vLLM's own choice
        None,
        "query tokens in a step; default: 512 on a CPU, 2048 on CUDA, or --max-num-seqs",
        type=flag_types.positive,
        resolved=True,
    )
    max_model_len: int | None = setting(
        None, "context; default: the model's", type=partial(flag_types.whole, low=3)
    )
    gpu_memory_utilization: float = setting(
        0.9,
        "part of a CUDA device's memory to use; keys and values get what the rest leaves",
        type=flag_types.part,
    )
    kv_cache_memory: int | None = setting(  # None: all of gpu_memory_utilization that is left
        None,
        "MiB for keys and values; default: 512 on a CPU, on CUDA what is left",
        type=partial(flag_types.whole, low=1, high=2**63 - 1),
    )
    page_size: int = setting(  # 0: vLLM's own choice
        None,
        "tokens per page of the KV cache; default: 16 on a CPU, 64 on CUDA",
        type=flag_types.positive,
        resolved=True,
    )
    enable_prefix_caching: bool = setting(True, "reuse keys and values of prompts seen before")
    hidden_features: str | None = setting(
        None,
        "hidden states to keep for proposers that read them, beside keys and values: numbers of "
        "layers (0: entering the first), final (after the last norm: EAGLE, MTP, Medusa), eagle3 "
        "(what its modules read), or several with commas; default: what the in-process proposer "
        "reads, else none",
        metavar="STATES",
    )
    listen_unix: str | None = setting(
        None,
        "serve gRPC on this Unix socket, too: for proposers on the same machine",
        type=_socket_path,
        metavar="PATH",
    )
    in_process_proposer: tuple[MethodConfig, ...] = setting(
        None,
        "draft in this process (vLLM's worker with --engine vllm), in turns with its steps: the "
        "flags of a proposer that say by which methods, quoted, as "
        '"--method eagle3 --model FOLDER"; the fastest where target and draft share a GPU',
        metavar="FLAGS",
        resolved=True,
    )
    start_timeout: float = seconds(
        600.0, "how long loading and warming up may take", "start_timeout"
    )
    deployment: Deployment
    vllm_flags: tuple[str, ...]
    """In vLLM's own words: the flags of several devices, and those after "--"."""
    proposer_flags: str | None = None
    """`--in-process-proposer` as it was given, which vLLM's worker reads itself."""

    def for_vllm(self) -> VllmOptions:
        """Return what vLLM is to serve."""
        own: dict[str, Any] = {"draft_flags": self._draft_flags(), "more": self.vllm_flags}
        names = {each.name for each in fields(VllmOptions)} - own.keys()
        return VllmOptions(**{name: getattr(self, name) for name in names}, **own)

    def _draft_flags(self) -> tuple[str, ...]:
        """Return the flags of the draft side in vLLM's worker; its gRPC is reached through ours."""
        flags: list[object] = ["--host", self.host, "--port", 0, "--data-port", self.data_port]
        flags += ["--scorer-id", self.scorer_id, "--speculation-policy", self.speculation_policy]
        if self.hidden_features is not None:
            flags += ["--hidden-features", self.hidden_features]
        if self.proposer_flags is not None:  # the target was compared by its name, not its folder
            flags += [f"--in-process-proposer={self.proposer_flags} --target-model {EMBEDDED}"]
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
    """Time in which others that are not worse are preferred to one that kept missing deadlines."""
