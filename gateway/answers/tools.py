"""The tools that a request offers."""

from __future__ import annotations

import json
import re
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Any, Final

FUNCTION_NAME: Final = re.compile("[a-zA-Z0-9_.-]{1,64}")
Schema = Mapping[str, Any]
_MAX_SCHEMAS: Final = 256
"""Schemas at most that are read for one parameter's types."""


@dataclass(frozen=True, slots=True)
class Tool:
    """A function that the model may call."""

    name: str
    parameters: Schema
    strict: bool = False


Tools = Mapping[str, Tool]


@dataclass(frozen=True, slots=True)
class Choice:
    """The calls that a request allows or demands."""

    tools: Tools
    forced: tuple[str, ...] = ()
    """The functions of which one must be called; none: the model may call any, or answer."""
    one: bool = False
    """True if an answer has at most one call."""


def parameter_types(tools: Tools, function: str, parameter: str) -> frozenset[str]:
    """Return the JSON types that a parameter's schema names; of an unknown parameter, string."""
    root = tools[function].parameters if function in tools else {}
    properties = root.get("properties")
    schema = properties.get(parameter) if isinstance(properties, Mapping) else None
    return frozenset(_types(schema, root)) or frozenset({"string"})


def _types(schema: Any, root: Schema) -> Iterator[str]:
    """Yield the types that a schema names, and those it refers to; each schema is read once."""
    waiting: list[Any] = [schema]
    seen: set[int] = set()
    while waiting and len(seen) < _MAX_SCHEMAS:
        part = waiting.pop()
        if not isinstance(part, Mapping) or id(part) in seen:
            continue
        seen.add(id(part))
        if isinstance(reference := part.get("$ref"), str):
            waiting.append(_referred(reference, root))
        declared = part.get("type")
        names = [declared] if isinstance(declared, str) else declared
        yield from (name for name in _list(names) if isinstance(name, str))
        if declared is None:
            values = [part["const"]] if "const" in part else part.get("enum")
            yield from map(_type_of, _list(values))
        for union in ("anyOf", "oneOf", "allOf"):
            waiting += _list(part.get(union))


def _list(value: Any) -> list[Any]:
    return value if isinstance(value, list) else []


def _referred(reference: str, root: Schema) -> Any:
    """Return the schema within `root` that a $ref names; None for any other."""
    start, *path = reference.split("/")
    found: Any = root if start == "#" else None
    for step in path:
        name = step.replace("~1", "/").replace("~0", "~")
        found = found.get(name) if isinstance(found, Mapping) else None
    return found


def _type_of(value: Any) -> str:
    if isinstance(value, bool):
        return "boolean"
    names = {str: "string", int: "integer", float: "number", dict: "object", list: "array"}
    return names.get(type(value), "null")


def as_json(text: str, types: frozenset[str]) -> str:
    """Return the text of a parameter as a JSON value of one of the types, else as a string."""
    stripped = text.strip()
    word = {"True": "true", "False": "false", "None": "null"}.get(stripped, stripped)
    try:
        value = json.loads(word, parse_constant=_refuse)
    except (ValueError, RecursionError):
        return json.dumps(text, ensure_ascii=False)
    kind = _type_of(value)
    whole = kind == "number" and float(value).is_integer()
    if kind in types or (kind == "integer" and "number" in types) or (whole and "integer" in types):
        return word
    return json.dumps(text, ensure_ascii=False)


def _refuse(constant: str) -> Any:
    raise ValueError(f"{constant} is no JSON")
