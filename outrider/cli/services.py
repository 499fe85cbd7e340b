"""Turn what is to be served, with every "auto" resolved, into processes."""

from __future__ import annotations

import json
import os
import shlex
import sys
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from typing import Final

from outrider.aux_layers import states_read
from outrider.cli.ports import HOST
from outrider.cli.process import START_DEADLINE_S, STOP_GRACE_S
from outrider.config import NUM_SPECULATIVE_TOKENS, SPECULATION_POLICIES
from outrider.engines import NATIVE, VLLM
from outrider.errors import ConfigError
from outrider.methods import HIDDEN_STATE_METHODS, SELF_LIMITING_METHODS
from outrider.models.resolve import EMBEDDED, EMBEDDED_HEADS, resolve_model
from outrider.process.child_process import ServiceSpec
from outrider.vllm.flags import OWN_METHODS, OWN_SETTINGS, num_devices

_DEFAULT_MAX_DRAFT_TOKENS = 16  # of proposers
SOCKET: Final = "scorer.sock"
"""Name of the scorer's socket in its folder."""


@dataclass(frozen=True, slots=True)
class ServeConfig:
    """One model, served on this machine. Models are folders or "embedded", port 0 is a free one.

    Raises `ConfigError`.
    """

    model: str = EMBEDDED
    draft_model: str | None = None  # None: the embedded one, if the method has any
    methods: tuple[str, ...] = ("draft_model",)  # none: no speculation
    device: str = "cpu"  # or cuda, cuda:1
    draft_device: str | None = None  # None: the scorer drafts, or vLLM by methods of its own
    engine: str = NATIVE
    vllm_flags: tuple[str, ...] = ()  # in vLLM's own words
    dtype: str = "float32"
    num_speculative_tokens: int | None = None
    speculation_policy: str = SPECULATION_POLICIES[0]
    served_model_name: str = "default"
    served_model_aliases: tuple[str, ...] = ()
    host: str = HOST
    http_port: int = 0
    grpc_port: int = 0
    flags: Mapping[str, tuple[str, ...]] = field(default_factory=dict)
    """Further flags for the scorer, the gateway and the draft, by these names."""

    def __post_init__(self) -> None:
        embedded = self.model == EMBEDDED
        if (
            self.head
            and self.draft_model is None
            and not (embedded and self.head in EMBEDDED_HEADS)
        ):
            brought = ", ".join(sorted(EMBEDDED_HEADS))
            raise ConfigError(
                f"--method {self.head} needs --draft-model: the folder or the Hugging Face id of "
                f"its checkpoint. Only the embedded model brings {brought}."
            )
        if "draft_model" in self.methods and not embedded and self.draft_model is None:
            raise ConfigError(
                "--method draft_model needs --draft-model: the embedded one has another tokenizer. "
                "Name one with the model's tokenizer, or draft without: --method ngram."
            )
        if self.draft_model is not None and not self.drafts_with_model:
            method = ",".join(self.methods) or "none"
            raise ConfigError(f"--draft-model is of no use with --method {method}.")
        if self.drafted_by_vllm and self.methods:
            self.own_speculation()  # raises
        if self._shares_gpu and self.engine != VLLM:  # vLLM has methods of its own, too
            raise ConfigError(
                f"--draft-device {self.draft_device} is the model's own: leave it out, and the "
                "scorer drafts there itself, which is faster than a second process."
            )

    @property
    def head(self) -> str | None:
        """The method among `methods` that reads the target's hidden states."""
        return next((name for name in self.methods if name in HIDDEN_STATE_METHODS), None)

    @property
    def drafts_with_model(self) -> bool:
        return self.head is not None or "draft_model" in self.methods

    @property
    def _gpus(self) -> range:
        """Numbers of the GPUs that the target takes."""
        if self.device == "cpu":
            return range(0)
        first = gpu_index(self.device)
        return range(first, first + num_devices(self.vllm_flags))

    @property
    def _shares_gpu(self) -> bool:
        """Tell whether the draft is to lie on a GPU of the target's."""
        return self.draft_device not in (None, "cpu") and gpu_index(self.draft_device) in self._gpus

    @property
    def drafts_in_scorer(self) -> bool:
        """Tell whether the scorer drafts itself, with one GPU or CPU for both."""
        if self.engine == VLLM:
            return self._shares_gpu and len(self._gpus) == 1
        return self.draft_device is None

    @property
    def drafted_by_vllm(self) -> bool:
        return self.engine == VLLM and self.draft_device is None

    @property
    def max_scored_tokens(self) -> int:
        """The scorer's K: draft tokens that it verifies per request and round."""
        if self.drafted_by_vllm:
            return 0
        limit_themselves = self.methods and SELF_LIMITING_METHODS.issuperset(self.methods)
        if self.num_speculative_tokens is None or limit_themselves:
            return NUM_SPECULATIVE_TOKENS
        return self.num_speculative_tokens

    def own_speculation(self) -> dict[str, object]:
        """Return vLLM's `speculative_config` for methods that vLLM has. Raises `ConfigError`."""
        method, *others = self.methods
        if others or method not in OWN_METHODS:
            beside = "draft beside it, as --draft-device cpu"
            raise ConfigError(
                f"--method {','.join(self.methods)} is not vLLM's own: name one of "
                f"{', '.join(OWN_METHODS)}, or {beside}."
            )
        config: dict[str, object] = {"method": method, "num_speculative_tokens": 4}
        if method == "mtp":
            config["num_speculative_tokens"] = 1  # as many layers as most checkpoints have
        if self.num_speculative_tokens is not None:
            config["num_speculative_tokens"] = self.num_speculative_tokens
        if self.drafts_with_model and self.draft_model != self.model:
            embedded = self.draft_model is None
            role = "draft" if method == "draft_model" else method
            config["model"] = str(resolve_model(EMBEDDED, role)) if embedded else self.draft_model
        given = iter(self.flags.get("draft", ()))
        for flag, value in zip(given, given, strict=True):
            key = flag[2:].replace("-", "_")
            if key not in OWN_SETTINGS:
                raise ConfigError(f"{flag} is not for vLLM's own {method}: leave it out.")
            config[key] = json.loads(value)
        return config


def services(config: ServeConfig, folder: str) -> tuple[ServiceSpec, ...]:
    """Return the processes; proposer and gateway dial the scorer's Unix socket in `folder`."""
    socket_path = f"{folder}/{SOCKET}"
    scorer_address = f"unix:{socket_path}"
    scorer = ServiceSpec("scorer", _argv("scorer_service", *_scorer(config, socket_path)))
    proposer: tuple[ServiceSpec, ...] = ()
    if config.methods and config.draft_device is not None and not config.drafts_in_scorer:
        proposer = (_proposer(config, config.draft_device, scorer_address),)
    flags = ("--scorer", scorer_address, "--model", config.model, "--host", config.host)
    ports = ("--http-port", config.http_port, "--grpc-port", config.grpc_port)
    names = ("--served-model-name", config.served_model_name, *config.served_model_aliases)
    start = ("--start-timeout", START_DEADLINE_S)
    gateway = _argv("gateway", *flags, *ports, *names, *start, *config.flags.get("gateway", ()))
    return (scorer, *proposer, ServiceSpec("gateway", gateway))


def _scorer(config: ServeConfig, socket_path: str) -> Iterator[object]:
    yield from ("--host", HOST, "--port", 0, "--metrics-port", 0, "--listen-unix", socket_path)
    yield from ("--model", config.model)
    yield from ("--served-model-name", config.served_model_name)
    yield from ("--device", config.device, "--dtype", config.dtype)
    yield from ("--threads", _scorer_threads(config))
    yield from ("--speculation-policy", config.speculation_policy)
    yield from ("--engine", config.engine)
    own = config.drafted_by_vllm
    if config.max_scored_tokens != NUM_SPECULATIVE_TOKENS:
        yield from ("--num-speculative-tokens", config.max_scored_tokens)
    within = bool(config.methods) and config.drafts_in_scorer
    if within:
        yield from ("--in-process-proposer", shlex.join(map(str, _draft(config, config.device))))
    elif config.methods and not own and config.head:
        yield from ("--hidden-features", states_read(config.head, config.draft_model))
    yield from config.flags.get("scorer", ())
    if config.engine == VLLM:
        yield from ("--", *config.vllm_flags)
        ahead = "async-scheduling"
        if within and not any(ahead in word for word in config.vllm_flags):
            yield f"--{ahead}"  # else the device would wait for drafts
        if own and config.methods:
            yield from ("--speculative-config", json.dumps(config.own_speculation()))


def _proposer(config: ServeConfig, device: str, scorer_address: str) -> ServiceSpec:
    kind = device.partition(":")[0]
    env = (("CUDA_VISIBLE_DEVICES", _visible(gpu_index(device))),) if kind == "cuda" else ()
    argv = _argv(
        "proposer_service",
        *("--host", HOST, "--scorer", scorer_address, "--port", 0, "--metrics-port", 0),
        *("--proposer-id", f"proposer-{'-'.join(config.methods)}"),
        *_draft(config, kind),
        *(("--device", kind) if config.drafts_with_model else ()),
        *(("--target-model", config.model) if config.head else ()),
    )
    return ServiceSpec("proposer", argv, env, optional=True)


def _draft(config: ServeConfig, device: str) -> Iterator[object]:
    """Yield the flags that say how it drafts."""
    yield from ("--method", ",".join(config.methods))
    if config.drafts_with_model:
        yield from ("--model", config.draft_model or EMBEDDED)
    if device == "cpu" and "draft_model" in config.methods:
        # A model as small as the embedded draft is fastest in float32 on a CPU.
        exact = config.draft_model is None or config.dtype != "bfloat16"
        yield from ("--dtype", "float32" if exact else "bfloat16")
    count = config.num_speculative_tokens
    if count and (SELF_LIMITING_METHODS & {*config.methods} or count > _DEFAULT_MAX_DRAFT_TOKENS):
        yield from ("--max-draft-tokens", count)
    yield from config.flags.get("draft", ())


def _scorer_threads(config: ServeConfig) -> int:
    """Return the threads of torch: of a model on the CPU as many as cores, if they are its own."""
    cores = len(os.sched_getaffinity(0))
    if config.device != "cpu" or config.model == EMBEDDED:
        return 2
    return max(1, cores if cores <= 4 else cores // 2)


def _argv(module: str, *flags: object) -> tuple[str, ...]:
    # -P: a folder called gateway in the working directory is not our gateway.
    python = (sys.executable, "-P", "-m", module, "--exit-with-parent")
    return (*python, "--drain-grace-seconds", str(STOP_GRACE_S / 2), *map(str, flags))


def gpu_index(device: str) -> int:
    """Return a GPU's number."""
    return int(device.partition(":")[2] or 0)


def _visible(index: int) -> str:
    """Return the name of a GPU by its number among those that this process may use."""
    listed = os.environ.get("CUDA_VISIBLE_DEVICES", "")
    names = [name.strip() for name in listed.split(",") if name.strip()]
    if not names:
        return str(index)
    if index >= len(names):
        raise ConfigError(f"there is no GPU {index}: CUDA_VISIBLE_DEVICES is {listed}.")
    return names[index]
