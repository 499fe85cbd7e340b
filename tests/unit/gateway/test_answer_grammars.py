"""Constraints on answers: any text they allow is read back as what was asked for."""

from __future__ import annotations

import json
import random
from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Any

import numpy as np
import pytest
from llguidance import LLMatcher, LLTokenizer

from gateway.answers.formats import TOOL_FORMATS, answer_format
from gateway.answers.grammar import constraint_of
from gateway.answers.lark import Lark
from gateway.answers.tools import Choice, Tool
from outrider.engine.sampling.grammar import new_matcher
from outrider.errors import InvalidRequestError
from outrider.params import Constraint, ConstraintKind
from tests.support.answers import Meaning, events_of, joined, meaning

BYTES = LLTokenizer("byte")
SCHEMA = {
    "type": "object",
    "properties": {
        "city": {"type": "string"},
        "unit": {"enum": ["C", "F"]},
        "days": {"type": "integer", "minimum": 1, "maximum": 9},
        "place": {"$ref": "#/$defs/place"},
        "sure": {"type": "boolean"},
    },
    "required": ["city", "days", "place"],
    "additionalProperties": False,
    "$defs": {"place": {"type": "array", "items": {"enum": [1, 2]}, "maxItems": 2}},
}
TOOLS = {"weather": Tool("weather", SCHEMA), "now": Tool("now", {})}
PARALLEL = ["hermes", "glm45", "llama3_json", "pythonic", "mistral_list", "mistral"]


def matcher(constraint: Constraint | None) -> LLMatcher:
    assert constraint is not None
    made = new_matcher(BYTES, constraint)
    assert not made.get_error(), made.get_error()
    return made


def written(
    constraint: Constraint | None, seed: int, typical: Sequence[str] = (), begin: str = ""
) -> str:
    """A text that the constraint allows: random where it may be anything, else what it must be."""
    grammar, rng = matcher(constraint), random.Random(seed)
    out = bytearray(begin.encode())
    assert grammar.try_consume_tokens(list(out)) == len(out)
    while not grammar.is_stopped() and len(out) < 3000:
        mask = np.frombuffer(grammar.compute_bitmask(), np.uint8)
        allowed = [i for i in range(256) if mask[i // 8] >> i % 8 & 1]
        if not allowed or (grammar.is_accepting() and rng.random() < 0.5):
            break
        if len(allowed) > 40 and rng.random() < 0.4:  # free text: end it, or say something typical
            text = rng.choice(typical) if typical else '"'
            for byte in text.encode():
                if not grammar.try_consume_tokens([byte]):
                    break
                out.append(byte)
            continue
        printable = [i for i in allowed if 32 <= i < 127]
        byte = rng.choice(printable if len(allowed) > 40 else allowed)
        assert grammar.try_consume_tokens([byte]) == 1
        out.append(byte)
    return out.decode()


def read(text: str, parser: str, tools: Mapping[str, Tool] = TOOLS, **how: Any) -> Meaning:
    answers = answer_format("", parser, **how)
    reading = answers.reading("", tools)
    assert reading is not None
    return meaning(joined(events_of(reading, [text])))


def ends(parser: str) -> list[str]:
    """What ends a value of the format's."""
    form = TOOL_FORMATS[parser]
    return [getattr(form.text, "value_end", '"'), "<|end|>" if parser == "openai" else '"']


def check_weather(arguments: object) -> None:
    assert isinstance(arguments, dict)
    assert {"city", "days", "place"} <= arguments.keys() <= SCHEMA["properties"].keys()
    assert isinstance(arguments["city"], str)
    assert arguments["days"] in range(1, 10)
    assert all(each in (1, 2) for each in arguments["place"])
    assert len(arguments["place"]) <= 2
    assert arguments.get("unit", "C") in ("C", "F")


@pytest.mark.parametrize("parser", TOOL_FORMATS)
def test_required_call_in_each_format_satisfies_its_schema(parser: str) -> None:
    answers = answer_format("", parser)
    choice = Choice(TOOLS, ("weather", "now"))
    constraint = constraint_of(answers, answers.reading("", TOOLS), choice, None, {})
    for seed in range(4):
        found = read(written(constraint, seed, ends(parser)), parser)
        assert found.calls
        assert not found.content
        for name, arguments in found.parsed():
            if name == "weather":
                check_weather(arguments)
            else:
                assert (name, arguments) == ("now", {})


@pytest.mark.parametrize("parser", TOOL_FORMATS)
def test_required_call_that_is_cut_anywhere_leaves_no_markup(parser: str) -> None:
    answers = answer_format("", parser)
    choice = Choice(TOOLS, ("weather", "now"))
    reading = answers.reading("", TOOLS)
    assert reading is not None
    text = written(constraint_of(answers, reading, choice, None, {}), 1, ends(parser))
    only_calls = replace(reading, only_calls=True)
    for end in range(len(text)):
        for pieces in ([text[:end]], list(text[:end])):
            found = meaning(joined(events_of(only_calls, pieces)))
            assert not found.content
            assert found.calls == meaning(joined(events_of(reading, pieces))).calls


@pytest.mark.parametrize("parser", TOOL_FORMATS)
def test_named_function_is_called_once(parser: str) -> None:
    answers = answer_format("", parser)
    choice = Choice(TOOLS, ("weather",), one=True)
    constraint = constraint_of(answers, answers.reading("", TOOLS), choice, None, {})
    found = read(written(constraint, 3, ends(parser)), parser)
    assert [name for name, _ in found.calls] == ["weather"]
    check_weather(found.parsed()[0][1])


@pytest.mark.parametrize("parser", PARALLEL)
def test_several_calls_are_allowed_unless_one_is_wanted(parser: str) -> None:
    answers = answer_format("", parser)
    for one in (False, True):
        choice = Choice({"now": TOOLS["now"]}, ("now",), one=one)
        constraint = constraint_of(answers, answers.reading("", TOOLS), choice, None, {})
        texts = [written(constraint, seed) for seed in range(8)]
        assert any(len(read(text, parser).calls) > 1 for text in texts) is not one


@pytest.mark.parametrize("parser", TOOL_FORMATS)
def test_strict_function_that_is_called_satisfies_its_schema(parser: str) -> None:
    tools = {"weather": Tool("weather", SCHEMA, strict=True)}
    answers = answer_format("", parser)
    constraint = constraint_of(answers, answers.reading("", tools), Choice(tools), None, {})
    text = TOOL_FORMATS[parser].text
    begin = (text.before + text.begin).replace("{name}", "weather")
    if parser not in ("openai", "llama3_json", "pythonic"):
        begin = f"Look < there: {begin}"
        assert matcher(constraint).is_accepting()
    for seed in range(3):
        found = read(written(constraint, seed, ends(parser), begin), parser, tools)
        assert found.calls
        for _, arguments in found.parsed():
            check_weather(arguments)


def test_format_of_the_answer_begins_behind_the_thinking() -> None:
    answers = answer_format("", reasoning_parser="think")
    schema = Constraint(ConstraintKind.JSON_SCHEMA, json.dumps({"enum": [1, 2]}))
    for source, kind, good in (
        (schema.source, ConstraintKind.JSON_SCHEMA, "2"),
        ("a/b[0-9]", ConstraintKind.REGEX, "a/b7"),
        ('start: "x" more\nmore: "start"', ConstraintKind.GRAMMAR, "xstart"),
        ("", ConstraintKind.JSON_OBJECT, "{}"),
    ):
        asked = Constraint(kind, source)
        opened = constraint_of(answers, answers.reading("<think>\n", {}), Choice({}), asked, {})
        for text, whole in (
            (f"so 1 < 2\n</think>\n\n{good}", True),
            (f"</think>{good}", True),
            (good, False),
            (f"so</think>?{good}", False),
        ):
            made = matcher(opened)
            assert (made.try_consume_tokens(list(text.encode())) == len(text)) is (
                whole or "</think>" not in text
            )
            assert made.is_accepting() is whole
        free = constraint_of(answers, answers.reading("", {}), Choice({}), asked, {})
        for text in (good, f"<think>so</think>{good}"):
            made = matcher(free)
            assert made.try_consume_tokens(list(text.encode())) == len(text)
            assert made.is_accepting()
        closed = answers.reading("<think>\n\n</think>\n\n", {})
        assert constraint_of(answers, closed, Choice({}), asked, {}) is asked


def test_format_of_the_answer_leaves_calls_possible() -> None:
    answers = answer_format("", "hermes")
    schema = Constraint(ConstraintKind.JSON_SCHEMA, json.dumps({"enum": ["yes"]}))
    constraint = constraint_of(answers, answers.reading("", TOOLS), Choice(TOOLS), schema, {})
    for text in ('"yes"', '<tool_call>\n{"name": "now", "arguments": {}}\n</tool_call>'):
        made = matcher(constraint)
        assert made.try_consume_tokens(list(text.encode())) == len(text)
        assert made.is_accepting()
    assert matcher(constraint).try_consume_tokens(list(b'"no"')) == 1


def test_request_without_forced_or_strict_tools_is_not_constrained() -> None:
    answers = answer_format("", "hermes", "think")
    assert constraint_of(answers, answers.reading("", TOOLS), Choice(TOOLS), None, {}) is None


@pytest.mark.parametrize(
    "schema",
    [
        {"properties": {"a": {"type": "string", "pattern": "x+"}}},
        {"properties": {}, "required": ["a"]},
        {"anyOf": [{"required": ["a"]}]},
        {"properties": ["a"]},
        {"properties": {"a": 1}},
        {"properties": {"a>b": {"type": "string"}}},
        {"properties": {"a": {"enum": ["</parameter>"]}}},
        {"required": 1},
        {"required": [{}]},
    ],
)
def test_schema_that_tagged_arguments_cannot_keep_is_refused(schema: dict[str, Any]) -> None:
    answers = answer_format("", "qwen3_coder")
    tools = {"f": Tool("f", schema)}
    with pytest.raises(InvalidRequestError, match="schema of f") as caught:
        constraint_of(answers, answers.reading("", tools), Choice(tools, ("f",)), None, {})
    assert caught.value.param == "tools"


def test_special_tokens_are_named_by_their_ids() -> None:
    answers = answer_format("", "mistral")
    choice = Choice(TOOLS, ("now",))
    reading = answers.reading("", TOOLS)
    constraint = constraint_of(answers, reading, choice, None, {"[TOOL_CALLS]": 5})
    assert constraint is not None
    assert "<[5]>" in constraint.source
    assert "[TOOL_CALLS]" not in constraint.source


def test_schema_with_many_optional_parameters_compiles_within_the_limits() -> None:
    many = {f"parameter_{n}": {"type": "string"} for n in range(80)}
    tools = {"f": Tool("f", {"type": "object", "properties": many})}
    for parser in ("hermes", "qwen3_coder"):
        answers = answer_format("", parser)
        choice = Choice(tools, ("f",))
        constraint = constraint_of(answers, answers.reading("", tools), choice, None, {})
        assert read(written(constraint, 1, ends(parser)), parser, tools).calls


def test_schemas_within_grammars_are_as_those_by_themselves() -> None:
    grammar = Lark({})
    value = grammar.json("o_value", {"type": "string"})
    constraint = grammar.constraint(f'"%json {{" {value}')
    for text, length in (('%json {"a\\n"', 12), ('%json {"\\u0041"', 9)):  # no \\u, as in schemas
        assert matcher(constraint).try_consume_tokens(list(text.encode())) == length
    endless = Lark({})
    schema = {"type": "object", "properties": {"a": {"$ref": "#"}}, "required": ["a"]}
    endless.json("o_value", schema)
    with pytest.raises(ValueError, match="needs another"):
        new_matcher(BYTES, endless.constraint("o_value"))


@pytest.mark.parametrize(
    ("properties", "required", "texts"),
    [
        ({}, [], ["f()"]),
        ({"a": {"const": 1}, "b": {"const": "x"}}, ["a", "b"], ['f(a=1, b="x")']),
        (
            {"a": {"const": 1}, "b": {"const": 2}, "c": {"const": None}},
            ["b"],
            ["f(a=1, b=2)", "f(b=2)", "f(b=2, c=null)", "f(a=1, b=2, c=null)"],
        ),
        ({"a": {"const": 1}, "b": {"const": 2}}, [], ["f()", "f(a=1)", "f(b=2)", "f(a=1, b=2)"]),
    ],
)
def test_keywords_are_written_as_python_has_them(
    properties: dict[str, Any], required: list[str], texts: list[str]
) -> None:
    schema = {"properties": properties, "required": required}
    choice = Choice({"f": Tool("f", schema)}, ("f",), one=True)
    answers = answer_format("", "pythonic")
    constraint = constraint_of(answers, answers.reading("", choice.tools), choice, None, {})
    found = {written(constraint, seed) for seed in range(40)}
    assert found == {f"[{text}]" for text in texts}


@pytest.mark.parametrize("key", ["a-b", "1a", "a b", ""])
def test_parameter_that_is_no_name_in_python_is_refused_where_calls_are_python(key: str) -> None:
    choice = Choice({"f": Tool("f", {"properties": {key: {}}})}, ("f",))
    answers = answer_format("", "pythonic")
    with pytest.raises(InvalidRequestError, match="no name in Python"):
        constraint_of(answers, answers.reading("", choice.tools), choice, None, {})
