"""Grammars in llguidance's dialect of Lark, rule by rule."""

from __future__ import annotations

import json
import re
from collections.abc import Mapping
from typing import Any, Final

from outrider.params import Constraint, ConstraintKind

_SPECIAL_IN_REGEX: Final = re.compile(r"[\\.+*?()|\[\]{}^$/]")
_LITERAL_OR_START: Final = re.compile(
    r'"(?:\\.|[^"\\])*"|//[^\n]*|/(?:\\.|[^/\\\n])+/|(?P<start>\bstart\b)'
)


class Lark:
    """The rules of one grammar. Give them names that begin with `o_`.

    `special` are the tokenizer's special tokens that texts may name -> ids.
    """

    def __init__(self, special: Mapping[str, int]) -> None:
        self._special = special
        self._rules: dict[str, str] = {}
        self._included = ""

    def spell(self, text: str) -> str:
        """Return a text as terminals; nothing for no text."""
        if not self._special:
            return _quoted(text)
        marks = "|".join(map(re.escape, self._special))
        parts = re.split(f"({marks})", text)
        return " ".join(
            f"<[{self._special[part]}]>" if part in self._special else _quoted(part)
            for part in parts
            if part
        )

    def rule(self, name: str, body: str) -> str:
        """Add a rule and return its name."""
        self._rules[name] = body
        return name

    def json(self, name: str, schema: Any) -> str:
        """Add a rule for values of a JSON schema and return its name."""
        return self.rule(name, f"%json {schema if isinstance(schema, str) else json.dumps(schema)}")

    def text(self) -> str:
        """Add a terminal for any text and return its name."""
        return self.rule("O_TEXT", r"/(.|\n)*/")

    def until(self, name: str, mark: str) -> str:
        """Add a rule for any text up to and with the first mark, and return its name."""
        if mark in self._special:
            return self.rule(name, f"{self.text()} {self.spell(mark)}")
        escaped = _SPECIAL_IN_REGEX.sub(r"\\\g<0>", mark).replace("\n", "\\n")
        self._rules[f"{name}[lazy]"] = rf"/(.|\n)*{escaped}/"
        return name

    def language(self, name: str, constraint: Constraint) -> str:
        """Add a rule for the texts that a constraint allows and return its name."""
        if constraint.kind is ConstraintKind.JSON_OBJECT:
            return self.json(name, {"type": "object"})
        if constraint.kind is ConstraintKind.JSON_SCHEMA:
            return self.json(name, constraint.source)
        if constraint.kind is ConstraintKind.REGEX:
            source = re.sub(r"\\.|/|\n", _in_regex, constraint.source)
            return self.rule(name.upper(), f"/{source}/")
        self._included = _LITERAL_OR_START.sub(
            lambda match: name if match["start"] else match[0], constraint.source
        )
        return name

    def constraint(self, start: str) -> Constraint:
        """Return the grammar. Raises `InvalidRequestError` for one that is too long."""
        rules = [f"{name}: {body}\n" for name, body in {"start": start, **self._rules}.items()]
        return Constraint(ConstraintKind.GRAMMAR, "".join(rules) + self._included)


def _in_regex(match: re.Match[str]) -> str:
    return {"/": "\\/", "\n": "\\n"}.get(match[0], match[0])


def _quoted(text: str) -> str:
    return json.dumps(text, ensure_ascii=False) if text else ""
