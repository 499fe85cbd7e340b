"""Random JSON schemas, and a validator of them that knows nothing of masks."""

from __future__ import annotations

import datetime
import json
import re
from collections.abc import Callable
from typing import Any

from hypothesis import strategies as st

NAMES = ("a", "ab", "b", "é", "key")
PATTERNS = ("^a$", "^a", "^(a|b)$", "b", "^[^ab]*$", '^[^"]{1,2}$', "^[a-z]{2,3}$", "")
_INTEGERS = st.integers(-12, 120)
_SIZES = st.integers(0, 3)
_VALUES: st.SearchStrategy[Any] = st.sampled_from(
    (None, True, 0, -7, 2.5, "a", 'é\n"', [], [1], {}, {"a": None}, {"ab": [False]})
)


def _some(**keywords: st.SearchStrategy[Any]) -> st.SearchStrategy[dict[str, Any]]:
    return st.fixed_dictionaries({}, optional=keywords)


def _typed(kind: str, **keywords: st.SearchStrategy[Any]) -> st.SearchStrategy[dict[str, Any]]:
    types = st.sampled_from((kind, kind, kind, [kind, "null"], None))
    return st.builds(
        lambda words, types: words if types is None else {"type": types, **words},
        _some(**keywords),
        types,
    )


_NUMBERS = {
    "minimum": _INTEGERS,
    "maximum": _INTEGERS,
    "exclusiveMinimum": _INTEGERS,
    "exclusiveMaximum": st.integers(0, 900).map(lambda n: n / 4),
    "multipleOf": st.sampled_from((1, 2, 5, 0.5)),
}
_LEAVES = st.one_of(
    st.sampled_from(({"type": "null"}, {"type": "boolean"}, {"type": "string"})),
    st.booleans(),
    _typed("integer", **_NUMBERS),
    _typed("number", **_NUMBERS),
    _typed(
        "string",
        minLength=_SIZES,
        maxLength=_SIZES.map(lambda n: n + 1),
        pattern=st.sampled_from(PATTERNS),
        format=st.sampled_from(("date", "ipv4", "uuid")),
    ),
    _some(const=_VALUES),
    _some(
        enum=st.lists(_VALUES, max_size=3), type=st.sampled_from(("integer", "string", "object"))
    ),
    st.sampled_from(("#", "#/$defs/x", "#/$defs/y")).map(lambda ref: {"$ref": ref}),
)


def _nested(inner: st.SearchStrategy[Any]) -> st.SearchStrategy[Any]:
    return st.one_of(
        _typed(
            "object",
            properties=st.dictionaries(st.sampled_from(NAMES), inner, max_size=3),
            required=st.lists(st.sampled_from(NAMES), max_size=2, unique=True),
            additionalProperties=inner,
            patternProperties=st.dictionaries(st.sampled_from(PATTERNS), inner, max_size=2),
            minProperties=st.sampled_from((0, 0, 1, 2)),
            maxProperties=_SIZES,
        ),
        _typed(
            "array",
            items=inner,
            prefixItems=st.lists(inner, max_size=2),
            minItems=_SIZES,
            maxItems=_SIZES,
        ),
        st.builds(
            lambda word, parts, rest: {word: parts, **(rest if isinstance(rest, dict) else {})},
            st.sampled_from(("anyOf", "oneOf", "allOf")),
            st.lists(inner, min_size=1, max_size=3),
            inner,
        ),
    )


_PARTS = st.recursive(_LEAVES, _nested, max_leaves=5)


@st.composite
def json_schemas(draw: st.DrawFn) -> dict[str, Any]:
    """Draw a schema; many are not satisfiable, or not supported."""
    root = draw(_PARTS.filter(lambda schema: isinstance(schema, dict)))
    return {**root, "$defs": {"x": draw(_PARTS), "y": draw(_PARTS)}}


def conforms(value: Any, schema: Any, root: Any, followed: frozenset[str] = frozenset()) -> bool:
    """Return whether a JSON value satisfies a schema drawn above, or one of its parts.

    `followed` are the $refs that led here from the same value: to follow one again adds nothing.
    """
    if isinstance(schema, bool):
        return schema
    kind = _kind(value)
    if "type" in schema:
        types = schema["type"] if isinstance(schema["type"], list) else [schema["type"]]
        whole = kind == "number" and value % 1 == 0
        if kind not in types and not (whole and "integer" in types):
            return False
    if "const" in schema and not _equal(value, schema["const"]):
        return False
    if "enum" in schema and not any(_equal(value, item) for item in schema["enum"]):
        return False
    if "$ref" in schema:
        ref, target = schema["$ref"], root
        for part in ref.split("/")[1:]:
            target = target[part]
        if ref in followed or not conforms(value, target, root, followed | {ref}):
            return False
    fits = [
        [conforms(value, part, root, followed) for part in schema.get(word, [True])]
        for word in ("allOf", "anyOf", "oneOf")
    ]
    if not (all(fits[0]) and any(fits[1]) and sum(fits[2]) == 1):
        return False
    match kind:
        case "number":
            return _number(value, schema)
        case "string":
            return _string(value, schema)
        case "array":
            return _array(value, schema, root)
        case "object":
            return _object(value, schema, root)
    return True


def _kind(value: Any) -> str:
    kinds = {bool: "boolean", int: "number", float: "number", str: "string", list: "array"}
    return kinds.get(type(value), "null" if value is None else "object")


def _equal(one: Any, other: Any) -> bool:
    return json.dumps(one, sort_keys=True) == json.dumps(other, sort_keys=True) or (
        _kind(one) == _kind(other) == "number" and one == other
    )


def _number(value: Any, schema: Any) -> bool:
    return (
        schema.get("minimum", value) <= value <= schema.get("maximum", value)
        and ("exclusiveMinimum" not in schema or schema["exclusiveMinimum"] < value)
        and ("exclusiveMaximum" not in schema or value < schema["exclusiveMaximum"])
        and ("multipleOf" not in schema or value % schema["multipleOf"] == 0)
    )


def _string(value: str, schema: Any) -> bool:
    return (
        schema.get("minLength", 0) <= len(value) <= schema.get("maxLength", len(value))
        and re.search(schema.get("pattern", ""), value) is not None
        and ("format" not in schema or _FORMATS[schema["format"]](value))
    )


def _is_date(value: str) -> bool:
    try:
        return len(value) == 10 and datetime.date.fromisoformat(value) is not None
    except ValueError:
        return value.endswith("-02-29") or value.startswith("0000")


_FORMATS: dict[str, Callable[[str], bool]] = {
    "date": _is_date,
    "ipv4": lambda value: re.fullmatch(r"(\d{1,3}\.){3}\d{1,3}", value) is not None,
    "uuid": lambda value: (
        re.fullmatch(r"[0-9a-fA-F]{8}(-[0-9a-fA-F]{4}){3}-[0-9a-fA-F]{12}", value) is not None
    ),
}


def _array(value: list[Any], schema: Any, root: Any) -> bool:
    prefix = schema.get("prefixItems", [])
    parts = [*prefix, *[schema.get("items", True)] * len(value)]
    return schema.get("minItems", 0) <= len(value) <= schema.get("maxItems", len(value)) and all(
        conforms(item, part, root) for item, part in zip(value, parts, strict=False)
    )


def _object(value: dict[str, Any], schema: Any, root: Any) -> bool:
    properties, patterns = schema.get("properties", {}), schema.get("patternProperties", {})
    if not set(schema.get("required", [])) <= value.keys():
        return False
    if not schema.get("minProperties", 0) <= len(value) <= schema.get("maxProperties", len(value)):
        return False
    for name, item in value.items():
        parts = [part for pattern, part in patterns.items() if re.search(pattern, name)]
        parts += [properties[name]] if name in properties else []
        if not all(
            conforms(item, part, root)
            for part in parts or [schema.get("additionalProperties", True)]
        ):
            return False
    return True
