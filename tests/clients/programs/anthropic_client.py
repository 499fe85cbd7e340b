"""Anthropic's official client."""

from __future__ import annotations

from typing import Any

import anthropic
from cases import BASE_URL, case, main, raises

client = anthropic.Anthropic(base_url=BASE_URL, api_key="none", max_retries=0, timeout=120)
REQUEST: Any = {
    "model": "default",
    "max_tokens": 24,
    "messages": [{"role": "user", "content": "Write a function."}],
    "extra_body": {"temperature": 0},  # which this client has no parameter for
}
TOOL: Any = {
    "name": "book",
    "description": "Book a room.",
    "input_schema": {
        "type": "object",
        "properties": {"room": {"enum": ["red", "blue"]}},
        "required": ["room"],
        "additionalProperties": False,
    },
}


@case
def message() -> None:
    whole = client.messages.create(**REQUEST, system="Be short.")
    with client.messages.stream(**REQUEST, system="Be short.") as stream:
        text = "".join(stream.text_stream)
        final = stream.get_final_message()
    assert whole.content[0].type == "text"
    assert text == whole.content[0].text
    assert final.stop_reason == whole.stop_reason == "max_tokens"
    assert final.usage.output_tokens == whole.usage.output_tokens == 24


@case
def tools() -> None:
    answer = client.messages.create(
        **REQUEST | {"max_tokens": 200},
        tools=[TOOL],
        tool_choice={"type": "any", "disable_parallel_tool_use": True},
    )
    assert answer.stop_reason == "tool_use"
    calls = [block for block in answer.content if block.type == "tool_use"]
    assert all(call.input["room"] in ("red", "blue") for call in calls)
    results = [{"type": "tool_result", "tool_use_id": c.id, "content": "booked"} for c in calls]
    turns = [
        *REQUEST["messages"],
        {"role": "assistant", "content": answer.content},
        {"role": "user", "content": results},
    ]
    client.messages.create(**REQUEST | {"messages": turns}, tools=[TOOL])


@case
def count_tokens() -> None:
    counted = client.messages.count_tokens(model="default", messages=REQUEST["messages"])
    assert counted.input_tokens == client.messages.create(**REQUEST).usage.input_tokens


@case
def errors() -> None:
    wrong = REQUEST | {"model": "claude-99"}
    raises(anthropic.NotFoundError, "claude-99", lambda: client.messages.create(**wrong))


main()
