"""Answers as models of each format write them, whole and malformed, and what they mean."""

from __future__ import annotations

import json
from collections.abc import Iterable
from dataclasses import dataclass, field
from itertools import chain

from gateway.answers.events import Arguments, Call, Content, Event, Reasoning
from gateway.answers.formats import AnswerFormat, Reading, answer_format
from gateway.answers.parser import AnswerParser
from gateway.answers.tools import Tool

_WEATHER = {
    "type": "object",
    "properties": {
        "city": {"type": "string"},
        "days": {"type": "integer"},
        "hourly": {"type": "boolean"},
        "near": {"type": "array", "items": {"type": "string"}},
        "limit": {"anyOf": [{"type": "number"}, {"type": "null"}]},
    },
    "required": ["city"],
}
TOOLS = {
    "weather": Tool("weather", _WEATHER),
    "search": Tool("search", {"type": "object", "properties": {"q": {"type": "string"}}}),
}


@dataclass(frozen=True)
class Meaning:
    """An answer as a client sees it. `calls` hold names and arguments as written."""

    content: str = ""
    reasoning: str = ""
    calls: list[tuple[str, str]] = field(default_factory=list)

    def parsed(self) -> list[tuple[str, object]]:
        return [(name, json.loads(arguments)) for name, arguments in self.calls]


def joined(pieces: Iterable[Iterable[Event]]) -> list[Event]:
    """Return the events of a text that came in pieces, as if it had come whole."""
    events: list[Event] = []
    for event in chain.from_iterable(pieces):
        last = events[-1] if events else None
        if isinstance(event, Call):
            events.append(event)
        elif last is not None and type(last) is type(event) and not isinstance(last, Call):
            events[-1] = type(event)(last.text + event.text)
        elif event.text:
            events.append(event)
    return events


def meaning(events: list[Event]) -> Meaning:
    calls: list[tuple[str, str]] = []
    last: Event | None = None
    for event in events:
        before, last = last, event
        if isinstance(event, Call):
            calls.append((event.name, ""))
        elif isinstance(event, Arguments):
            assert isinstance(before, Call | Arguments), "nothing parts a call's arguments"
            calls[-1] = (calls[-1][0], calls[-1][1] + event.text)
    return Meaning(
        "".join([event.text for event in events if isinstance(event, Content)]),
        "".join([event.text for event in events if isinstance(event, Reasoning)]),
        calls,
    )


def reading(
    tool_parser: str, reasoning: str = "none", *, prompt: str = "", tools: bool = True
) -> Reading:
    known: AnswerFormat = answer_format("", tool_parser, reasoning)
    found = known.reading(prompt, TOOLS if tools else {})
    assert found is not None
    return found


def events_of(how: Reading, pieces: list[str]) -> list[list[Event]]:
    parser = AnswerParser(how)
    return [*[parser.feed(piece) for piece in pieces], parser.finish()]


PARIS = '{"city": "Paris"}'
TRICKY = (
    '{"city": "</tool_call> \\"q\\" \\u00e9 \\ud83d\\ude00 {[", "near": [{"a": [1, {}]}], '
    '"days": -1.5e3}'
)
HERMES = {
    "plain": "Nothing to call here, 1 < 2 and <b>.",
    "one": f'<tool_call>\n{{"name": "weather", "arguments": {PARIS}}}\n</tool_call>',
    "around": (
        f'Let me look.\n<tool_call>{{"name": "weather", "arguments": {TRICKY}}}</tool_call>\n'
        '<tool_call>\n{"arguments": {"q": "x"}, "name": "search"}\n</tool_call>\nDone.'
    ),
    "no arguments": '<tool_call>{"name": "search"}</tool_call>',
    "null arguments": '<tool_call>{"name": "search", "arguments": null}</tool_call>',
    "brace missing": f'<tool_call>\n{{"name": "weather", "arguments": {PARIS}\n</tool_call> ok',
    "brace too many": f'<tool_call>\n{{"name": "weather", "arguments": {PARIS}}}}}\n</tool_call>',
    "no JSON": "a <tool_call>weather(city)</tool_call> b",
    "no name": '<tool_call>{"arguments": {"q": 1}}</tool_call>',
    "tag twice": f'<tool_call> <tool_call>{{"name": "weather", "arguments": {PARIS}}}</tool_call>',
    "cut in header": 'Well.\n<tool_call>\n{"name": "wea',
    "cut in arguments": '<tool_call>\n{"name": "weather", "arguments": {"city": "Par',
    "bad arguments": '<tool_call>{"name": "search", "arguments": {q: 1}}</tool_call> after',
    "cut in tag": "text <tool_ca",
    "line break in a string": '<tool_call>{"name": "search", "arguments": {"q": "a\nb"}}</tool_call>',
}
QWEN3_CODER = {
    "plain": "No <function> here.",
    "one": "<tool_call>\n<function=weather>\n<parameter=city>\nParis\n</parameter>\n</function>\n</tool_call>",
    "typed": (
        'Now:\n<tool_call>\n<function=weather>\n<parameter=city>\n"two"\nlines <b> \\ é 😀\n\n</parameter>\n'
        "<parameter=days>\n3\n</parameter>\n<parameter=hourly>\nTrue\n</parameter>\n"
        '<parameter=near>\n["a", "</x>"]\n</parameter>\n<parameter=limit>\nnull\n</parameter>\n'
        "</function>\n</tool_call>\n<tool_call>\n<function=search>\n</function>\n</tool_call>"
    ),
    "without the outer tag": "<function=search>\n<parameter=q>\n12\n</parameter>\n</function>",
    "unknown": "<tool_call>\n<function=x>\n<parameter=y>\n12\n</parameter>\n</function>\n</tool_call>",
    "no integer": "<function=weather><parameter=days>\nsoon\n</parameter></function>",
    "cut in a text": "<tool_call>\n<function=weather>\n<parameter=city>\nPar",
    "cut in a number": "<tool_call>\n<function=weather>\n<parameter=days>\n1",
    "malformed": "<tool_call>\nweather\n</tool_call>",
    "junk within": "<tool_call><function=search>hm<parameter=q>1</parameter></function></tool_call>",
}
GLM45 = {
    "one": "<tool_call>weather\n<arg_key>city</arg_key>\n<arg_value>Paris</arg_value>\n</tool_call>",
    "two": (
        'Sure.\n<tool_call>weather\n<arg_key>city</arg_key>\n<arg_value> "x"\n</arg_value>\n'
        "<arg_key>days</arg_key>\n<arg_value>2</arg_value>\n</tool_call>\n"
        "<tool_call>search\n</tool_call>"
    ),
    "malformed": '<tool_call>{"name": "weather"}</tool_call>',
    "bad key": "<tool_call>search\n<arg_key>q\n<arg_value>1</arg_value></tool_call>",
    "cut": "<tool_call>search\n<arg_key>q</arg_key>\n<arg_value>a",
}
LLAMA = {
    "plain": "Hello {there}.",
    "one": f'{{"name": "weather", "parameters": {PARIS}}}',
    "tag": f'<|python_tag|>{{"type": "function", "name": "weather", "parameters": {TRICKY}}}',
    "two": f'{{"name": "weather", "parameters": {PARIS}}}; {{"name": "search", "parameters": {{}}}}',
    "an answer in JSON": '{"name": "Bob", "age": 3}',
    "code": 'So:\n<|python_tag|>print({"a": 1})',
    "no second": f'{{"name": "weather", "parameters": {PARIS}}}; and more',
    "cut": '{"name": "weather", "parameters": {"city": "P',
}
PYTHONIC = {
    "plain": "[see](http://x.y) and f(x).",
    "one": '[weather(city="Paris")]',
    "all literals": (
        "\n[weather(city='it\\'s \\\\ \\u00e9 \\U0001F600 \"q\" \\x41\\q\\n', days=-1_000, hourly = True,"
        ' near=["a", [], {}, {"b": None, 1: .5}, false,], limit=1e3, ) , search( ) ]\n'
    ),
    "mark": 'So.\n<|python_start|>[weather(city="Paris"), search(q="[f(a=1)]")]<|python_end|> ok',
    "mark beside code": "<|python_start|>print(1)<|python_end|>",
    "JSON within": f"[search(q={TRICKY})]",
    "positional": '[weather("Paris")]',
    "list": "[1, 2]",
    "no name": '[weather[0](city="Paris")]',
    "cut in name": "[weather(ci",
    "cut in a string": '[weather(city="Par',
    "cut in an escape": '[weather(city="Par\\u00e',
    "cut in a number": "[weather(days=12",
    "second cut": '[weather(city="Paris"), sear',
    "bare word": "[weather(city=Paris, days=1)]",
    "positional later": '[weather(city="Paris", 3)] so',
    "line break in a string": '[search(q="a\nb")]',
}
MISTRAL = {
    "list": f'[TOOL_CALLS] [{{"name": "weather", "arguments": {TRICKY}, "id": "abcdefghi"}}]',
    "list of two": (
        f'Ok.[TOOL_CALLS][{{"name": "weather", "arguments": {PARIS}}}, '
        '{"arguments": {"q": "]"}, "name": "search"}] bye'
    ),
    "named": f"[TOOL_CALLS]weather{TRICKY}",
    "named two": f'[TOOL_CALLS]weather{PARIS}[TOOL_CALLS]search{{"q": "[TOOL_CALLS]"}}',
    "args": f"Hm.[TOOL_CALLS]weather[CALL_ID]123456789[ARGS]{PARIS}",
    "args alone": f"[TOOL_CALLS]weather[ARGS]{PARIS}",
    "malformed": "[TOOL_CALLS] nothing [TOOL_CALLS][1]",
    "second malformed": f'[TOOL_CALLS][{{"name": "weather", "arguments": {PARIS}}}, 7]',
    "cut": '[TOOL_CALLS]weather{"city": ',
    "cut in list": '[TOOL_CALLS][{"name": "weather", "argu',
}
_DS = "<｜tool▁call▁begin｜>function<｜tool▁sep｜>{}\n```json\n{}\n```<｜tool▁call▁end｜>"
_DS31 = "<｜tool▁call▁begin｜>{}<｜tool▁sep｜>{}<｜tool▁call▁end｜>"
_BEGIN, _END = "<｜tool▁calls▁begin｜>", "<｜tool▁calls▁end｜>"
DEEPSEEK = {
    "plain": "No call <｜here｜>.",
    "v3": f"Wait.{_BEGIN}{_DS.format('weather', TRICKY)}{_END}",
    "v3 two": f"{_BEGIN}{_DS.format('weather', PARIS)}\n{_DS.format('search', '{}')}{_END}",
    "v31": f"{_BEGIN}{_DS31.format('weather', PARIS)}{_DS31.format('search', '{}')}{_END}",
    "malformed": f"{_BEGIN}weather{_END}",
    "no arguments": f"{_BEGIN}<｜tool▁call▁begin｜>weather<｜tool▁sep｜><｜tool▁call▁end｜>{_END}",
    "cut": f"{_BEGIN}<｜tool▁call▁begin｜>function<｜tool▁sep｜>weather\n```json\n{{",
}
HARMONY = {
    "plain": "No channel at all.",
    "final": "<|channel|>analysis<|message|>Think.\n<|end|><|start|>assistant<|channel|>final<|message|>Hi <b>.",
    "call": (
        "<|channel|>analysis<|message|>Need it.<|end|><|start|>assistant<|channel|>commentary "
        f"to=functions.weather <|constrain|>json<|message|>{TRICKY}<|call|>"
    ),
    "recipient first": f"<|start|>assistant to=functions.weather<|channel|>commentary json<|message|>{PARIS}",
    "preamble": (
        "<|channel|>commentary<|message|>I will look.<|end|><|start|>assistant<|channel|>"
        f"commentary to=functions.weather<|message|>{PARIS}"
    ),
    "no JSON": "<|channel|>commentary to=functions.search<|message|>q=1<|call|>",
    "cut in header": "<|channel|>comm",
    "cut in thought": "<|channel|>analysis<|message|>Hm",
    "broken header": "<|channel|>\nfinal<|message|>x<|end|>y",
}
ANSWERS = [
    (parser, name, text)
    for parser, answers in (
        ("hermes", HERMES),
        ("qwen3_coder", QWEN3_CODER),
        ("glm45", GLM45),
        ("llama3_json", LLAMA),
        ("mistral", MISTRAL),
        ("deepseek_v3", DEEPSEEK),
        ("openai", HARMONY),
        ("pythonic", PYTHONIC),
    )
    for name, text in answers.items()
]
