"""The flag `--in-process-proposer`, with its quoted flags of drafting methods."""

from __future__ import annotations

import contextlib
import shlex
from collections.abc import Iterator, Sequence
from dataclasses import replace
from typing import Final

from outrider.aux_layers import states_read
from outrider.drafting.building.config import HeadConfig, MethodConfig, check_methods
from outrider.drafting.building.flags import add_method_flags, take_methods
from outrider.errors import ConfigError
from outrider.flag_types import RaisingParser
from outrider.models.resolve import EMBEDDED

FLAG: Final = "--in-process-proposer"


def take(flags: str, model: str, device: str) -> tuple[MethodConfig, ...]:
    """Return the methods of a scorer of `model` on `device`. Raises `ConfigError`."""
    with naming_flag():
        try:
            words = shlex.split(flags)
        except ValueError as error:
            raise ConfigError(f"{error}: {flags}") from error
        return take_words(words, model, device)


def take_words(words: Sequence[str], model: str, device: str) -> tuple[MethodConfig, ...]:
    """Return the same from flags that are split. Raises `ConfigError`."""
    parser = RaisingParser(prog=FLAG, add_help=False)
    add_method_flags(parser, device.partition(":")[0])
    args = parser.parse_args(words)
    if args.target_model not in (EMBEDDED, model):
        raise ConfigError(f"--target-model {args.target_model} is not the --model {model}.")
    methods = take_methods(args)
    check_methods(methods)
    return tuple(_within(method, model) for method in methods)


@contextlib.contextmanager
def naming_flag() -> Iterator[None]:
    """Name the flag in a `ConfigError`, whose message speaks of the quoted flags."""
    try:
        yield
    except ConfigError as error:
        raise ConfigError(f"{FLAG}: {error.message}") from error


def states_of(methods: Sequence[MethodConfig]) -> str | None:
    """Return the `--hidden-features` that the methods read; None for none."""
    for method in methods:
        if isinstance(method, HeadConfig):
            return states_read(method.name, method.model)
    return None


def _within(method: MethodConfig, model: str) -> MethodConfig:
    """Return the method for this target, without drafts ahead, which find no time here."""
    if isinstance(method, HeadConfig):
        method = replace(method, target_model=model)
    return replace(method, max_branches=0)
