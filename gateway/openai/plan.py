"""What a chat's answer must look like, and how it is read."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Final

from gateway.answers import harmony
from gateway.answers.formats import Reading
from gateway.answers.grammar import constraint_of
from gateway.generation import Generator
from gateway.intake import ThinkingBudget
from gateway.openai.deltas import MessageReading
from gateway.openai.requests import ChatRequest
from outrider.errors import InvalidRequestError
from outrider.params import Constraint, require

_ANALYSIS: Final = f"{harmony.CHANNEL}analysis{harmony.MESSAGE}"


@dataclass(frozen=True, slots=True)
class Plan:
    """The prompt of a request, and what is known of its answers."""

    constraint: Constraint | None
    param: str
    """The client's name of the parameter that the constraint comes from."""
    token_ids: Sequence[int] = ()
    how: MessageReading | None = None
    thinking: ThinkingBudget | None = None


async def plan_chat(body: ChatRequest, generator: Generator) -> Plan:
    """Render and tokenise a conversation. Raises `InvalidRequestError`."""
    answers, tokenizer = generator.answers, generator.tokenizer
    choice = body.choice()
    answer, param = body.constraint()
    if choice.tools and not choice.forced and not answers.template_takes_tools:
        raise InvalidRequestError(
            "This model's chat template knows no tools, so the model would not see them. Set "
            "tool_choice to required or to a function, or start the gateway with "
            "--tool-call-parser if the messages tell the model of the tools.",
            param="tools",
        )
    token_ids, prompt = await generator.intake.encode_chat(body.conversation(), "messages")
    reading = answers.reading(prompt, choice.tools)
    names = (*reading.special, harmony.CHANNEL) if reading is not None else ()
    special = {name: token_id for token_id, name in tokenizer.special_ids(names).items()}
    try:
        constraint = constraint_of(answers, reading, choice, answer, special)
    except InvalidRequestError as error:
        shown = error.param if error.param == "tools" else param or "tools"
        message = error.message.removeprefix("tools: ")
        raise InvalidRequestError(f"{shown}: {message}", param=shown) from error
    how = None
    if reading is not None:
        with_reasoning = body.include_reasoning is not False
        how = MessageReading(reading, one_call=choice.one, with_reasoning=with_reasoning)
    return Plan(
        *(constraint, param or "tools", token_ids, how),
        await _budget(body, generator, reading),
    )


async def _budget(
    body: ChatRequest, generator: Generator, reading: Reading | None
) -> ThinkingBudget | None:
    """Raise `InvalidRequestError` where answers have no reasoning."""
    most = body.thinking_token_budget
    if most is None:
        return None
    require(most >= 0, "thinking_token_budget", "at least 0")
    if generator.answers.is_harmony:
        begin, close, is_open = _ANALYSIS, harmony.MESSAGE_END, False
        end = f"{close}{harmony.START}assistant"
    elif reading is not None and reading.marks is not None:
        if not reading.may_think:
            return None
        begin, close, is_open = reading.marks.open, reading.marks.close, reading.thinks
        end = f"\n{close}\n\n"
    else:
        raise InvalidRequestError(
            "thinking_token_budget: this model's answers have no reasoning that is known. See "
            "--reasoning-parser.",
            param="thinking_token_budget",
        )

    if most == 0 and not is_open:  # the model has not begun to think, and shall not
        end, is_open = begin + end, True

    def goes_on(text: bytes) -> bool:
        if not is_open and not text.lstrip().startswith(begin.encode()):
            return False
        return close.encode() not in text

    end_ids = await generator.intake.encode_plain(end, "thinking_token_budget")
    return ThinkingBudget(most, end_ids, goes_on)
