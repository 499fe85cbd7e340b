"""Constraints on whole answers, with reasoning and calls: one grammar.

Each part is written as the format's parser reads it. Arguments keep to the tools' own schemas.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, Final

from gateway.answers import harmony as gpt_oss
from gateway.answers.formats import AnswerFormat, KeywordText, Reading, TaggedText, ToolFormat
from gateway.answers.lark import Lark
from gateway.answers.tagged_grammar import keyword_call, tagged_call
from gateway.answers.tools import Choice, Tool
from outrider.params import Constraint

_NO_PARAMETERS: Final = {"properties": {}, "additionalProperties": False}
_ANSWER_BEGINS: Final = f"{gpt_oss.START}assistant"


def constraint_of(
    answers: AnswerFormat,
    reading: Reading | None,
    choice: Choice,
    answer: Constraint | None,
    special: Mapping[str, int],
) -> Constraint | None:
    """Return the constraint on a whole answer; None if there is none.

    `answer` is on the text behind the reasoning of an answer that calls no tool. Raises
    `InvalidRequestError`.
    """
    strict = any(tool.strict for tool in choice.tools.values())
    if answer is None and not choice.forced and not strict:
        return None
    harmony = answers.is_harmony
    if not choice.tools and not harmony and (reading is None or not reading.may_think):
        return answer
    grammar = Lark(special)
    form = answers.tools
    assert form is not None, "every model has a format of calls"
    body = ""
    if choice.forced:
        body = f"{grammar.spell(form.mark)} {_calls(grammar, form, choice)}"
    elif answer is not None:
        text = grammar.language("o_answer", answer)
        body = f"{_header(grammar, 'final')} {text}" if harmony else text
        if choice.tools:
            body += f" | {grammar.spell(form.mark)} {_calls(grammar, form, choice)}"
    else:
        body = _free(grammar, form, choice)
    prefix = _thinking(grammar, reading, harmony=harmony)
    return grammar.constraint(f"{prefix} ({body})" if prefix else body)


def _thinking(grammar: Lark, reading: Reading | None, *, harmony: bool) -> str:
    """Return what may, or must, come before the answer."""
    if harmony:
        begin = _header(grammar, "analysis")
        thought = grammar.until("o_thought", gpt_oss.MESSAGE_END)
        return f"({begin} {thought} {grammar.spell(_ANSWER_BEGINS)})*"
    if reading is None or reading.marks is None or not reading.may_think:
        return ""
    thought = f"{grammar.until('o_thought', reading.marks.close)} (/\\n+/)?"
    return thought if reading.thinks else f"({grammar.spell(reading.marks.open)} {thought})?"


def _calls(grammar: Lark, form: ToolFormat, choice: Choice) -> str:
    """Return the rule of one or more calls, without the mark that begins the first."""
    names = choice.forced or tuple(choice.tools)
    text = form.text
    begin = text.begin if text.before else text.begin.removeprefix(form.mark)
    each = [
        _call(grammar, form, begin, choice.tools[name], f"o_call_{number}")
        for number, name in enumerate(names)
    ]
    call = grammar.rule("o_call", " | ".join(each))
    more = ""
    if text.parallel and not choice.one:
        between = text.between if text.before else text.between + form.mark
        more = f" ({grammar.spell(between)} {call})*"
    before = grammar.spell(text.before.removeprefix(form.mark))
    return grammar.rule("o_calls", f"{before} {call}{more} {grammar.spell(text.after)}")


def _call(grammar: Lark, form: ToolFormat, begin: str, tool: Tool, name: str) -> str:
    text = form.text
    if isinstance(text, TaggedText):
        return tagged_call(grammar, text, begin, tool, name)
    if isinstance(text, KeywordText):
        return keyword_call(grammar, text, begin, tool, name)
    schema: dict[str, Any] = {"type": "object", **(tool.parameters or _NO_PARAMETERS)}
    arguments = grammar.json(f"{name}_arguments", schema)
    spelled = grammar.spell(begin.replace("{name}", tool.name))
    return grammar.rule(name, f"{spelled} {arguments} {grammar.spell(text.end)}")


def _free(grammar: Lark, form: ToolFormat, choice: Choice) -> str:
    """Return any text, at the end of which there may be calls."""
    calls = _calls(grammar, form, choice)
    if form.is_answer:
        message = _header(grammar, "commentary")
        preamble = grammar.until("o_preamble", gpt_oss.MESSAGE_END)
        before = f"({message} {preamble} {grammar.spell(_ANSWER_BEGINS)})?"
        final = f"{_header(grammar, 'final')} {grammar.text()}"
        return f"{before} {grammar.spell(form.mark)} {calls} | {final}"
    if not form.mark:  # what begins like a call is one
        first = (form.text.before or form.text.begin)[0]
        return f"{calls} | " + grammar.rule("O_NO_CALL", rf"/([^\{first}\s](.|\n)*)?/")
    return f"{grammar.until('o_head', form.mark)} {calls} | {grammar.text()}"


def _header(grammar: Lark, channel: str) -> str:
    """Return the terminals of a message's header, the first as in every other header."""
    return f"{grammar.spell(gpt_oss.CHANNEL)} {grammar.spell(channel + gpt_oss.MESSAGE)}"
