"""Parsers of answers: what they find, however the text is cut."""

from __future__ import annotations

import json
import time

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from gateway.answers.formats import TOOL_FORMATS, Reading, answer_format, tool_format_of
from gateway.answers.parser import AnswerParser
from gateway.answers.tools import Tool, parameter_types
from outrider.errors import ConfigError
from tests.support.answers import (
    ANSWERS,
    DEEPSEEK,
    GLM45,
    HARMONY,
    HERMES,
    LLAMA,
    MISTRAL,
    PARIS,
    PYTHONIC,
    QWEN3_CODER,
    TRICKY,
    Meaning,
    events_of,
    joined,
    meaning,
    reading,
)

CITY = {"city": "Paris"}
THINKING = [  # the prompt's end, the answer, its reasoning and its content
    ("", "<think>\nHm.\n\n1 < 2\n</think>\n\nYes.", "Hm.\n\n1 < 2", "Yes."),
    ("<think>\n", "Hm.\n</think>\n\nYes.\n", "Hm.", "Yes.\n"),
    ("<think>\n", "<think>Hm.</think>Yes.", "Hm.", "Yes."),
    ("<think>", "</think>\n\nYes.", "", "Yes."),
    ("<think>\n\n</think>\n\n", "Yes. <think>", "", "Yes. <think>"),
    ("", "Yes </think>.", "", "Yes </think>."),
    ("<think>", "Hm </thin", "Hm </thin", ""),
]


def whole(parser: str, text: str) -> Meaning:
    return meaning(joined(events_of(reading(parser), [text])))


def cut(text: str, places: list[int]) -> list[str]:
    ends = sorted({min(place, len(text)) for place in places})
    return [text[a:b] for a, b in zip([0, *ends], [*ends, len(text)], strict=True)]


# However it is cut


@pytest.mark.parametrize(
    ("parser", "text"),
    [(parser, text) for parser, _, text in ANSWERS],
    ids=[f"{parser}: {name}" for parser, name, _ in ANSWERS],
)
def test_answer_cut_anywhere_has_the_events_of_the_whole(parser: str, text: str) -> None:
    how = reading(parser)
    expected = joined(events_of(how, [text]))
    for place in range(len(text) + 1):
        assert joined(events_of(how, [text[:place], text[place:]])) == expected
    for size in range(1, 17):
        pieces = [text[i : i + size] for i in range(0, len(text), size)]
        assert joined(events_of(how, pieces)) == expected


@given(
    answer=st.sampled_from(ANSWERS),
    other=st.sampled_from(ANSWERS),
    place=st.integers(0, 300),
    drop=st.integers(0, 9),
    places=st.lists(st.integers(0, 400), max_size=12),
    ends_early=st.integers(1, 400),
)
@settings(max_examples=300, deadline=None)
def test_garbled_answer_in_any_grouping_has_the_events_of_the_whole(
    answer: tuple[str, str, str],
    other: tuple[str, str, str],
    place: int,
    drop: int,
    places: list[int],
    ends_early: int,
) -> None:
    parser, _, text = answer
    text = (text[:place] + other[2][drop : drop + 40] + text[place + drop :])[:ends_early]
    how = reading(parser)
    expected = joined(events_of(how, [text]))
    assert joined(events_of(how, list(text))) == expected
    assert joined(events_of(how, cut(text, places))) == expected
    found = meaning(expected)
    if not found.calls and parser != "openai":  # nothing is lost
        assert found.content == text


@pytest.mark.parametrize(("prompt", "text", "reasoning", "content"), THINKING)
def test_thinking_answer_gives_reasoning_and_content(
    prompt: str, text: str, reasoning: str, content: str
) -> None:
    how = answer_format("", reasoning_parser="think").reading(prompt, {})
    assert how is not None
    expected = joined(events_of(how, [text]))
    assert meaning(expected) == Meaning(content, reasoning)
    assert joined(events_of(how, list(text))) == expected


# What they find


@pytest.mark.parametrize(
    ("parser", "text", "content", "calls"),
    [
        ("hermes", HERMES["one"], "", [("weather", CITY)]),
        (
            "hermes",
            HERMES["around"],
            "Let me look.\n\n\nDone.",
            [("weather", json.loads(TRICKY)), ("search", {"q": "x"})],
        ),
        ("hermes", HERMES["no arguments"], "", [("search", {})]),
        ("hermes", HERMES["null arguments"], "", [("search", {})]),
        ("hermes", HERMES["brace missing"], "ok", [("weather", CITY)]),
        ("hermes", HERMES["brace too many"], "", [("weather", CITY)]),
        ("hermes", HERMES["tag twice"], "<tool_call>", [("weather", CITY)]),
        ("hermes", HERMES["line break in a string"], "", [("search", {"q": "a\nb"})]),
        ("qwen3_coder", QWEN3_CODER["one"], "", [("weather", CITY)]),
        (
            "qwen3_coder",
            QWEN3_CODER["typed"],
            "Now:",
            [
                (
                    "weather",
                    {
                        "city": '"two"\nlines <b> \\ é 😀\n',
                        "days": 3,
                        "hourly": True,
                        "near": ["a", "</x>"],
                        "limit": None,
                    },
                ),
                ("search", {}),
            ],
        ),
        ("qwen3_coder", QWEN3_CODER["without the outer tag"], "", [("search", {"q": "12"})]),
        ("qwen3_coder", QWEN3_CODER["unknown"], "", [("x", {"y": "12"})]),
        ("qwen3_coder", QWEN3_CODER["no integer"], "", [("weather", {"days": "soon"})]),
        ("qwen3_coder", QWEN3_CODER["junk within"], "hm", [("search", {"q": "1"})]),
        ("glm45", GLM45["one"], "", [("weather", CITY)]),
        (
            "glm45",
            GLM45["two"],
            "Sure.",
            [("weather", {"city": ' "x"\n', "days": 2}), ("search", {})],
        ),
        ("llama3_json", LLAMA["one"], "", [("weather", CITY)]),
        ("llama3_json", LLAMA["tag"], "", [("weather", json.loads(TRICKY))]),
        ("llama3_json", LLAMA["two"], "", [("weather", CITY), ("search", {})]),
        ("llama3_json", LLAMA["no second"], "; and more", [("weather", CITY)]),
        ("mistral", MISTRAL["list"], "", [("weather", json.loads(TRICKY))]),
        ("mistral", MISTRAL["list of two"], "Ok. bye", [("weather", CITY), ("search", {"q": "]"})]),
        ("mistral", MISTRAL["named"], "", [("weather", json.loads(TRICKY))]),
        (
            "mistral",
            MISTRAL["named two"],
            "",
            [("weather", CITY), ("search", {"q": "[TOOL_CALLS]"})],
        ),
        ("mistral", MISTRAL["args"], "Hm.", [("weather", CITY)]),
        ("mistral", MISTRAL["args alone"], "", [("weather", CITY)]),
        ("deepseek_v3", DEEPSEEK["v3"], "Wait.", [("weather", json.loads(TRICKY))]),
        ("deepseek_v3", DEEPSEEK["v3 two"], "", [("weather", CITY), ("search", {})]),
        ("deepseek_v31", DEEPSEEK["v31"], "", [("weather", CITY), ("search", {})]),
        ("pythonic", PYTHONIC["one"], "", [("weather", CITY)]),
        (
            "pythonic",
            PYTHONIC["all literals"],
            "",
            [
                (
                    "weather",
                    {
                        "city": 'it\'s \\ é 😀 "q" A\\q\n',
                        "days": -1000,
                        "hourly": True,
                        "near": ["a", [], {}, {"b": None, "1": 0.5}, False],
                        "limit": 1000,
                    },
                ),
                ("search", {}),
            ],
        ),
        (
            "pythonic",
            PYTHONIC["mark"],
            "So.\n ok",
            [("weather", CITY), ("search", {"q": "[f(a=1)]"})],
        ),
        ("pythonic", PYTHONIC["JSON within"], "", [("search", {"q": json.loads(TRICKY)})]),
        ("pythonic", PYTHONIC["line break in a string"], "", [("search", {"q": "a\nb"})]),
        ("pythonic", PYTHONIC["second cut"], ", sear", [("weather", CITY)]),
        ("openai", HARMONY["recipient first"], "", [("weather", CITY)]),
        ("openai", HARMONY["preamble"], "I will look.", [("weather", CITY)]),
    ],
)
def test_calls_of_each_format_are_read(
    parser: str, text: str, content: str, calls: list[tuple[str, object]]
) -> None:
    found = whole(parser, text)
    assert found.content == content
    assert found.parsed() == calls


def test_harmony_channels_are_reasoning_calls_and_content() -> None:
    assert whole("openai", HARMONY["final"]) == Meaning("Hi <b>.", "Think.")
    assert whole("openai", HARMONY["call"]) == Meaning("", "Need it.", [("weather", TRICKY)])
    without = meaning(joined(events_of(reading("openai", tools=False), [HARMONY["preamble"]])))
    assert without == Meaning(f"I will look.{PARIS}")


@pytest.mark.parametrize(
    ("parser", "text"),
    [
        ("hermes", HERMES["no JSON"]),
        ("hermes", HERMES["no name"]),
        ("hermes", HERMES["cut in header"]),
        ("hermes", HERMES["cut in tag"]),
        ("qwen3_coder", QWEN3_CODER["malformed"]),
        ("glm45", GLM45["malformed"]),
        ("llama3_json", LLAMA["an answer in JSON"]),
        ("llama3_json", LLAMA["code"]),
        ("mistral", MISTRAL["malformed"]),
        ("mistral", MISTRAL["cut in list"]),
        ("deepseek_v3", DEEPSEEK["malformed"]),
        ("deepseek_v3", DEEPSEEK["no arguments"]),
        ("openai", HARMONY["plain"]),
        ("openai", HARMONY["cut in header"]),
        ("pythonic", PYTHONIC["plain"]),
        ("pythonic", PYTHONIC["mark beside code"]),
        ("pythonic", PYTHONIC["positional"]),
        ("pythonic", PYTHONIC["list"]),
        ("pythonic", PYTHONIC["no name"]),
        ("pythonic", PYTHONIC["cut in name"]),
    ],
)
def test_malformed_call_is_text(parser: str, text: str) -> None:
    assert whole(parser, text) == Meaning(text)


@pytest.mark.parametrize(
    ("parser", "text", "arguments"),
    [
        ("hermes", HERMES["cut in arguments"], '{"city": "Par'),
        ("hermes", HERMES["bad arguments"], "{q: 1}}"),
        ("qwen3_coder", QWEN3_CODER["cut in a text"], '{"city": "Par'),
        ("qwen3_coder", QWEN3_CODER["cut in a number"], '{"days": 1'),
        ("glm45", GLM45["cut"], '{"q": "a'),
        ("llama3_json", LLAMA["cut"], '{"city": "P'),
        ("mistral", MISTRAL["cut"], '{"city": '),
        ("deepseek_v3", DEEPSEEK["cut"], "{"),
        ("openai", HARMONY["no JSON"], "q=1"),
        ("pythonic", PYTHONIC["cut in a string"], '{"city": "Par'),
        ("pythonic", PYTHONIC["cut in a number"], '{"days": 12'),
        ("pythonic", PYTHONIC["bare word"], '{"city": Paris, days=1)]'),
        ("pythonic", PYTHONIC["positional later"], '{"city": "Paris"3)] so'),
    ],
)
def test_call_that_breaks_within_its_arguments_has_what_was_written(
    parser: str, text: str, arguments: str
) -> None:
    assert [each for _, each in whole(parser, text).calls] == [arguments]


def test_arguments_stream_as_they_grow() -> None:
    parser = AnswerParser(reading("hermes"))
    parser.feed('<tool_call>\n{"name": "search", "arguments": {"q": "a')
    assert [event.text for event in parser.feed("bc ")] == ["bc "]  # type: ignore[union-attr]


@pytest.mark.parametrize("together", range(1, 17))
@pytest.mark.parametrize(
    ("how", "tokens", "thoughts"),
    [
        (
            reading("hermes", "think"),
            ["<thi", "nk>", "\n", "Hm", ".", "\n", "</", "think>", "Yes"],
            4,
        ),
        (reading("hermes", "think", prompt="<think>"), ["H", "", "m</t", "hink>", "Yes", "."], 3),
        (reading("hermes", "think"), ["No", " ", "<think>", "a"], 0),
        (
            reading("openai"),
            [
                *("<|channel|>", "analysis", "<|message|>", "Hm", ".", "<|end|>", "<|start|>"),
                *("assistant", "<|channel|>", "analysis", "<|message|>", "So", "<|end|>", "Hi"),
            ],
            3,
        ),
    ],
)
def test_reasoning_tokens_are_those_that_begin_within_reasoning(
    how: Reading, tokens: list[str], thoughts: int, together: int
) -> None:
    parser = AnswerParser(how)
    for start in range(0, len(tokens), together):
        piece = tokens[start : start + together]
        parser.read(piece, last=start + together >= len(tokens))
    assert parser.reasoning_tokens == thoughts


def test_arguments_with_many_levels_are_no_recursion() -> None:
    deep = "[" * 100_000
    found = whole(
        "hermes", f'<tool_call>{{"name": "search", "arguments": {{"q": {deep}</tool_call>'
    )
    assert found.calls == [("search", f'{{"q": {deep}')]


@pytest.mark.parametrize(
    ("parser", "pieces"),
    [
        ("hermes", ["<think>a", *"\n" * 50_000]),
        ("hermes", ["<think></think>a", *" " * 50_000]),
        ("hermes", ['<tool_call>{"name": "f", "arguments": {"q": "' + "字" * 200_000]),
        ("pythonic", ['[f(q="' + "字" * 200_000]),
        ("pythonic", ["[f(q=" + "[" * 100_000]),
        ("pythonic", ["[f(q=" + "1" * 100_000]),
        ("pythonic", ["[f(q=[" + "1, " * 50_000]),
        ("openai", ["<|channel|>" * 20_000]),
    ],
)
def test_long_answer_takes_time_by_its_length_alone(parser: str, pieces: list[str]) -> None:
    begun = time.process_time()
    events_of(reading(parser), pieces)
    assert time.process_time() - begun < 2


def test_name_that_no_answer_can_tell_is_no_call() -> None:
    text = '<tool_call>{"name": "\\ud800", "arguments": {}}</tool_call>'
    assert whole("hermes", text) == Meaning(text)


def test_types_of_schemas_that_refer_to_themselves_are_found_once() -> None:
    itself = {"anyOf": [{"$ref": "#/properties/a"}] * 200 + [{"type": "integer"}, {"type": 5}]}
    tools = {"f": Tool("f", {"properties": {"a": itself}})}
    assert parameter_types(tools, "f", "a") == {"integer"}


# Which format


@pytest.mark.parametrize(
    ("template", "name"),
    [
        ("<|channel|>", "openai"),
        ("<tool_call><arg_key>", "glm45"),
        ("<tool_call>\n<function=x>\n<parameter=y>", "qwen3_coder"),
        ("<tool_call>", "hermes"),
        ("<｜tool▁calls▁begin｜>```json", "deepseek_v3"),
        ("<｜tool▁calls▁begin｜>", "deepseek_v31"),
        ("'[TOOL_CALLS] ['", "mistral_list"),
        ("[TOOL_CALLS]' + name", "mistral"),
        ("[TOOL_CALLS]' + name + '[ARGS]'", "mistral_args"),
        ("<|start_header_id|> parameters", "llama3_json"),
        ("<|start_header_id|> [func_name1(params_name1=params_value1)]", "pythonic"),
        ("<|user|>", None),
    ],
)
def test_template_shows_its_format(template: str, name: str | None) -> None:
    assert tool_format_of(template) == name


def test_unknown_parser_is_refused_with_the_known_ones() -> None:
    for wrong in ({"tool_parser": "x"}, {"reasoning_parser": "x"}):
        with pytest.raises(ConfigError, match="auto"):
            answer_format("", **wrong)


def test_answer_without_tools_or_reasoning_needs_no_parser() -> None:
    assert answer_format("<tool_call>").reading("", {}) is None
    assert all(
        isinstance(answer_format("", name).reading("", {}) or None, Reading | None)
        for name in TOOL_FORMATS
    )
