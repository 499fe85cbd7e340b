"""`speculative_config`, a dict as vLLM takes it, as methods that draft in this process."""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import fields
from types import MappingProxyType
from typing import Any, Final, NamedTuple, cast

from outrider.cli.dialects import VLLM
from outrider.drafting.building.config import CONFIGS, MethodConfig
from outrider.errors import ConfigError
from outrider.methods import HIDDEN_STATE_METHODS, METHOD_ALIASES, METHODS
from outrider.models.facts import drafting_method
from outrider.models.resolve import resolve_model
from outrider.params import MAX_SPECULATIVE_TOKENS
from scorer_service.drafting.in_process_flags import FLAG, take_words

DEFAULT_TOKENS: Final = 4
_ALIASES: Final = {"[ngram]": "ngram", "vanilla": "draft_model", **METHOD_ALIASES}
_RULES: Final = VLLM.flags["--speculative-config"].keys or {}
_OURS: Final = re.compile(rf"(argument )?({FLAG}: |(?=--synthetic-))")
"""Begins errors about flags that the caller has not given."""


class Speculation(NamedTuple):
    """The methods, and the draft tokens per round at most."""

    methods: tuple[MethodConfig, ...] = ()
    num_tokens: int = 0
    synthetic_rates: Any = None  # as they are given, and so is the length
    synthetic_length: Any = None


def read_speculation(config: Mapping[str, Any] | None, model: str, device: str) -> Speculation:
    """Return what a `speculative_config` asks for. Raises `ConfigError`, naming the setting.

    Errors name flags of `outrider batch`, and settings of this object by their own names.
    """
    if config is None or config == {}:
        return Speculation()
    if not isinstance(config, Mapping):
        raise _error('give an object, as {"method": "ngram"}')
    settings = {key: value for key, value in config.items() if value is not None}
    rates = settings.pop("synthetic_acceptance_rates", None)
    length = settings.pop("synthetic_acceptance_length", None)
    synthetic = settings.get("rejection_sample_method") == "synthetic"
    if synthetic and not rates and length is None:
        raise _error("synthetic needs synthetic_acceptance_rates or synthetic_acceptance_length")
    draft = str(settings.pop("model", "") or "")
    if switched_off(config):
        if rates or length is not None:
            raise _error("synthetic acceptance is of drafts: give num_speculative_tokens above 0")
        return Speculation()
    tokens = settings.pop("num_speculative_tokens", DEFAULT_TOKENS)
    if type(tokens) is not int or not 1 <= tokens <= MAX_SPECULATIVE_TOKENS:
        raise _error(f"num_speculative_tokens is a number from 0 to {MAX_SPECULATIVE_TOKENS}")
    method = _method(str(settings.pop("method", "")), draft)
    words = [f"--method={method}"]
    if method in (*HIDDEN_STATE_METHODS, "draft_model"):
        if not draft and method == "mtp":
            draft = model  # the module within the target's checkpoint
        if not draft:
            raise _error(f"method {method} needs model, its checkpoint: a folder or an id")
        words.append(f"--model={draft}")
    elif draft and draft not in _ALIASES:
        raise _error(f"method {method} reads no model: leave model out")
    defaults = {each.name: each.default for each in fields(CONFIGS[method])}
    if tokens > cast("int", defaults["max_draft_tokens"]):
        settings.setdefault("max_draft_tokens", tokens)
    for key, value in settings.items():
        flag, rule = key.replace("_", "-"), _RULES.get(key)
        if rule is not None and rule.ours is None:
            if rule.refusal is not None and str(value) not in rule.harmless:
                raise _error(f"{key} {value}: {rule.refusal}")
        elif isinstance(value, bool):
            words.append(f"--{flag}" if value else f"--no-{flag}")
        else:
            words.append(f"--{flag}={value}")
    try:
        return Speculation(take_words(words, model, device), tokens, rates, length)
    except ConfigError as error:
        raise _of_flags(error.message) from error


@contextmanager
def naming_config() -> Iterator[None]:
    """Name the settings, in a scorer's errors about flags that stand for them."""
    try:
        yield
    except ConfigError as error:
        if (found := _OURS.match(error.message)) is None:
            raise
        raise _of_flags(error.message[found.end() :]) from error


def switched_off(config: object) -> bool:
    """Tell whether a `speculative_config` asks for no draft tokens, whatever the method."""
    given = config.get("num_speculative_tokens") if isinstance(config, Mapping) else None
    return type(given) is int and given == 0


def _method(name: str, draft: str) -> str:
    """Return the method's own name; without one, what the draft's files or name tell."""
    if not name:
        if not draft:
            raise _error("give a method, such as ngram, or a model that drafts")
        where = None if draft in _ALIASES else resolve_model(draft, "draft", tokenizer_only=True)
        name = draft if where is None else drafting_method(draft, where)
    name = _ALIASES.get(name, "mtp" if name.endswith("_mtp") else name)
    if name not in METHODS:
        raise _error(f"method {name!r} is none of {', '.join(METHODS)}")
    return name


def _of_flags(message: str) -> ConfigError:
    return _error(with_names(message))


def _error(message: str) -> ConfigError:
    return ConfigError(f"--speculative-config: {message.removesuffix('.')}.")


def with_names(message: str, names: Mapping[str, str] = MappingProxyType({})) -> str:
    """Return a message about flags as one about arguments; `names` are the others' names.

    Commands that a message advises stay as they are.
    """

    def named(found: re.Match[str]) -> str:
        word = found[0].removeprefix("--").replace("-", "_")
        if " " in word or (word == found[0] and "_" not in word and found.start()):
            return found[0]  # a command, or a word of plain English
        return names.get(word, word)

    return re.sub(r"outrider serve[^.;]*|(?<![\w-])--[a-z][a-z-]*|\w+", named, message)
