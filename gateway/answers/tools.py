"""The tools that a request offers."""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Any

Schema = Mapping[str, Any]


@dataclass(frozen=True, slots=True)
class Tool:
    """A function that the model may call."""

    name: str
    parameters: Schema
    strict: bool = False


Tools = Mapping[str, Tool]


def parameter_types(tools: Tools, function: str, parameter: str) -> frozenset[str]:
    """Return the JSON types that a parameter's schema names; of an unknown parameter, string."""
    properties = tools[function].parameters.get("properties") if function in tools else None
    schema = properties.get(parameter) if isinstance(properties, Mapping) else None
    return frozenset(_types(schema, 0)) or frozenset({"string"})


def _types(schema: Any, depth: int) -> Iterator[str]:
    if not isinstance(schema, Mapping) or depth > 8:
        return
    declared = schema.get("type")
    yield from [declared] if isinstance(declared, str) else (declared or ())
    values = [schema["const"]] if "const" in schema else schema.get("enum")
    if declared is None and isinstance(values, list):
        yield from map(_type_of, values)
    for union in ("anyOf", "oneOf", "allOf"):
        for part in schema.get(union) or ():
            yield from _types(part, depth + 1)


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
