"""Responses and Messages over the whole stack: a draft changes nothing in their answers."""

from __future__ import annotations

import json
from typing import Any

import httpx
import pytest

from tests.support.services.up import Up

pytestmark = pytest.mark.timeout(400)

SCHEMA: Any = {
    "type": "object",
    "properties": {"city": {"type": "string", "maxLength": 6}},
    "required": ["city"],
    "additionalProperties": False,
}
RESPONSES: Any = {"input": "hello", "max_output_tokens": 120}
MESSAGES: Any = {"messages": [{"role": "user", "content": "hello"}], "max_tokens": 120}
CASES: list[tuple[str, Any]] = [
    ("/v1/responses", RESPONSES),
    (
        "/v1/responses",
        {
            **RESPONSES,
            "tools": [{"type": "function", "name": "look", "parameters": SCHEMA}],
            "tool_choice": "required",
            "parallel_tool_calls": False,
        },
    ),
    ("/v1/messages", MESSAGES),
    (
        "/v1/messages",
        {
            **MESSAGES,
            "tools": [{"name": "look", "input_schema": SCHEMA}],
            "tool_choice": {"type": "any", "disable_parallel_tool_use": True},
        },
    ),
]
_DIFFERS = ("id", "call_id", "item_id", "created_at", "completed_at", "aux_info", "metrics")
_CACHE = ("cached_tokens", "input_tokens", "cache_read_input_tokens")


def told(value: Any) -> Any:
    """Without names, times, and what the prefix cache held."""
    if isinstance(value, dict):
        names = (name for name in value if name not in (*_DIFFERS, *_CACHE))
        return {name: told(value[name]) for name in names}
    return [told(each) for each in value] if isinstance(value, list) else value


def last_of(stream: str) -> list[Any]:
    """The events of a stream with the texts of their deltas joined, however they were cut."""
    shown: list[Any] = []
    for event in stream.strip().split("\n\n"):
        data = told(json.loads(event.partition("data: ")[2]))
        data.pop("sequence_number", None)
        if not data["type"].endswith("delta") or data["type"] == "message_delta":
            shown.append(data)
            continue
        text = data["delta"]
        if isinstance(text, dict):
            text = text.get("text", text.get("partial_json"))
        if shown and isinstance(shown[-1], str):
            shown[-1] += text
        else:
            shown.append(text)
    return shown


@pytest.mark.parametrize(("path", "body"), CASES)
@pytest.mark.parametrize("sampling", [{"temperature": 0}, {"temperature": 1.0, "seed": 7}])
def test_answers_and_events_with_and_without_speculation_are_equal(
    draft_model_stack: Up, path: str, body: Any, sampling: Any
) -> None:
    wholes, streams, drafted = [], [], []
    with httpx.Client(base_url=draft_model_stack.http, timeout=120) as client:
        for enabled in (True, False):
            asked = {**body, **sampling, "speculation": {"enabled": enabled}, "aux_info": True}
            answer = client.post(path, json=asked)
            assert answer.status_code == 200, answer.text
            whole = answer.json()
            wholes.append(told(whole))
            drafted.append(whole["aux_info"]["drafted"])
            streams.append(last_of(client.post(path, json={**asked, "stream": True}).text))
    assert wholes[0] == wholes[1]
    assert streams[0] == streams[1]
    assert drafted[0] > 0
    assert drafted[1] == 0
    if "tools" in body:
        (call,) = wholes[0].get("output") or wholes[0]["content"]
        arguments = call.get("input") or json.loads(call["arguments"])
        assert [*arguments] == ["city"]
