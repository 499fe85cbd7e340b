"""The command line's flags of drafting methods: one for each setting of a method's config."""

from __future__ import annotations

import argparse
from dataclasses import fields

from outrider.drafting.building.config import (
    CONFIGS,
    DraftModelConfig,
    MethodConfig,
    ModelConfig,
    SuffixConfig,
)
from outrider.drafting.copying.suffix_settings import SuffixSettings
from outrider.errors import ConfigError
from outrider.methods import METHODS, parse_methods
from outrider.settings import add_flag, settings_of

_BESIDE_OTHERS = 5  # draft tokens of a model beside methods that cost nothing
_CUDA_KV_CACHE = 4096  # MiB of a device that the proposer may share with a scorer
_SUFFIX = settings_of(SuffixSettings)


def add_method_flags(parser: argparse.ArgumentParser, device: str) -> None:
    """Add the flags with their defaults; models draft on `device` unless a flag names another."""
    parser.add_argument(
        "--method",
        type=parse_methods,
        default="draft_model",
        metavar="NAME[,...]",
        help=f"{', '.join(METHODS)}; inference_with_reference is another name for ngram; of "
        "several, the first that has a guess drafts",
    )
    settings = {each.name: each for config in CONFIGS.values() for each in settings_of(config)}
    for each in (*settings.values(), *_SUFFIX):
        add_flag(parser, each)
    parser.set_defaults(device=device)


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
        settings = {each.name: given[each.name] for each in _SUFFIX}
        given["settings"] = SuffixSettings(**settings)
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
