"""LlamaIndex' client for OpenAI-like servers."""

from __future__ import annotations

from typing import Any, Literal

from cases import API, case, main
from llama_index.core.llms import ChatMessage
from llama_index.core.tools import FunctionTool
from llama_index.llms.openai_like import OpenAILike
from pydantic import BaseModel, ConfigDict


class Booking(BaseModel):
    """Book a room."""

    model_config = ConfigDict(extra="forbid")  # a weak model would go on

    room: Literal["red", "blue"]


def model(**more: Any) -> OpenAILike:
    settings = {"model": "default", "api_base": API, "api_key": "none", "is_chat_model": True}
    limits = {"context_window": 2048, "max_tokens": 64, "temperature": 0, "max_retries": 0}
    return OpenAILike(**{**settings, **limits, **more})


MESSAGES = [ChatMessage(role="user", content="Write a function.")]


@case
def chat() -> None:
    whole = model().chat(MESSAGES).message.content
    *_, last = model().stream_chat(MESSAGES)
    assert last.message.content == whole


@case
def completion() -> None:
    assert model(is_chat_model=False).complete("def f(").text


@case
def tools() -> None:
    def book(room: str) -> str:
        """Book a room."""
        return f"{room} is booked"

    tool = FunctionTool.from_defaults(book, fn_schema=Booking)
    asked = model(is_function_calling_model=True, max_tokens=200)
    answer = asked.chat_with_tools([tool], "Book.", tool_required=True)
    (call, *_) = asked.get_tool_calls_from_response(answer)
    assert call.tool_kwargs["room"] in ("red", "blue")


@case
def structured_output() -> None:
    for more in ({"should_use_structured_outputs": True}, {"is_function_calling_model": True}):
        chain = model(max_tokens=200, **more).as_structured_llm(Booking)
        assert isinstance(chain.chat(MESSAGES).raw, Booking)


main()
