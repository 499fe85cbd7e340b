"""Read the command lines of other engines by the tables of `dialects`."""

from __future__ import annotations

import json
import shlex
from collections.abc import Iterator, Mapping, Sequence
from typing import Any, Final

from outrider.cli.dialects import DIALECTS, PROGRAM_WORDS, Rule
from outrider.errors import ConfigError

_RULES: Final[dict[str, Rule]] = {
    flag: rule for dialect in DIALECTS.values() for flag, rule in dialect.flags.items()
}


def translate(words: Sequence[str], environment: Mapping[str, str]) -> tuple[list[str], list[str]]:
    """Return the words after `outrider serve` in our flags, and notes for the user.

    Raises `ConfigError` that names every flag which cannot be taken, with what to write instead.
    """
    reader = _Reader()
    for dialect in DIALECTS.values():
        if dialect.leading in environment:
            for variable, flag in dialect.variables.items():
                if variable in environment:
                    reader.take(variable, flag, environment[variable])
    reader.read(words)
    reader.check_needs()
    if reader.refusals:
        raise ConfigError("; ".join(reader.refusals) + ".")
    if reader.foreign:
        said = shlex.join(["outrider", "serve", *reader.words])
        reader.notes.append(f"in Outrider's own words: {said}")
    return reader.words, reader.notes


class _Reader:
    """Collects words of ours."""

    def __init__(self) -> None:
        self.words: list[str] = []
        self.notes: list[str] = []
        self.refusals: list[str] = []
        self.needs: list[tuple[tuple[str, ...], str]] = []  # refusals without our flags
        self.foreign = False  # some flag is another engine's

    def read(self, words: Sequence[str]) -> None:
        """Translate words one after another."""
        rest = list(words)
        ours = False  # the word before is a flag of ours, which may take this word
        while rest:
            word = rest.pop(0)
            name, equals, value = word.partition("=")
            if not word.startswith("-"):
                if ours or word not in PROGRAM_WORDS:
                    self.words.append(word)
                else:
                    self.foreign = True
                ours = False
                continue
            flag, _, key = _with_hyphens(name).partition(".")
            rule = _RULES.get(flag)
            if rule is None:
                self.words.append(_with_hyphens(name) + equals + value)
                ours = not equals
                continue
            ours = False
            truth = bool(rest) and rest[0].lower() in ("0", "1", "true", "false")
            if not equals and (rule.takes == "one" or (rule.takes == "maybe" and truth)):
                if not rest or rest[0].startswith("--"):
                    self.refusals.append(f"{name} lacks its value")
                    continue
                value = rest.pop(0)
            if key:  # vLLM's --speculative-config.method
                value = json.dumps({key.replace("-", "_"): value})
            self.take(name, flag, value)

    def take(self, name: str, flag: str, value: str) -> None:
        """Translate one flag or variable, called `name` by the user."""
        rule = _RULES.get(flag, Rule(flag))
        if rule.keys is not None:
            for key, item in self._object(name, value):
                if key in rule.keys:
                    self._apply(f"{name}'s {key}", rule.keys[key], item)
                else:
                    self.refusals.append(f"{name}: {key} is unknown; {', '.join(rule.keys)} are")
            return
        self._apply(name, rule, value)

    def check_needs(self) -> None:
        """Refuse what was taken on account of flags that did not come."""
        given = {word.partition("=")[0] for word in self.words}
        self.refusals += [refusal for flags, refusal in self.needs if given.isdisjoint(flags)]

    def _apply(self, name: str, rule: Rule, value: str) -> None:
        known = value.lower() in rule.harmless
        if rule.refusal is not None and not known:
            shown = "" if rule.secret else value
            self.refusals.append(f"{name} {shown}".rstrip() + f": {rule.refusal}")
        elif rule.note is not None:
            self.foreign = True
            self.notes.append(f"{name} {value}".rstrip() + f" is not needed: {rule.note}")
            if rule.needs is not None:
                self.needs.append((rule.needs[0], f"{name} {value}: {rule.needs[1]}"))
        else:
            self._put(name, rule, value)

    def _put(self, name: str, rule: Rule, value: str) -> None:
        theirs = rule.values.get(value.lower(), value)
        own = [theirs] if theirs.startswith("--") else []
        if rule.ours is not None and not own:
            own = [rule.ours, rule.convert(theirs)]
        self.foreign = self.foreign or [_with_hyphens(name), value] != own
        self.words += [*own, *rule.also]

    def _object(self, name: str, text: str) -> Iterator[tuple[str, str]]:
        """Yield the keys of a JSON object and their values as flags have them."""
        try:
            fields: Any = json.loads(text)
        except ValueError:
            fields = None
        if not isinstance(fields, dict):
            self.refusals.append(f"""{name} takes a JSON object, such as '{{"method": "ngram"}}'""")
            return
        for key, value in fields.items():
            if value is not None:
                yield key, value if isinstance(value, str) else json.dumps(value)


def _with_hyphens(name: str) -> str:
    """Return a flag's name with hyphens, as ours have them."""
    return name if not name.startswith("--") else f"--{name[2:].replace('_', '-')}"
