"""Grammars of calls whose arguments are written one by one: tagged texts, and keywords."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, Final

from gateway.answers.formats import KeywordText, TaggedText
from gateway.answers.lark import Lark
from gateway.answers.pythonic import NAME
from gateway.answers.reader import is_name
from gateway.answers.tools import Tool, parameter_types
from outrider.errors import InvalidRequestError

_DEFINITIONS: Final = ("$defs", "definitions")
_OF_TEXTS: Final = ("pattern", "format", "minLength", "maxLength", "contentEncoding")


def tagged_call(grammar: Lark, text: TaggedText, begin: str, tool: Tool, name: str) -> str:
    """Add the rule of a call and return its name. Arguments come in the schema's order.

    Raises `InvalidRequestError` for a schema whose values cannot be written so.
    """
    properties, required, definitions = _parameters(tool)
    if not all(map(is_name, properties)):
        raise _unsupported(
            tool, "has a parameter whose name has one of {}[]<>\"' or a line break, or is very long"
        )
    parts = [grammar.spell(begin.replace("{name}", tool.name))]
    for number, key in enumerate(properties):
        rule = _value(grammar, text, tool, key, f"{name}_{number}", definitions)
        argument = f"{grammar.spell(text.argument.replace('{key}', key))} {rule}"
        parts.append(argument if key in required else f"({argument})?")
    return grammar.rule(name, " ".join([*parts, grammar.spell(text.end)]))


def keyword_call(grammar: Lark, text: KeywordText, begin: str, tool: Tool, name: str) -> str:
    """Add the rule of a call with keyword arguments, whose values are JSON, and return its name.

    Arguments come in the schema's order. Raises `InvalidRequestError`.
    """
    properties, required, definitions = _parameters(tool)
    first = others = ""  # parameters from one on, where none was written before, and where one was
    for number, (key, schema) in reversed([*enumerate(properties.items())]):
        if not NAME.fullmatch(key):
            raise _unsupported(tool, f"has a parameter {key!r}, which is no name in Python")
        if not isinstance(schema, Mapping | bool):
            raise _unsupported(tool, f"has no schema for {key}")
        known = {**schema, **definitions} if isinstance(schema, Mapping) else schema
        value = grammar.json(f"{name}_{number}", known)
        written = f"{grammar.spell(f'{key}=')} {value}"
        optional = key not in required
        without = f" | ({first})" if optional else ""
        first = grammar.rule(f"{name}_from_{number}", f"{written} {others}{without}")
        more = f"({grammar.spell(', ')} {written}){'?' if optional else ''}"
        others = grammar.rule(f"{name}_after_{number}", f"{more} {others}")
    spelled = grammar.spell(begin.replace("{name}", tool.name))
    return grammar.rule(name, f"{spelled} {first} {grammar.spell(text.end)}")


def _parameters(tool: Tool) -> tuple[Mapping[str, Any], frozenset[str], dict[str, Any]]:
    """Return a tool's properties, which of them are required, and the schema's definitions.

    Raises `InvalidRequestError`.
    """
    schema = tool.parameters
    properties, names = schema.get("properties") or {}, schema.get("required") or []
    if not isinstance(properties, Mapping) or not isinstance(names, list):
        raise _unsupported(tool, "is no schema of an object")
    if not all(isinstance(name, str) for name in names):
        raise _unsupported(tool, "requires what is no name")
    required = frozenset(names)
    if required - properties.keys() or any(key in schema for key in ("anyOf", "oneOf", "$ref")):
        raise _unsupported(tool, "names its parameters elsewhere than in properties")
    definitions = {key: schema[key] for key in _DEFINITIONS if key in schema}
    return properties, required, definitions


def _value(
    grammar: Lark,
    text: TaggedText,
    tool: Tool,
    key: str,
    name: str,
    definitions: Mapping[str, Any],
) -> str:
    """Return the terminals of a value and its end."""
    schema = tool.parameters["properties"][key]
    schema = {} if schema is True else schema
    if not isinstance(schema, Mapping):
        raise _unsupported(tool, f"has no schema for {key}")
    end = grammar.spell(text.value_end + text.argument_end)
    texts = [schema["const"]] if "const" in schema else schema.get("enum")
    if isinstance(texts, list) and texts and all(isinstance(each, str) for each in texts):
        if any(text.value_end.strip() in each for each in texts):
            raise _unsupported(tool, f"has the format's own marks in {key}")
        return f"({' | '.join(map(grammar.spell, texts))}) {end}"
    if "string" not in parameter_types({tool.name: tool}, tool.name, key):
        return f"{grammar.json(name, {**schema, **definitions})} {end}"
    for keyword in _OF_TEXTS:
        if keyword in schema:
            raise _unsupported(tool, f"has {keyword} in {key}")
    after = f" {grammar.spell(text.argument_end)}" if text.argument_end else ""
    return grammar.until(name, text.value_end) + after


def _unsupported(tool: Tool, why: str) -> InvalidRequestError:
    return InvalidRequestError(
        f"tools: the schema of {tool.name} {why}, which cannot be kept to in this model's format "
        "of calls: leave it out, or let tool_choice be auto without strict.",
        param="tools",
    )
