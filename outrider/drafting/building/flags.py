"""The command line's flags of drafting methods."""

from __future__ import annotations

import argparse
from dataclasses import fields

from outrider.drafting.building.config import (
    CONFIGS,
    DraftModelConfig,
    MethodConfig,
    ModelConfig,
    NgramConfig,
    SuffixConfig,
)
from outrider.drafting.copying.suffix_settings import SuffixSettings
from outrider.drafting.proposer import TREE_WIDTH
from outrider.errors import ConfigError
from outrider.methods import METHODS, parse_methods

_BESIDE_OTHERS = 5  # draft tokens of a model beside methods that cost nothing
_CUDA_KV_CACHE = 4096  # MiB of a device that the proposer may share with a scorer
_SUFFIX_FLAGS = {
    "max_tree_depth": "tokens of context that are matched at most",
    "max_spec_factor": "draft tokens per token of context that matches",
    "min_token_prob": "least estimated probability of a draft's tokens, multiplied",
    "max_cached_requests": "earlier responses to draft from; 0: none",
    "max_cached_tokens": "their tokens, all tenants together",
}


def add_method_flags(parser: argparse.ArgumentParser, device: str) -> None:
    """Add the flags with their defaults; models draft on `device` unless a flag names another."""
    ngram, draft, suffix = NgramConfig(), DraftModelConfig(), SuffixSettings()
    add = parser.add_argument
    add(
        "--method",
        type=parse_methods,
        default="draft_model",
        metavar="NAME[,...]",
        help=f"{', '.join(METHODS)}; inference_with_reference is another name for ngram; of "
        "several, the first that has a guess drafts",
    )
    add(
        "--max-draft-tokens",
        type=int,
        help="draft tokens per round at most; unset: 16 for models (5 beside other methods) and "
        "ngram, 24 for suffix, 128 for deterministic",
    )
    add(
        "--max-branches",
        type=int,
        help="outcomes of a verification drafted for ahead of it, per session at most; 0: none; "
        "unset: 16, but none for a draft model on CPU, where that costs more than it hides",
    )
    add(
        "--model",
        help="draft_model: embedded, a folder, Hugging Face id; for methods that read hidden "
        f"states their checkpoint, likewise; unset: {draft.model}",
    )
    add(
        "--target-model",
        default="embedded",
        help="methods that read hidden states: the model that the scorer serves",
    )
    add(
        "--tree-width",
        type=int,
        default=TREE_WIDTH,
        help="methods that read hidden states: children of a node of the draft tree that are "
        "looked at, and nodes of a depth that may get some; 1: drafts are chains",
    )
    add(
        "--project-features",
        action=argparse.BooleanOptionalAction,
        help="eagle3: let the scorer apply the module's first product, so that it sends one "
        "state per token instead of three; unset: on CUDA",
    )
    add(
        "--dtype",
        choices=("float32", "bfloat16"),
        help="of a model; unset: bfloat16 on CUDA, and on CPUs with AVX-512 for one that reads "
        "hidden states; else float32",
    )
    add("--device", choices=("cpu", "cuda"), default=device, help="of a model")
    add(
        "--quantization",
        choices=("int8", "none"),
        help="of a model's weights; unset: int8 on CUDA in bfloat16, beside the weights as they "
        "are, for products of few rows that it makes faster",
    )
    add(
        "--attention-backend",
        help="of a model: flash, flash_attn, flashinfer, triton, sdpa; unset: the best that fits",
    )
    add("--threads", type=int, default=draft.threads, help="of a model: CPU threads")
    add(
        "--kv-cache-memory",
        type=int,
        help=f"of a model: MiB; unset: {draft.kv_cache_memory} on a CPU, {_CUDA_KV_CACHE} on CUDA",
    )
    add("--max-model-len", type=int, help="of a model: longest context drafted for; unset: its own")
    add("--prompt-lookup-min", type=int, default=ngram.prompt_lookup_min, help="ngram")
    add("--prompt-lookup-max", type=int, default=ngram.prompt_lookup_max, help="ngram")
    add(
        "--prompt-lookup-prefer",
        dest="prefer",
        choices=("recent", "frequent"),
        default=ngram.prefer,
        help="ngram: which of several matches",
    )
    for name, what in _SUFFIX_FLAGS.items():
        default = getattr(suffix, name)
        flag = f"--suffix-decoding-{name.replace('_', '-')}"
        add(flag, type=type(default), default=default, help=f"suffix: {what}")
    add(
        "--shared-memory-across-tenants",
        action=argparse.BooleanOptionalAction,
        default=False,
        help="suffix: draft from responses to other tenants, too, which drafts and their "
        "speed may then reveal",
    )


def take_methods(args: argparse.Namespace) -> tuple[MethodConfig, ...]:
    """Return the methods that the flags describe. Raises `ConfigError`."""
    methods = tuple(_method(name, args) for name in args.method)
    if args.model is not None and not any(isinstance(each, ModelConfig) for each in methods):
        raise ConfigError(
            f"--model is of no use with --method {','.join(args.method)}: leave it out, or add a "
            "method that reads a model, such as draft_model."
        )
    return methods


def _method(name: str, args: argparse.Namespace) -> MethodConfig:
    """Return one method; its settings are the flags of the same names that are set."""
    config, given = CONFIGS[name], {**vars(args), "name": name}
    if config is SuffixConfig:
        settings = {key: given[f"suffix_decoding_{key}"] for key in _SUFFIX_FLAGS}
        shared = args.shared_memory_across_tenants
        given["settings"] = SuffixSettings(**settings, shared_across_tenants=shared)
    values = {
        each.name: given[each.name] for each in fields(config) if given.get(each.name) is not None
    }
    if issubclass(config, ModelConfig):
        if len(args.method) > 1:
            values.setdefault("max_draft_tokens", _BESIDE_OTHERS)
        if args.device == "cuda":
            values.setdefault("kv_cache_memory", _CUDA_KV_CACHE)
        elif config is DraftModelConfig:
            values.setdefault("max_branches", 0)
    return config(**values)
