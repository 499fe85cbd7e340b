"""Plan a chat: its prompt, the constraint on its answers, and the way to read them."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any, Final

from gateway.answers import harmony
from gateway.answers.formats import Reading
from gateway.answers.grammar import constraint_of
from gateway.answers.tools import Choice
from gateway.generation import RequestMaker
from gateway.intake import ThinkingBudget
from outrider.errors import InvalidRequestError
from outrider.models.chat_template import RESERVED, Conversation
from outrider.params import Constraint, require

_AFFINITY_CHARS: Final = 4096  # of each text
_AFFINITY_MESSAGES: Final = 8
_ANALYSIS: Final = f"{harmony.CHANNEL}analysis{harmony.MESSAGE}"


@dataclass(frozen=True, slots=True)
class Chat:
    """The client's wishes. `*_param` are its names of parameters."""

    conversation: Conversation
    choice: Choice
    answer: Constraint | None
    """On the text of an answer that calls no tool."""
    answer_param: str
    budget: int | None
    """Tokens of reasoning at most."""
    prompt_param: str = "messages"


@dataclass(frozen=True, slots=True)
class Plan:
    """The prompt of a request, and the facts known of its answers."""

    constraint: Constraint | None
    param: str
    """The client's name of the parameter that the constraint comes from."""
    token_ids: Sequence[int] = ()
    reading: Reading | None = None
    thinking: ThinkingBudget | None = None
    ends: frozenset[int] = frozenset()
    """Tokens that end an answer besides those of the model."""
    affinity: bytes = b""
    """The same for all turns of a conversation; empty where there is none."""


def template_variables(
    given: Mapping[str, Any], effort: str | None, param: str
) -> Mapping[str, Any]:
    """Return a template's variables, for a reasoning effort. Raises `InvalidRequestError`."""
    for name in sorted(RESERVED & given.keys()):
        wrong = f"{param}.{name}"
        raise InvalidRequestError(f"{wrong} is a parameter of its own here.", param=wrong)
    if effort is None:
        return given
    if effort == "none":
        return {"enable_thinking": False, "thinking": False, **given}
    return {"reasoning_effort": effort, **given}


async def plan_chat(chat: Chat, maker: RequestMaker) -> Plan:
    """Render and tokenise a conversation. Raises `InvalidRequestError`."""
    answers, tokenizer, choice = maker.answers, maker.tokenizer, chat.choice
    if choice.forced and chat.answer is not None:
        raise InvalidRequestError(
            "An answer that must be a call has no format of its own: leave out "
            f"{chat.answer_param}, or let tool_choice be auto.",
            param="tool_choice",
        )
    if choice.tools and not choice.forced and not answers.template_takes_tools:
        raise InvalidRequestError(
            "This model's chat template knows no tools, so the model would not see them. Set "
            "tool_choice to required or to a function, or start the gateway with "
            "--tool-call-parser if the messages tell the model of the tools.",
            param="tools",
        )
    token_ids, prompt = await maker.intake.encode_chat(chat.conversation, chat.prompt_param)
    reading = answers.reading(prompt, choice.tools)
    if reading is not None:
        reading = replace(reading, one_call=choice.one, only_calls=bool(choice.forced))
    names = () if reading is None else reading.special
    special = {name: token_id for token_id, name in tokenizer.special_ids(names).items()}
    param = chat.answer_param or "tools"
    try:
        constraint = constraint_of(answers, reading, choice, chat.answer, special)
    except InvalidRequestError as error:
        shown = "tools" if error.param == "tools" else param
        message = error.message.removeprefix("tools: ")
        raise InvalidRequestError(f"{shown}: {message}", param=shown) from error
    budget = await _budget(chat.budget, maker, reading)
    affinity = _affinity(chat.conversation)
    return Plan(constraint, param, token_ids, reading, budget, affinity=affinity)


def _affinity(conversation: Conversation) -> bytes:
    """Return what all turns of a conversation share: what stands before the first answer.

    Long texts count by their begin. Other conversations with the same system prompt differ.
    """
    texts: list[str] = []
    asked = False
    for message in conversation.messages[:_AFFINITY_MESSAGES]:
        if asked and message["role"] == "assistant":
            break
        asked = asked or message["role"] == "user"
        texts.append(str(message.get("content"))[:_AFFINITY_CHARS])
    return repr(texts).encode("utf-8", "backslashreplace")


async def _budget(
    most: int | None, maker: RequestMaker, reading: Reading | None
) -> ThinkingBudget | None:
    """Raise `InvalidRequestError` where answers have no reasoning."""
    if most is None:
        return None
    require(most >= 0, "thinking_token_budget", "at least 0")
    if maker.answers.is_harmony:
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

    end_ids = await maker.intake.encode_plain(end, "thinking_token_budget")
    return ThinkingBudget(most, end_ids, goes_on)
