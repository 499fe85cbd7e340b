"""Items of a response's input become the turns of a chat."""

from __future__ import annotations

import time
from typing import Any

from gateway.anthropic import content
from gateway.openai.translation import read
from gateway.responses_api import items
from gateway.responses_api.requests import ResponseRequest


def messages(**body: Any) -> list[Any]:
    return [*read(ResponseRequest, body, {}).chat().conversation().messages]


def called(call_id: str, city: str) -> dict[str, Any]:
    arguments = f'{{"city": "{city}"}}'
    return {"type": "function_call", "call_id": call_id, "name": "weather", "arguments": arguments}


def returned(call_id: str, output: Any) -> dict[str, Any]:
    return {"type": "function_call_output", "call_id": call_id, "output": output}


def thought(text: str, *, place: str = "content") -> dict[str, Any]:
    kind = "reasoning_text" if place == "content" else "summary_text"
    return {"type": "reasoning", "id": "r", "summary": [], place: [{"type": kind, "text": text}]}


def call(call_id: str, city: str) -> dict[str, Any]:
    function = {"name": "weather", "arguments": {"city": city}}
    return {"type": "function", "id": call_id, "function": function}


def test_items_of_one_answer_are_one_turn() -> None:
    answer = {"type": "output_text", "text": "I look.", "annotations": [], "logprobs": []}
    made = messages(
        instructions="Be brief.",
        input=[
            {"role": "developer", "content": "And kind."},
            {"role": "user", "content": [{"type": "input_text", "text": "Weather?"}]},
            thought("Where?"),
            {"type": "message", "role": "assistant", "id": "m", "status": "completed"}
            | {"content": [answer]},
            called("1", "Oslo") | {"id": "f", "status": "completed"},
            called("2", "Rome"),
            returned("1", "snow"),
            returned("2", [{"type": "input_text", "text": "sun"}]),
            thought("Well.", place="summary"),
            called("3", "Bonn"),
            returned("3", ""),
            {"role": "assistant", "content": "Snow, sun."},
            {"role": "assistant", "content": "Bye."},
            {"role": "system", "content": "End."},
        ],
    )
    assert made == [
        {"role": "system", "content": "Be brief.\n\nAnd kind."},
        {"role": "user", "content": "Weather?"},
        {"role": "assistant", "content": "I look.", "reasoning_content": "Where?"}
        | {"tool_calls": [call("1", "Oslo"), call("2", "Rome")]},
        {"role": "tool", "tool_call_id": "1", "content": "snow"},
        {"role": "tool", "tool_call_id": "2", "content": "sun"},
        {"role": "assistant", "content": None, "reasoning_content": "Well."}
        | {"tool_calls": [call("3", "Bonn")]},
        {"role": "tool", "tool_call_id": "3", "content": ""},
        {"role": "assistant", "content": "Snow, sun."},
        {"role": "assistant", "content": "Bye."},
        {"role": "system", "content": "End."},
    ]


def test_reasoning_comes_back_from_the_field_that_clients_do_not_read() -> None:
    item = {"type": "reasoning", "summary": [], "encrypted_content": "text:Hm."}
    turn = {"role": "assistant", "content": "", "reasoning_content": "Hm."}
    assert messages(input=[item]) == [turn]
    assert messages(input=[thought("Short.", place="summary") | item | {"content": None}]) == [turn]


def test_call_of_a_namespace_has_its_full_name() -> None:
    (turn,) = messages(input=[called("1", "Oslo") | {"namespace": "sky"}])
    assert turn["tool_calls"][0]["function"]["name"] == "sky.weather"


def test_text_is_a_message_of_the_user() -> None:
    assert messages(input="Hi") == [{"role": "user", "content": "Hi"}]


def test_refusal_is_text_of_the_assistant() -> None:
    part = {"type": "refusal", "refusal": "No."}
    made = messages(
        input=[{"role": "user", "content": "?"}, {"role": "assistant", "content": [part]}]
    )
    assert made[1] == {"role": "assistant", "content": "No."}


def test_allowed_tools_are_the_only_ones_offered() -> None:
    tools = [{"type": "function", "name": name} for name in "abc"]
    chosen = [{"type": "function", "name": name} for name in "ac"]
    choice = {"type": "allowed_tools", "mode": "auto", "tools": chosen}
    body = {"input": "x", "tools": tools, "tool_choice": choice}
    chat = read(ResponseRequest, body, {}).chat()
    assert [*chat.offered()] == ["a", "c"]
    assert chat.choice().forced == ()


def test_turns_of_very_many_small_texts_take_time_for_each_alone() -> None:
    """CPU time: copying what is there for each text takes far above 2 s, all else far below 2 s."""
    part = items.InputText.model_construct(type="input_text", text="abcdefgh")
    system = items.Message.model_construct(type="message", role="system", content=[part])
    block = content.Text.model_construct(type="text", text="abcdefgh")
    answer = content.Message.model_construct(role="assistant", content=[block] * 150_000)
    end = content.Message.model_construct(role="user", content=[block])
    began = time.process_time()
    (turn,) = items.turns("", [system] * 120_000)
    first, _ = content.turns((), [answer, end])
    assert time.process_time() - began < 2
    assert turn["content"] == "\n\n".join(["abcdefgh"] * 120_000)
    assert first["content"] == "abcdefgh" * 150_000
