"""The command line's flags of drafting methods."""

from __future__ import annotations

import argparse
from typing import Any

from outrider.drafting.building.config import (
    DeterministicConfig,
    DraftModelConfig,
    HeadConfig,
    MethodConfig,
    ModelConfig,
    NgramConfig,
    SuffixConfig,
)
from outrider.drafting.copying.suffix_settings import SuffixSettings
from outrider.drafting.proposer import TREE_WIDTH
from outrider.errors import ConfigError
from outrider.methods import HIDDEN_STATE_METHODS, METHODS, parse_methods

_BESIDE_OTHERS = 5  # draft tokens of a model: K is then also that of methods that cost nothing
_CUDA_KV_CACHE = 4096  # MiB; a part of the device, which the proposer may share with a scorer
_SUFFIX_FLAGS = {
    "max_tree_depth": "tokens of context that are matched at most",
    "max_spec_factor": "draft tokens per token of context that matches",
    "min_token_prob": "least estimated probability of a draft's tokens, multiplied",
    "max_cached_requests": "earlier responses to draft from; 0: none",
    "max_cached_tokens": "their tokens, all tenants together",
}


def add_method_flags(parser: argparse.ArgumentParser, device: str) -> None:
    """Add them, each with its default; `device`: where models draft unless it is said."""
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
        help="of a model: flash, flashinfer, triton, sdpa; unset: the best that fits",
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
        help="suffix: draft from responses to other tenants, too: what they were answered can "
        "then be told from drafts and their speed",
    )


def take_methods(args: argparse.Namespace) -> tuple[MethodConfig, ...]:
    """The methods that the flags describe. Raises `ConfigError`."""
    methods = tuple(_method(name, args) for name in args.method)
    if args.model is not None and not any(isinstance(each, ModelConfig) for each in methods):
        raise ConfigError(
            f"--model is of no use with --method {','.join(args.method)}: leave it out, or add a "
            "method that reads a model, such as draft_model."
        )
    return methods


def _method(name: str, args: argparse.Namespace) -> MethodConfig:
    """One method as the flags describe it. Raises `ConfigError`."""
    given = {"max_draft_tokens": args.max_draft_tokens, "max_branches": args.max_branches}
    common: dict[str, Any] = {key: value for key, value in given.items() if value is not None}
    if name == "ngram":
        return NgramConfig(
            prompt_lookup_min=args.prompt_lookup_min,
            prompt_lookup_max=args.prompt_lookup_max,
            prefer=args.prompt_lookup_prefer,
            **common,
        )
    if name == "suffix":
        settings = {key: getattr(args, f"suffix_decoding_{key}") for key in _SUFFIX_FLAGS}
        shared = args.shared_memory_across_tenants
        return SuffixConfig(
            settings=SuffixSettings(**settings, shared_across_tenants=shared), **common
        )
    if name == "deterministic":
        return DeterministicConfig(**common)
    return _model(name, args, common)


def _model(name: str, args: argparse.Namespace, common: dict[str, Any]) -> ModelConfig:
    """A method with weights."""
    on_cuda, draft = args.device == "cuda", DraftModelConfig()
    if len(args.method) > 1:
        common.setdefault("max_draft_tokens", _BESIDE_OTHERS)
    common |= {
        "model": draft.model if args.model is None else args.model,
        "dtype": args.dtype,
        "threads": args.threads,
        "kv_cache_memory": args.kv_cache_memory
        or (_CUDA_KV_CACHE if on_cuda else draft.kv_cache_memory),
        "max_model_len": args.max_model_len,
        "device": args.device,
        "attention_backend": args.attention_backend,
        "quantization": args.quantization,
    }
    if name in HIDDEN_STATE_METHODS:
        return HeadConfig(
            name=name,
            target_model=args.target_model,
            tree_width=args.tree_width,
            project_features=args.project_features,
            **common,
        )
    if not on_cuda:
        common.setdefault("max_branches", 0)
    return DraftModelConfig(**common)
