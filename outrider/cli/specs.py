"""What a stack is to serve, and the command lines of its services."""

from __future__ import annotations

import shlex
import sys
from dataclasses import dataclass
from pathlib import Path

from outrider.aux_layers import states_read
from outrider.cli.process import ServiceSpec
from outrider.config import SPECULATION_POLICIES
from outrider.errors import ConfigError
from outrider.methods import HIDDEN_STATE_METHODS
from outrider.models.resolve import EMBEDDED_HEADS, resolve_model
from outrider.models.tokenizer import tokenizer_hash

HOST = "127.0.0.1"
# Children get this long between SIGTERM and SIGKILL: with it, Ctrl-C ends everything in under 2 s.
STOP_GRACE_S = 1.0
# A model may have to be downloaded first.
START_DEADLINE_S = 900.0

WITHOUT_DRAFT_MODEL = "Name another --draft-model, or draft without a model: --method ngram."
"""What to do about a draft that does not fit its target."""


@dataclass(frozen=True, slots=True)
class StackConfig:
    """What to serve; `None` for a model means the embedded one, 0 for a port a free one."""

    http_port: int = 0
    grpc_port: int = 0
    unasked_ports: frozenset[int] = frozenset()  # of these: another one will do if it is taken
    model: str | None = None
    draft_model: str | None = None
    methods: tuple[str, ...] = ("draft_model",)  # none: no proposer
    in_process: bool = False  # the scorer drafts, without a proposer beside it
    num_speculative_tokens: int = 4
    speculation_policy: str = SPECULATION_POLICIES[0]
    dtype: str = "float32"
    seed: int | None = None
    served_model_name: str = "default"

    def __post_init__(self) -> None:
        drafts = "draft_model" in self.methods
        head = self.head
        embedded = self.model is None and head in EMBEDDED_HEADS
        if head and self.draft_model is None and not embedded:
            raise ConfigError(
                f"--method {head} needs --draft-model: the folder or the Hugging Face id of its "
                "checkpoint."
            )
        if drafts and self.model is not None and self.draft_model is None:
            raise ConfigError(
                "--model without --draft-model: the embedded draft model has another tokenizer. "
                "Name a --draft-model with the same tokenizer, or use another --method."
            )
        if not (drafts or head) and self.draft_model is not None:
            method = ",".join(self.methods) or "none"
            raise ConfigError(f"--draft-model is of no use with --method {method}.")

    @property
    def head(self) -> str | None:
        """The method among `methods` that reads the target's hidden states."""
        return next((name for name in self.methods if name in HIDDEN_STATE_METHODS), None)


def check_tokenizers(config: StackConfig) -> None:
    """Raise `ConfigError` if the draft model has another tokenizer than the target.

    Before anything is loaded, of models that are on disk; of others the scorer refuses it.
    """
    if "draft_model" not in config.methods or config.draft_model is None:
        return
    target = resolve_model(None, "target") if config.model is None else Path(config.model)
    folders = [folder.expanduser() for folder in (target, Path(config.draft_model))]
    if not all((folder / "tokenizer.json").is_file() for folder in folders):
        return
    if len({tokenizer_hash(folder) for folder in folders}) > 1:
        raise ConfigError(
            f"{config.draft_model} has another tokenizer than {config.model or 'the embedded'} "
            f"target: the same id would mean different text. {WITHOUT_DRAFT_MODEL}"
        )


def scorer_spec(config: StackConfig, port: int, socket_path: str) -> ServiceSpec:
    """Return the scorer's command line; proposers dial its Unix socket.

    Two OpenMP threads: one is left to the proposer's forward.
    """
    within = config.in_process and config.methods
    return _spec(
        "scorer",
        "scorer_service",
        *("--port", port, "--listen-unix", socket_path, "--metrics-port", 0),
        *("--model", config.model or "embedded"),
        *("--served-model-name", config.served_model_name, "--dtype", config.dtype),
        *("--num-speculative-tokens", config.num_speculative_tokens, "--threads", 2),
        *("--speculation-policy", config.speculation_policy),
        *(
            ("--hidden-features", states_read(config.head, config.draft_model))
            if config.head
            else ()
        ),
        *(("--in-process-proposer", shlex.join(_method_flags(config))) if within else ()),
    )


def proposer_spec(config: StackConfig, scorer_address: str) -> ServiceSpec:
    """Return the proposer's command line; more than one thread slows the scorer down."""
    target = ("--target-model", config.model or "embedded")
    return _spec(
        "proposer",
        "proposer_service",
        *("--scorer", scorer_address, "--port", 0, "--metrics-port", 0, "--threads", 1),
        *("--proposer-id", f"proposer-{'-'.join(config.methods)}"),
        *_method_flags(config),
        *(target if config.head else ()),
    )


def _method_flags(config: StackConfig) -> tuple[str, ...]:
    """How it drafts."""
    # A draft's precision cannot change the text, and a model as small as the embedded draft is
    # fastest in float32 on CPU.
    dtype = config.dtype if config.draft_model else "float32"
    model: tuple[str, ...] = ("--model", config.draft_model or "embedded")
    if not config.head:
        model = (*model, "--dtype", dtype)
    # A default of the proposer's is longer for methods that are made for long drafts.
    longer = config.num_speculative_tokens > 16 and not {"suffix", "deterministic"} & {
        *config.methods
    }
    return (
        *("--method", ",".join(config.methods)),
        *(("--max-draft-tokens", str(config.num_speculative_tokens)) if longer else ()),
        *(model if config.head or "draft_model" in config.methods else ()),
    )


def gateway_spec(config: StackConfig, scorer_address: str) -> ServiceSpec:
    """Return the gateway's command line."""
    return _spec(
        "gateway",
        "gateway",
        *("--scorer", scorer_address, "--http-port", config.http_port),
        *("--grpc-port", config.grpc_port, "--model", config.model or "embedded"),
        *("--served-model-name", config.served_model_name),
        *("--start-timeout", START_DEADLINE_S),
        *(("--seed", config.seed) if config.seed is not None else ()),
    )


def _spec(name: str, module: str, *args: object) -> ServiceSpec:
    # -P: a folder called gateway in the working directory is not our gateway.
    python = (sys.executable, "-P", "-m", module, "--host", HOST, "--exit-with-parent")
    flags = ("--drain-grace-seconds", STOP_GRACE_S / 2, *args)
    return ServiceSpec(name, (*python, *map(str, flags)))
