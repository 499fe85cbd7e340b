"""The official client: chats, completions, tools, parsing, responses."""

from __future__ import annotations

import json
from typing import Any, Literal

import openai
from cases import API, case, main, raises
from pydantic import BaseModel, ConfigDict

client = openai.OpenAI(base_url=API, api_key="none", max_retries=0, timeout=120)
USER: Any = [{"role": "user", "content": "Write a function."}]
CHAT: Any = {"model": "default", "messages": USER, "max_tokens": 24, "temperature": 0}


class Booking(BaseModel):
    model_config = ConfigDict(extra="forbid")  # a weak model would go on

    room: Literal["red", "blue"]
    floor: Literal[1, 2, 3]


TOOL: Any = openai.pydantic_function_tool(Booking, name="book")


@case
def models() -> None:
    assert "default" in [model.id for model in client.models.list()]


@case
def completion() -> None:
    whole = client.completions.create(
        model="default", prompt="def f(", max_tokens=16, temperature=0
    )
    assert whole.usage is not None
    assert whole.usage.completion_tokens == 16
    chunks = [
        *client.completions.create(
            **{"model": "default", "prompt": "def f(", "max_tokens": 16, "temperature": 0},
            stream=True,
            stream_options={"include_usage": True},
        )
    ]
    assert "".join(c.choices[0].text for c in chunks if c.choices) == whole.choices[0].text
    assert chunks[-1].usage == whole.usage


@case
def prompt_is_scored() -> None:
    answer = client.completions.create(
        model="default", prompt="def f(x):", max_tokens=0, echo=True, logprobs=1
    )
    logprobs = answer.choices[0].logprobs
    assert logprobs is not None
    assert answer.choices[0].text == "def f(x):" == "".join(logprobs.tokens or [])
    assert all(value is not None and value <= 0 for value in (logprobs.token_logprobs or [])[1:])


@case
def chat() -> None:
    whole = client.chat.completions.create(**CHAT)
    chunks = [
        *client.chat.completions.create(**CHAT, stream=True, stream_options={"include_usage": True})
    ]
    text = "".join(c.choices[0].delta.content or "" for c in chunks if c.choices)
    assert text == whole.choices[0].message.content
    assert chunks[-1].usage == whole.usage
    assert whole._request_id


@case
async def chats_at_once() -> None:
    async with openai.AsyncOpenAI(base_url=API, api_key="none", max_retries=0) as many:
        import asyncio

        texts = await asyncio.gather(*(many.chat.completions.create(**CHAT) for _ in range(4)))
    assert len({each.choices[0].message.content for each in texts}) == 1


@case
def parse() -> None:
    answer = client.chat.completions.parse(
        model="default", messages=USER, response_format=Booking, max_tokens=200
    )
    assert isinstance(answer.choices[0].message.parsed, Booking)


@case
def tools() -> None:
    for choice in ("required", {"type": "function", "function": {"name": "book"}}):
        request: Any = {"model": "default", "messages": USER, "tools": [TOOL]}
        request |= {"tool_choice": choice, "temperature": 0, "parallel_tool_calls": False}
        whole = client.chat.completions.parse(**request)
        with client.chat.completions.stream(**request) as stream:
            kinds = [event.type for event in stream]
            streamed = stream.get_final_completion()
        assert "tool_calls.function.arguments.done" in kinds
        called = []
        for answer in (whole, streamed):
            assert answer.choices[0].finish_reason == "tool_calls"
            (call,) = answer.choices[0].message.tool_calls or ()
            assert isinstance(call.function.parsed_arguments, Booking)
            called.append((call.function.name, call.function.arguments))
        assert called[0] == called[1]
    history: Any = [
        *USER,
        whole.choices[0].message,
        {"role": "tool", "tool_call_id": call.id, "content": "booked"},
    ]
    client.chat.completions.create(**CHAT | {"messages": history, "tools": [TOOL]})


@case
def errors() -> None:
    raises(openai.NotFoundError, "gpt-99", lambda: client.models.retrieve("gpt-99"))
    many = [{"role": "user", "content": "word " * 9000}]
    asked = CHAT | {"messages": many}
    length = "maximum context length"
    raises(openai.BadRequestError, length, lambda: client.chat.completions.create(**asked))
    raises(
        *(openai.NotFoundError, "Served: /v1/chat/completions"),
        lambda: client.embeddings.create(model="default", input="a"),
    )


@case
def responses() -> None:
    request: Any = {"model": "default", "input": "Write a function.", "temperature": 0}
    whole = client.responses.create(**request, max_output_tokens=24)
    assert whole.output_text
    with client.responses.stream(**request, max_output_tokens=24) as stream:
        events: Any = [*stream]
    assert (events[0].type, events[-1].type) == ("response.created", "response.incomplete")
    final = events[-1].response
    assert final.output_text == whole.output_text
    assert final.usage == whole.usage


@case
def responses_tools() -> None:
    tool: Any = {"type": "function", "name": "book", "parameters": Booking.model_json_schema()}
    answer = client.responses.create(
        model="default",
        input="Book a room.",
        tools=[tool | {"strict": True}],
        tool_choice="required",
        parallel_tool_calls=False,
    )
    (call,) = [item for item in answer.output if item.type == "function_call"]
    Booking.model_validate(json.loads(call.arguments))
    turns: Any = [
        {"role": "user", "content": "Book a room."},
        *answer.output,
        {"type": "function_call_output", "call_id": call.call_id, "output": "booked"},
    ]
    assert client.responses.create(model="default", input=turns, max_output_tokens=16).output_text


@case
def responses_parse() -> None:
    answer = client.responses.parse(model="default", input="Book.", text_format=Booking)
    assert isinstance(answer.output_parsed, Booking)


main()
