"""LangChain's OpenAI integration."""

from __future__ import annotations

from typing import Any, Literal

from cases import API, case, main
from langchain_core.messages import AIMessage, HumanMessage, ToolMessage
from langchain_openai import ChatOpenAI, OpenAI
from pydantic import BaseModel, ConfigDict


class Booking(BaseModel):
    """Book a room."""

    model_config = ConfigDict(extra="forbid")  # a weak model would go on

    room: Literal["red", "blue"]


def model(**more: Any) -> ChatOpenAI:
    settings = {"model": "default", "base_url": API, "api_key": "none", "max_retries": 0}
    return ChatOpenAI(**{**settings, "temperature": 0, "max_tokens": 64, **more})


@case
def chat() -> None:
    whole = model().invoke("Write a function.")
    streamed = "".join(str(chunk.content) for chunk in model().stream("Write a function."))
    assert streamed == whole.content
    assert whole.usage_metadata


@case
def completion() -> None:
    asked = OpenAI(model="default", base_url=API, api_key="none", max_tokens=8)
    assert asked.invoke("def f(")


@case
def tools() -> None:
    bound = model(max_tokens=200).bind_tools(
        [Booking], tool_choice="any", parallel_tool_calls=False
    )
    for answer in (bound.invoke("Book."), sum_of([*bound.stream("Book.")])):
        (call,) = answer.tool_calls
        assert call["args"]["room"] in ("red", "blue")
    turns = [HumanMessage("Book."), answer, ToolMessage("booked", tool_call_id=call["id"])]
    assert isinstance(model().bind_tools([Booking]).invoke(turns), AIMessage)


def sum_of(chunks: list[Any]) -> Any:
    total = chunks[0]
    for chunk in chunks[1:]:
        total += chunk
    return total


@case
def structured_output() -> None:
    for method in ("json_schema", "function_calling"):
        chain = model(max_tokens=200).with_structured_output(Booking, method=method)
        assert isinstance(chain.invoke("Book."), Booking)


@case
def responses() -> None:
    whole = model(use_responses_api=True).invoke("Write a function.")
    assert whole.text
    assert "".join(c.text for c in model(use_responses_api=True).stream("Write a function."))


main()
