"""`--in-process-proposer`: the quoted flags of drafting methods."""

from __future__ import annotations

import argparse
import shlex
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import NoReturn

from outrider.aux_layers import states_read
from outrider.drafting.building.config import HeadConfig, MethodConfig, check_methods
from outrider.drafting.building.flags import add_method_flags, take_methods
from outrider.errors import ConfigError
from outrider.models.resolve import EMBEDDED, resolve_model


def take(flags: str, model: str, device: str) -> tuple[MethodConfig, ...]:
    """The methods of a scorer of `model` on `device`. Raises `ConfigError`."""
    parser = _Parser(prog="--in-process-proposer", add_help=False)
    add_method_flags(parser, device.partition(":")[0])
    try:
        words = shlex.split(flags)
    except ValueError as error:
        raise ConfigError(f"--in-process-proposer: {error}: {flags}") from error
    methods = take_methods(parser.parse_args(words))
    check_methods(methods)
    return tuple(_within(method, model) for method in methods)


def states_of(methods: Sequence[MethodConfig]) -> str | None:
    """What they read of the target's hidden states, for `--hidden-features`."""
    for method in methods:
        if isinstance(method, HeadConfig):
            embedded = method.model == EMBEDDED
            folder = resolve_model(None, method.name) if embedded else Path(method.model)
            return states_read(method.name, folder.expanduser())
    return None


def _within(method: MethodConfig, model: str) -> MethodConfig:
    """Drafts when a step has ended, never ahead, and for this target alone."""
    if isinstance(method, HeadConfig):
        method = replace(method, target_model=model)
    return replace(method, max_branches=0)


class _Parser(argparse.ArgumentParser):
    def error(self, message: str) -> NoReturn:
        raise ConfigError(f"--in-process-proposer: {message}")
