"""The flags of `serve` and `demo`. Imports nothing that takes time."""

from __future__ import annotations

import argparse
import re
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, Final

from outrider import flag_types
from outrider.config import DTYPES, SPECULATION_POLICIES
from outrider.engines import AUTO, ENGINES
from outrider.methods import METHODS
from outrider.vllm.flags import add_parallel_flags


@dataclass(frozen=True, slots=True)
class PassedFlag:
    """A flag that goes to a service as it is, perhaps under another name there."""

    service: str
    name: str
    type: Callable[[str], Any]
    about: str
    theirs: str | None = None
    repeated: bool = False  # may be given several times


PASSED: Final = (
    PassedFlag("scorer", "max-model-len", flag_types.positive, "context; default: the model's"),
    PassedFlag("scorer", "max-num-seqs", flag_types.positive, "requests in a batch (128)"),
    PassedFlag("scorer", "max-num-batched-tokens", flag_types.positive, "tokens in a step"),
    PassedFlag("scorer", "gpu-memory-utilization", flag_types.part, "part of a GPU to use (0.9)"),
    PassedFlag("scorer", "kv-cache-memory", flag_types.positive, "MiB for keys and values"),
    PassedFlag("scorer", "page-size", flag_types.positive, "tokens per page of the KV cache"),
    PassedFlag("scorer", "threads", flag_types.positive, "of torch; default: the CPU's cores"),
    PassedFlag("scorer", "quantization", str, "of weights, on load: int8, fp8 or none"),
    PassedFlag("scorer", "kv-cache-dtype", str, "of keys and values: auto (the model's) or fp8"),
    PassedFlag(
        *("scorer", "synthetic-acceptance-rates", flag_types.rates),
        "for benchmarks only: accept drafts at these rates, whatever the model says",
    ),
    PassedFlag(
        *("scorer", "synthetic-acceptance-length", float), "the same by the mean tokens of a round"
    ),
    PassedFlag("scorer", "attention-backend", str, "flash, triton, numba or sdpa"),
    PassedFlag("gateway", "seed", flag_types.seed, "of requests that give none; default: new ones"),
    PassedFlag("gateway", "default-max-tokens", flag_types.positive, "for requests that set none"),
    PassedFlag("gateway", "max-in-flight", flag_types.positive, "completions at once (256)"),
    PassedFlag("gateway", "workers", flag_types.positive, "processes; default: by cores (4 each)"),
    PassedFlag("gateway", "api-key-file", str, "one key per line; default: anyone may ask"),
    PassedFlag("gateway", "cors-origin", str, "of a web page that may call, or *", repeated=True),
    PassedFlag("gateway", "tool-call-parser", str, "format of tool calls (as the template shows)"),
    PassedFlag("gateway", "reasoning-parser", str, "format of reasoning (likewise); none: none"),
    PassedFlag("draft", "max-draft-tokens", flag_types.positive, "per round at most"),
    PassedFlag("draft", "prompt-lookup-min", flag_types.positive, "ngram: shortest match (2)"),
    PassedFlag("draft", "prompt-lookup-max", flag_types.positive, "ngram: longest match (4)"),
    PassedFlag("draft", "suffix-decoding-max-tree-depth", flag_types.positive, "suffix (24)"),
    PassedFlag("draft", "suffix-decoding-max-spec-factor", float, "suffix (1.0)"),
    PassedFlag("draft", "suffix-decoding-min-token-prob", float, "suffix (0.1)"),
    PassedFlag("draft", "suffix-decoding-max-cached-requests", flag_types.whole_number, "suffix"),
    PassedFlag("draft", "tree-width", flag_types.positive, "of a head's draft tree; 1: chains"),
    PassedFlag(
        "draft", "draft-quantization", str, "of its weights: int8, none, fp8 (GPU)", "quantization"
    ),
    PassedFlag("draft", "draft-max-model-len", flag_types.positive, "its context", "max-model-len"),
    PassedFlag("draft", "draft-kv-cache-memory", flag_types.positive, "MiB", "kv-cache-memory"),
)
"""Flags that the services check; `outrider scorer --help` and its like say more."""
_IN_PROCESS: Final = "--in-process-proposer: "
_OF_DRAFT: Final = {"--model": "--draft-model"} | {
    f"--{flag.theirs}": f"--{flag.name}" for flag in PASSED if flag.theirs
}


def in_own_flags(message: str) -> str:
    """Return an error of a service that drafts, with the flags of `serve`."""
    before, inside, said = message.partition(_IN_PROCESS)
    if not inside:
        before, said = "", message
    if not (inside or message.startswith("the proposer ")):
        return message
    return before + re.sub(r"--[a-z-]+", lambda flag: _OF_DRAFT.get(flag[0], flag[0]), said)


def add_model_flags(parser: argparse.ArgumentParser) -> None:
    """Add the flags that say which model is served, on what, and how it is drafted for."""
    add = parser.add_argument
    add("model", nargs="?", metavar="MODEL", help="embedded, a folder, or a Hugging Face id")
    add("--model", dest="named_model", metavar="MODEL", help="the same, as a flag")
    add("--device", type=flag_types.device, help="cpu, cuda or, say, cuda:1; default: a GPU if any")
    add(
        "--dtype",
        choices=("auto", *DTYPES),
        default="auto",
        help="auto: on a GPU the checkpoint's own; float32 on a CPU, where the text is equal to "
        "the last bit with and without speculation (default: %(default)s)",
    )
    add(
        "--engine",
        choices=ENGINES,
        default=AUTO,
        help="native: Outrider's own; vllm: everything that vLLM serves, and vLLM's own flags may "
        "follow after --; auto: native for what it serves exactly and faster, else vllm (default: "
        "%(default)s)",
    )
    add_parallel_flags(parser)
    add(
        "--method",
        type=flag_types.methods,
        metavar="NAME[,...]",
        help=f"who drafts: {', '.join(METHODS)}, or several, of which the first that has a guess "
        "does; or none. Default: what --draft-model was made for, else the checkpoint's own "
        "prediction module (mtp), else prompt lookup (ngram)",
    )
    add(
        "--draft-model",
        metavar="NAME",
        help="embedded, a folder, or a Hugging Face id: a model with the same tokenizer, or a head "
        "that was made for the model",
    )
    add(
        "--num-speculative-tokens",
        type=flag_types.speculative_tokens,
        metavar="K",
        help="draft tokens per round at most; default: 4, and more for methods that limit "
        "themselves",
    )
    add(
        "--draft-device",
        type=flag_types.device,
        metavar="DEVICE",
        help="draft in a process of its own, which runs ahead: cpu, or another GPU, as cuda:1; "
        "vLLM's own GPU: in its worker. Default: in the scorer's process, between its steps",
    )
    add(
        "--speculation-policy",
        choices=SPECULATION_POLICIES,
        default=SPECULATION_POLICIES[0],
        help="adaptive: as many draft tokens as are the fastest; fixed: K in every round; "
        "off: none (default: %(default)s)",
    )


def add_passed_flags(parser: argparse.ArgumentParser) -> None:
    """Add the flags of `PASSED`."""
    for service in ("scorer", "gateway", "draft"):
        group = parser.add_argument_group(f"flags for the {service}")
        for flag in PASSED:
            if flag.service == service:
                group.add_argument(
                    f"--{flag.name}",
                    type=flag.type,
                    action="append" if flag.repeated else "store",
                    metavar="X",
                    help=flag.about,
                )
    parser.add_argument(
        "--enable-prefix-caching", action=argparse.BooleanOptionalAction, default=True
    )
    parser.add_argument(
        "--no-playground", dest="playground", action="store_false", help="no page at /"
    )
