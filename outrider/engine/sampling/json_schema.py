"""Close the dead ends that llguidance leaves in the language of a JSON schema.

llguidance refuses most schemas that nothing satisfies. It does not see that `properties` leave no
name for a pattern of `patternProperties`, so that a text comes to a key and can have none; that a
value needs itself, so that its text never ends; and that a key may repeat, and is counted twice.
"""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Iterator
from typing import Any

from llguidance import LLMatcher, LLParserLimits, LLTokenizer

Schema = Any  # a dict, a bool, or what is no schema

_TYPES = ("null", "boolean", "number", "string", "array", "object")
_DEFINITIONS = ("$defs", "definitions")
_OF_NAMES = ("properties", "patternProperties", *_DEFINITIONS)  # schemas by name
_OF_VALUES = ("const", "enum", "default", "examples")  # no schemas
_MAX_PATTERNS = 64
_MAX_MATCHES = 100_000  # patterns times names
_MAX_PASSES = 32
ESCAPES = 'nrbtf\\"'
"""Characters that may follow a backslash. A key with `\\u` would pass for another property's."""
_UNWRITABLE = re.compile(r"[\x00-\x07\x0b\x0e-\x1f\x7f]")  # without the escape `u`

_BYTES = LLTokenizer("byte")
_LIMITS = LLParserLimits(
    initial_lexer_fuel=200_000,
    max_lexer_states=5_000,
    precompute_large_lexemes=False,
    verbose_errors=False,
)


def without_dead_ends(source: str) -> str:
    """Return a schema of the same values that llguidance compiles to a language without dead ends.

    Raises `ValueError` for a schema that has no such form. What is no JSON object, or nested too
    deeply, is returned as it is: llguidance refuses it.
    """
    try:
        if isinstance(root := json.loads(source), dict):
            _mend(root, list(_schemas(root)))
            return json.dumps(root)
    except (json.JSONDecodeError, RecursionError):
        pass
    return source


def _mend(root: dict[str, Any], schemas: list[dict[str, Any]]) -> None:
    """Change the schemas in `root` in place. Raises `ValueError`."""
    for schema in schemas:
        _mend_classes(schema)
    matches = _matches(schemas)
    _check_characters(schemas)
    _check_recursion(root, schemas, matches)
    every = [pattern for pattern in matches if _every_name([pattern])]
    listed = [pattern for pattern, names in matches.items() if not _more(pattern, names)]
    for schema in schemas:
        patterns = _dict(schema, "patternProperties")
        for pattern in [pattern for pattern in listed if pattern in patterns]:
            _add(schema.setdefault("properties", {}), matches[pattern], patterns.pop(pattern))
        if values := [patterns.pop(pattern) for pattern in every if pattern in patterns]:
            schema["additionalProperties"] = value = {"allOf": values}
            for known in (_dict(schema, "properties"), patterns):
                _add(known, [*known], value)
    _check_counts(schemas)


def _add(schemas: dict[str, Schema], names: list[str], schema: Schema) -> None:
    """Let the values of these names satisfy a schema, too."""
    for name in names:
        schemas[name] = {"allOf": [schemas[name], schema]} if name in schemas else schema


def _schemas(node: Any) -> Iterator[dict[str, Any]]:
    """Yield the schemas in a schema, also those that only a $ref reaches."""
    if isinstance(node, list):
        for item in node:
            yield from _schemas(item)
    if not isinstance(node, dict):
        return
    yield node
    for key, value in node.items():
        if key in _OF_NAMES and isinstance(value, dict):
            for item in value.values():
                yield from _schemas(item)
        elif key not in _OF_VALUES:
            yield from _schemas(value)


def _dict(schema: dict[str, Any], key: str) -> dict[str, Any]:
    value = schema.get(key)
    return value if isinstance(value, dict) else {}


def _list(schema: dict[str, Any], key: str) -> list[Any]:
    value = schema.get(key)
    return value if isinstance(value, list) else []


def _number(schema: dict[str, Any], key: str) -> int:
    value = schema.get(key)
    return value if isinstance(value, int) else 0


def _strings(value: Any) -> Iterator[str]:
    if isinstance(value, str):
        yield value
    elif isinstance(value, list):
        for item in value:
            yield from _strings(item)
    elif isinstance(value, dict):
        yield from _strings(list(value.values()))


def _mend_classes(schema: dict[str, Any]) -> None:
    """Take a character that no text has out of what a pattern's `[^...]` match.

    llguidance escapes the quote and the backslash in a class with all control characters, whether
    they belong to it or not.
    """

    def mended(pattern: str) -> str:
        return re.sub(r"(?s)\\.|\[\^", lambda m: m[0].replace("[^", r"[^\x01"), pattern)

    if isinstance(pattern := schema.get("pattern"), str):
        schema["pattern"] = mended(pattern)
    if patterns := _dict(schema, "patternProperties"):
        schema["patternProperties"] = {mended(name): value for name, value in patterns.items()}


def _check_characters(schemas: list[dict[str, Any]]) -> None:
    for schema in schemas:
        for text in _strings([schema.get("const"), _list(schema, "enum")]):
            if _UNWRITABLE.search(text):
                raise ValueError(f"control characters in strings are not supported: {text[:50]!r}")
        for pattern in [schema.get("pattern"), *_dict(schema, "patternProperties")]:
            # Only a pattern that writes characters by number, or as they are, can name one.
            if isinstance(pattern, str) and re.search(r"\\[cpuxPU0-9]|[\x00-\x1f\x7f]", pattern):
                string = _matcher({"type": "string", "pattern": pattern})
                if not string.is_error() and not _fits(string, '"'):
                    raise ValueError(f"control characters are not supported: pattern {pattern!r}")


def _check_counts(schemas: list[dict[str, Any]]) -> None:
    counting = [schema for schema in schemas if _number(schema, "minProperties")]
    for schema in counting:
        required = set(_strings(_list(schema, "required")))
        if _number(schema, "minProperties") > len(required) + 1:
            raise ValueError(
                "minProperties may be at most one more than there are required properties, because "
                "the others' names may repeat"
            )
    if counting and _every_name([p for s in schemas for p in _dict(s, "patternProperties")]):
        raise ValueError("minProperties beside patternProperties needs names that none matches")


def _matcher(schema: Schema) -> LLMatcher:
    options = {"whitespace_flexible": False, "json_allowed_escapes": ESCAPES}
    grammar = LLMatcher.grammar_from_json_schema(json.dumps(schema), overrides=options)  # type: ignore[arg-type]
    return LLMatcher(_BYTES, grammar, log_level=0, limits=_LIMITS)


def _fits(matcher: LLMatcher, text: str) -> bool:
    tokens = _BYTES.tokenize_bytes(text.encode("utf-8", "surrogatepass"))
    return matcher.validate_tokens(tokens) == len(tokens)


def _matches(schemas: list[dict[str, Any]]) -> dict[str, list[str]]:
    """Return the names in a schema that its patterns match, by pattern."""
    patterns = dict.fromkeys(p for schema in schemas for p in _dict(schema, "patternProperties"))
    names = dict.fromkeys(
        name
        for schema in schemas
        for name in (*_dict(schema, "properties"), *_strings(_list(schema, "required")))
    )
    if len(patterns) > _MAX_PATTERNS or len(patterns) * len(names) > _MAX_MATCHES:
        raise ValueError(f"too many patternProperties (at most {_MAX_PATTERNS})")
    matches = {}
    for pattern in patterns:
        keys = _matcher({"type": "string", "pattern": pattern})
        matches[pattern] = [name for name in names if _fits(keys, _quoted(name))]
    return matches


def _quoted(name: str) -> str:
    return json.dumps(name, ensure_ascii=False)


def _more(pattern: str, names: list[str]) -> bool:
    """Return whether a pattern matches more than these names."""
    others = _matcher(
        {
            "type": "object",
            "properties": dict.fromkeys(names, False),
            "patternProperties": {pattern: {"type": "null"}},
            "additionalProperties": False,
        }
    )
    return others.is_error() or _fits(others, '{"')


def _every_name(patterns: list[str]) -> bool:
    """Return whether each name matches one of these patterns."""
    others = _matcher({"type": "object", "patternProperties": dict.fromkeys(patterns, False)})
    return not others.is_error() and not _fits(others, '{"')


def _check_recursion(
    root: dict[str, Any], schemas: list[dict[str, Any]], matches: dict[str, list[str]]
) -> None:
    """Refuse a $ref to what needs itself: whoever begins such a value never ends it.

    Values of finite length are found from the inside out, by type.
    """
    anchors = {f"#{s['$anchor']}": s for s in schemas if isinstance(s.get("$anchor"), str)}
    targets: dict[str, Schema] = {}  # what is reached first comes first
    reached: list[Schema] = [{key: root[key] for key in root if key not in _DEFINITIONS}]
    for part in reached:
        for schema in _schemas(part):
            if isinstance(ref := schema.get("$ref"), str) and ref not in targets:
                targets[ref] = target = anchors.get(ref, _target(root, ref))
                reached += [] if target is root else [target]
    finite: set[tuple[str, str]] = set()

    def known(ref: str, kind: str) -> bool:
        return (ref, kind) in finite

    for _ in range(_MAX_PASSES):
        before = len(finite)
        for ref, target in reversed(targets.items()):
            finite |= {(ref, kind) for kind in _TYPES if _ends(target, kind, known, matches)}
        if len(finite) == before:
            break
    else:
        raise ValueError("too many $refs that lead from one to another")
    for ref, target in targets.items():
        if target is not False and not any(known(ref, kind) for kind in _TYPES):
            raise ValueError(
                f"no value of {ref} ends, because it needs another one, or because types conflict"
            )


def _target(root: Schema, ref: str) -> Schema:
    """Return what a $ref points to; True, which ends, if only llguidance can tell."""
    if ref.partition("/")[0] not in ("", "#"):
        return True
    node = root
    for part in ref.split("/")[1:]:
        key = part.replace("~1", "/").replace("~0", "~")
        if isinstance(node, list) and key.isdecimal() and int(key) < len(node):
            node = node[int(key)]
        elif isinstance(node, dict) and key in node:
            node = node[key]
        else:
            return True
    return node


def _ends(
    schema: Schema, kind: str, known: Callable[[str, str], bool], matches: dict[str, list[str]]
) -> bool:
    """Return whether a value of this type may satisfy the schema and be finite."""

    def ends(part: Schema, *kinds: str) -> bool:
        return any(_ends(part, kind, known, matches) for kind in kinds)

    if not isinstance(schema, dict):
        return schema is not False
    types = schema.get("type", [*_TYPES])
    if not {kind, "integer" if kind == "number" else kind} & set(_strings([types])):
        return False
    if isinstance(ref := schema.get("$ref"), str) and not known(ref, kind):
        return False
    if not all(ends(part, kind) for part in _list(schema, "allOf")):
        return False
    for key in ("anyOf", "oneOf"):
        if (parts := _list(schema, key)) and not any(ends(part, kind) for part in parts):
            return False
    if kind == "array" and (count := _number(schema, "minItems")):
        prefix = _list(schema, "prefixItems") or _list(schema, "items")
        rest = [] if count <= len(prefix) else [schema.get("items", True)]  # a list: ends
        return all(ends(part, *_TYPES) for part in [*prefix[:count], *rest])
    if kind == "object":
        properties, patterns = _dict(schema, "properties"), _dict(schema, "patternProperties")
        additional = schema.get("additionalProperties", True)
        required = set(_strings(_list(schema, "required")))
        for name in required:
            parts = [value for p, value in patterns.items() if name in matches.get(p, ())]
            parts += [properties[name]] if name in properties else []
            if not all(ends(part, *_TYPES) for part in parts or [additional]):
                return False
        if _number(schema, "minProperties") > len(required):
            others = [*properties.values(), *patterns.values(), additional]
            return any(ends(part, *_TYPES) for part in others)
    return True
