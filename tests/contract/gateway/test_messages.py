"""Anthropic's Messages API over a scripted model, event by event."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import grpc
import httpx
import pytest
from pydantic_core import from_json

from gateway.openai import answer as sending
from outrider.errors import InvalidRequestError, UnavailableError
from outrider.v1 import common_pb2
from tests.contract.gateway.test_tools import CALLS, PARSERS, THOUGHTS, thinking_model
from tests.support.services.fake_scorer import Script
from tests.support.services.gateway import MAX_MODEL_LEN, Running, running_gateway, tokens

SCHEMA: Any = {"type": "object", "properties": {"city": {"type": "string"}}, "required": ["city"]}
TOOLS: Any = [
    {"name": name, "description": "d", "input_schema": SCHEMA} for name in ("weather", "forecast")
]
USER: Any = {"role": "user", "content": "Weather?"}
BODY: Any = {"model": "default", "max_tokens": 200, "messages": [USER]}
CALLING: Any = {**BODY, "tools": TOOLS, "thinking": {"type": "adaptive"}}
TEXT = "hello 🎉 world, naïve café 日本語"
DELTAS = {
    "text_delta": "text",
    "thinking_delta": "thinking",
    "signature_delta": "signature",
    "input_json_delta": "partial_json",
}


async def post(
    running: Running, body: Any, path: str = "/v1/messages", **headers: str
) -> httpx.Response:
    async with httpx.AsyncClient(base_url=running.http) as client:
        return await client.post(path, json=body, headers=headers)


async def events_of(running: Running, body: Any) -> list[dict[str, Any]]:
    text = (await post(running, {**body, "stream": True})).text
    events = []
    for event in text.strip().split("\n\n"):
        if event.startswith(":"):  # a comment, which keeps the connection alive
            continue
        name, _, data = event.partition("\n")
        events.append(json.loads(data.removeprefix("data: ")))
        assert name == f"event: {events[-1]['type']}"
    return events


def accumulated(events: list[dict[str, Any]]) -> dict[str, Any]:
    """The message that the events add up to, as Anthropic's clients do it."""
    message: dict[str, Any] = {}
    inputs: dict[int, str] = {}
    is_open = False
    for event in events:
        match event["type"]:
            case "message_start":
                assert not message
                message = json.loads(json.dumps(event["message"]))
            case "content_block_start":
                assert not is_open
                assert event["index"] == len(message["content"])
                message["content"].append({**event["content_block"]})
                is_open = True
            case "content_block_delta":
                assert is_open
                assert event["index"] == len(message["content"]) - 1
                name = DELTAS[event["delta"]["type"]]
                assert event["delta"][name] or name == "signature"
                if name == "partial_json":
                    written = inputs.get(event["index"], "") + event["delta"][name]
                    inputs[event["index"]] = written
                    message["content"][-1]["input"] = from_json(written, allow_partial=True)
                else:
                    message["content"][-1][name] += event["delta"][name]
            case "content_block_stop":
                assert is_open
                is_open = False
            case "message_delta":
                assert not is_open
                message |= event["delta"]
                message["usage"] |= event["usage"]
            case kind:
                assert kind in ("ping", "message_stop")
    return message


def without_ids(message: dict[str, Any]) -> dict[str, Any]:
    blocks = [{k: v for k, v in block.items() if k != "id"} for block in message["content"]]
    return {**{k: v for k, v in message.items() if k != "id"}, "content": blocks}


async def test_text_comes_back_with_usage() -> None:
    async with running_gateway(Script(tokens(TEXT))) as gateway:
        answer = await post(gateway, {**BODY, "system": "Be brief."}, **{"x-request-id": "me"})
        sent = gateway.scorer.requests[-1].prompt_token_ids
    message = answer.json()
    assert [*sent] == [0, *tokens("<|system|>Be brief.\n<|user|>Weather?\n<|assistant|>")]
    assert answer.headers["request-id"] == "me"
    assert message["id"] == "msg_me"
    assert (message["type"], message["role"], message["model"]) == (
        "message",
        "assistant",
        "default",
    )
    assert message["content"] == [{"type": "text", "text": TEXT}]
    assert (message["stop_reason"], message["stop_sequence"]) == ("end_turn", None)
    assert message["usage"] == {
        "input_tokens": len(sent) - 1,
        "cache_creation_input_tokens": 0,
        "cache_read_input_tokens": 1,
        "output_tokens": len(tokens(TEXT)),
        "output_tokens_details": {"thinking_tokens": 0},
    }


@pytest.mark.parametrize("per_round", [*range(1, 17), 100])
async def test_calls_and_thinking_are_the_same_whole_and_streamed(per_round: int) -> None:
    async with running_gateway(Script(tokens(CALLS), per_round=per_round), **PARSERS) as gateway:
        whole = (await post(gateway, CALLING)).json()
        events = await events_of(gateway, CALLING)
    assert [event["type"] for event in events[:2]] == ["message_start", "ping"]
    assert [event["type"] for event in events[-2:]] == ["message_delta", "message_stop"]
    assert without_ids(accumulated(events)) == without_ids(whole)
    thought, said, *calls = whole["content"]
    assert thought == {"type": "thinking", "thinking": 'Where? "Paris".', "signature": ""}
    assert said["text"] == "I look."
    assert [(call["type"], call["name"], call["input"]) for call in calls] == [
        ("tool_use", "weather", {"city": "Paris é"}),
        ("tool_use", "forecast", {"city": "Rome"}),
    ]
    assert len({call["id"] for call in calls}) == 2
    assert whole["stop_reason"] == "tool_use"
    assert whole["usage"]["output_tokens_details"] == {"thinking_tokens": THOUGHTS}


async def test_answer_goes_back_with_the_results_of_its_calls() -> None:
    async with running_gateway(Script(tokens(CALLS)), **PARSERS) as gateway:
        answer = (await post(gateway, CALLING)).json()
        results = [
            {"type": "tool_result", "tool_use_id": block["id"], "content": content}
            for block, content in zip(answer["content"][2:], ["snow", [text("sun")]], strict=True)
        ]
        results.append(text("So?"))
        turns = [USER, {"role": "assistant", "content": answer["content"]}]
        turns.append({"role": "user", "content": results})
        again = await post(gateway, {**CALLING, "messages": turns, "max_tokens": 50})
        assert again.status_code == 200
        sent = gateway.scorer.requests[-1].prompt_token_ids
    shown = "<|user|>Weather?\n<|assistant|>I look.\n<|tool|>snow\n<|tool|>sun\n<|user|>So?\n"
    assert [*sent] == [0, *tokens(f"{shown}<|assistant|>")]


@pytest.mark.parametrize(
    ("thinking", "shown"),
    [
        (None, False),
        ({"type": "disabled"}, False),
        ({"type": "adaptive"}, True),
        ({"type": "adaptive", "display": "omitted"}, False),
        ({"type": "enabled", "budget_tokens": 100}, True),
    ],
)
async def test_thinking_is_shown_where_it_is_asked_for(thinking: Any, shown: bool) -> None:
    body = {**BODY, "thinking": thinking} if thinking else BODY
    async with running_gateway(Script(tokens("<think>Hm.</think>Yes.")), **PARSERS) as gateway:
        whole = (await post(gateway, body)).json()
        assert without_ids(accumulated(await events_of(gateway, body))) == without_ids(whole)
    kinds = [block["type"] for block in whole["content"]]
    assert kinds == (["thinking", "text"] if shown else ["text"])
    assert whole["usage"]["output_tokens_details"]["thinking_tokens"] > 0


async def test_thinking_budget_ends_the_thinking() -> None:
    text = "<think>\nWell, well, well, well, well."
    body = {**BODY, "thinking": {"type": "enabled", "budget_tokens": len(tokens(text)) - 4}}
    script = Script(thinking_model(text), finish=common_pb2.FINISH_REASON_LENGTH)
    async with running_gateway(script, **PARSERS) as gateway:
        whole = (await post(gateway, body)).json()
    thought, said = whole["content"]
    assert text.removeprefix("<think>\n").startswith(thought["thinking"])
    assert said["text"] == "Yes."


@pytest.mark.parametrize(
    ("fields", "text", "stop"),
    [
        ({"max_tokens": 3}, TEXT, ("max_tokens", None)),
        ({"stop_sequences": ["zz", "world"]}, TEXT, ("stop_sequence", "world")),
        ({}, "", ("end_turn", None)),
        ({"tools": TOOLS}, CALLS.partition("</think>\n\n")[2], ("tool_use", None)),
        ({"tools": TOOLS, "tool_choice": {"type": "none"}}, TEXT, ("end_turn", None)),
    ],
)
async def test_end_of_the_answer_has_its_reason(fields: Any, text: str, stop: Any) -> None:
    async with running_gateway(Script(tokens(text)), **PARSERS) as gateway:
        whole = (await post(gateway, {**BODY, **fields})).json()
        events = await events_of(gateway, {**BODY, **fields})
    assert (whole["stop_reason"], whole["stop_sequence"]) == stop
    assert without_ids(accumulated(events)) == without_ids(whole)
    assert whole["content"]


async def test_answer_that_fills_the_context_says_so() -> None:
    body = {**BODY, "max_tokens": 10_000}
    async with running_gateway(Script([5] * 300)) as gateway:
        whole = (await post(gateway, body)).json()
    assert whole["stop_reason"] == "model_context_window_exceeded"
    usage = whole["usage"]
    used = usage["input_tokens"] + usage["cache_read_input_tokens"] + usage["output_tokens"]
    assert used == MAX_MODEL_LEN


async def test_call_that_is_cut_has_what_was_written() -> None:
    cut = '<tool_call>\n{"name": "weather", "arguments": {"city": "Rome", "x": "Par'
    body = {**CALLING, "max_tokens": len(tokens(cut))}
    async with running_gateway(Script([*tokens(cut), 5]), **PARSERS) as gateway:
        whole = (await post(gateway, body)).json()
        assert without_ids(accumulated(await events_of(gateway, body))) == without_ids(whole)
    assert whole["content"][0]["input"] == {"city": "Rome"}
    assert whole["stop_reason"] == "max_tokens"


async def test_arguments_that_are_no_object_are_kept() -> None:
    wrong = '<tool_call>{"name": "weather", "arguments": {q: 1}}</tool_call>'
    async with running_gateway(Script(tokens(wrong)), **PARSERS) as gateway:
        whole = (await post(gateway, CALLING)).json()
    assert [*whole["content"][0]["input"]] == ["INVALID_JSON"]


@pytest.mark.parametrize(
    ("choice", "names"),
    [
        ({"type": "any"}, {"weather", "forecast"}),
        ({"type": "tool", "name": "forecast"}, {"forecast"}),
    ],
)
async def test_forced_call_constrains_the_answer(choice: Any, names: set[str]) -> None:
    async with running_gateway(Script(tokens("x"))) as gateway:
        answer = await post(gateway, {**BODY, "tools": TOOLS, "tool_choice": choice})
        assert answer.status_code == 200
        grammar = gateway.scorer.requests[-1].constraint.grammar
    assert {name for name in ("weather", "forecast") if f'\\"{name}\\"' in grammar} == names


async def test_second_call_is_left_out_without_parallel_calls() -> None:
    choice = {"type": "auto", "disable_parallel_tool_use": True}
    async with running_gateway(Script(tokens(CALLS)), **PARSERS) as gateway:
        whole = (await post(gateway, {**CALLING, "tool_choice": choice})).json()
    assert [block["name"] for block in whole["content"] if block["type"] == "tool_use"] == [
        "weather"
    ]


async def test_output_format_constrains_the_answer() -> None:
    config = {"format": {"type": "json_schema", "schema": SCHEMA}}
    async with running_gateway(Script(tokens('{"city": "Rome"}'))) as gateway:
        answer = await post(gateway, {**BODY, "output_config": config})
        assert json.loads(gateway.scorer.requests[-1].constraint.json_schema) == SCHEMA
    assert json.loads(answer.json()["content"][0]["text"]) == {"city": "Rome"}


async def test_aux_info_is_beside_the_message() -> None:
    body = {**BODY, "aux_info": True, "speculation": {"num_speculative_tokens": 3}}
    async with running_gateway(Script(tokens(TEXT))) as gateway:
        whole = (await post(gateway, body)).json()
        (streamed,) = (e for e in await events_of(gateway, body) if e["type"] == "message_delta")
        assert gateway.scorer.requests[-1].speculation.num_speculative_tokens == 3
    for each in (whole, streamed):
        assert each["aux_info"]["output_len"] == len(tokens(TEXT))
        assert each["metrics"]["speculative_decoding"]["num_spec_steps"] > 0


@pytest.mark.parametrize("body", [BODY, {**CALLING, "system": "Be brief."}])
async def test_count_tokens_counts_the_prompt(body: Any) -> None:
    async with running_gateway(Script(tokens(TEXT)), **PARSERS) as gateway:
        usage = (await post(gateway, body)).json()["usage"]
        asked = {name: value for name, value in body.items() if name != "max_tokens"}
        counted = (await post(gateway, asked, "/v1/messages/count_tokens")).json()
        assert len(gateway.scorer.requests) == 1
    assert counted == {"input_tokens": usage["input_tokens"] + usage["cache_read_input_tokens"]}


async def test_key_may_come_as_x_api_key(tmp_path: Path) -> None:
    keys = tmp_path / "keys"
    keys.write_text("secret\n")
    async with running_gateway(Script(tokens("x")), api_key_file=str(keys)) as gateway:
        for headers, status in (
            ({"x-api-key": "secret", "anthropic-version": "2023-06-01"}, 200),
            ({"authorization": "Bearer secret"}, 200),
            ({"x-api-key": "wrong"}, 401),
            ({}, 401),
        ):
            answer = await post(gateway, BODY, **headers)
            assert answer.status_code == status
    assert answer.json()["error"]["type"] == "authentication_error"
    assert "x-api-key" in answer.json()["error"]["message"]


async def test_thinking_that_is_not_shown_sends_pings(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sending, "_SILENCE_S", 0.0)
    text = "<think>\nWell, well.\n</think>\n\nYes."
    async with running_gateway(Script(tokens(text)), **PARSERS) as gateway:
        events = await events_of(gateway, BODY)
    kinds = [event["type"] for event in events]
    begun = kinds[kinds.index("message_start") :]
    assert begun[: begun.index("content_block_start")].count("ping") > 1
    assert accumulated(events)["content"] == [{"type": "text", "text": "Yes."}]


async def test_stream_that_breaks_ends_with_an_error() -> None:
    script = Script(tokens(CALLS), die_after=24, dies_as=(grpc.StatusCode.UNAVAILABLE, "gone"))
    async with running_gateway(script, resume_timeout_s=0.2, **PARSERS) as gateway:
        events = await events_of(gateway, CALLING)
    *begun, last = events
    assert accumulated(begun)["content"]
    assert last["type"] == "error"
    assert last["error"]["type"] == "overloaded_error"


@pytest.mark.parametrize(
    ("refusal", "status", "kind"),
    [
        (UnavailableError("No."), 503, "overloaded_error"),
        (InvalidRequestError("grammar is wrong", param="grammar"), 400, "invalid_request_error"),
    ],
)
@pytest.mark.parametrize("stream", [False, True])
async def test_error_before_the_stream_has_its_own_status(
    refusal: Any, status: int, kind: str, stream: bool
) -> None:
    async with running_gateway(Script([], refuse=refusal), resume_timeout_s=0.2) as gateway:
        answer = await post(gateway, {**BODY, "stream": stream})
    assert answer.status_code == status
    assert answer.json()["type"] == "error"
    assert answer.json()["error"]["type"] == kind


def text(words: str) -> dict[str, Any]:
    return {"type": "text", "text": words}


def said(content: Any, role: str = "user") -> Any:
    return {"messages": [USER, {"role": role, "content": content}]}


IMAGE = {"type": "image", "source": {"type": "url", "url": "http://127.0.0.1/x.png"}}


@pytest.mark.parametrize(
    ("body", "named"),
    [
        ({"max_tokens": None}, "max_tokens"),
        ({"max_tokens": 0}, "max_tokens must be at least 1"),
        (said("x " * 300), "prompt is too long: This model's maximum context length"),
        ({"context_management": {"edits": [{"type": "clear_tool_uses"}]}}, "context_management"),
        ({"messages": []}, "messages"),
        (said([IMAGE]), "messages.1.content.0: the type 'image' is not supported"),
        (
            said([{"type": "tool_result", "tool_use_id": "1", "content": [IMAGE]}]),
            "messages.1.content.0.content.0.type",
        ),
        (said([{"type": "redacted_thinking", "data": "x"}], "assistant"), "'redacted_thinking'"),
        (said([{"type": "tool_use", "id": "1", "name": "a", "input": {}}]), "of the assistant"),
        (said([{"type": "tool_result", "tool_use_id": "1"}], "assistant"), "turn of the user"),
        (said("Sunny, with", "assistant"), "is not continued"),
        ({"tools": [{"type": "bash_20250124", "name": "bash"}]}, "tools.0.type"),
        ({"tools": [{**TOOLS[0], "frob": 1}]}, "tools.0.frob"),
        ({"tools": TOOLS, "tool_choice": {"type": "tool", "name": "x"}}, "tool_choice"),
        ({"tools": TOOLS}, "knows no tools"),
        ({"thinking": {"type": "enabled"}}, "thinking.budget_tokens is missing"),
        ({"thinking": {"type": "enabled", "budget_tokens": 9}}, "thinking.budget_tokens: this"),
        ({"stop_sequences": [""]}, "stop_sequences must"),
        ({"stop": ["x"]}, "use stop_sequences"),
        ({"output_config": {"effort": "much"}}, "output_config.effort"),
        ({"mcp_servers": [{}]}, "mcp_servers"),
        ({"thread": {"type": "create"}}, "thread is not supported"),
        ({"temperature": 3.0}, "temperature"),
        ({"model": "other"}, "other"),
    ],
)
async def test_wrong_field_is_refused_by_its_name_here(body: Any, named: str) -> None:
    async with running_gateway(Script(tokens("x"))) as gateway:
        answer = await post(gateway, {**BODY, **body})
    assert answer.status_code == (404 if "model" in body else 400)
    error = answer.json()["error"]
    assert error["type"] == ("not_found_error" if "model" in body else "invalid_request_error")
    assert named in error["message"]


async def test_thread_is_refused_so_that_clients_send_all_messages() -> None:
    async with running_gateway(Script(tokens("x"))) as gateway:
        answer = await post(gateway, {**BODY, "thread": {"type": "create"}})
    assert answer.json()["error"]["details"] == {"error_code": "thread_unsupported_request"}


async def test_fields_without_effect_are_taken() -> None:
    cached = {"cache_control": {"type": "ephemeral"}}
    async with running_gateway(Script(tokens("x"))) as gateway:
        answer = await post(
            gateway,
            {
                **BODY,
                **cached,
                "context_management": {"edits": [{"type": "clear_thinking_1", "keep": "all"}]},
                "system": [
                    {"type": "text", "text": "Be ", **cached},
                    {"type": "text", "text": "so"},
                ],
                "messages": [
                    {"role": "user", "content": [{"type": "text", "text": "a", **cached}]}
                ],
                "metadata": {"user_id": "u"},
                "service_tier": "auto",
                "top_k": 5,
            },
            "/v1/messages?beta=true",
        )
        sent = gateway.scorer.requests[-1]
    assert answer.status_code == 200
    assert [*sent.prompt_token_ids] == [0, *tokens("<|system|>Be so\n<|user|>a\n<|assistant|>")]
    assert sent.sampling.top_k == 5
