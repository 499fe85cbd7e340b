"""OpenAI's Responses API through the official client, over a scripted model."""

from __future__ import annotations

import json
from typing import Any

import grpc
import httpx
import openai
import pytest
from openai.types.responses import Response, ResponseStreamEvent
from pydantic import BaseModel, TypeAdapter

from outrider.errors import InvalidRequestError, UnavailableError
from tests.contract.gateway.test_tools import CALLS, PARSERS, THOUGHTS
from tests.support.services.fake_scorer import Script
from tests.support.services.gateway import Running, running_gateway, tokens

SCHEMA: Any = {
    "type": "object",
    "properties": {"city": {"type": "string"}},
    "required": ["city"],
    "additionalProperties": False,
}
TOOLS: Any = [
    {"type": "function", "name": name, "description": "d", "parameters": SCHEMA, "strict": False}
    for name in ("weather", "forecast")
]
EVENTS: TypeAdapter[Any] = TypeAdapter(ResponseStreamEvent)
RESPONSE = TypeAdapter(Response)
BODY: Any = {"model": "default", "input": "Weather?"}
CALLING: Any = {**BODY, "tools": TOOLS}
TEXT = "hello 🎉 world, naïve café 日本語"


async def post(running: Running, body: Any) -> httpx.Response:
    async with httpx.AsyncClient(base_url=running.http) as client:
        return await client.post("/v1/responses", json=body)


async def events_of(running: Running, body: Any) -> list[dict[str, Any]]:
    """The events of a stream, each of them as the official client's types have it."""
    text = (await post(running, {**body, "stream": True})).text
    events = []
    for event in text.strip().split("\n\n"):
        name, _, data = event.partition("\n")
        events.append(json.loads(data.removeprefix("data: ")))
        assert name == f"event: {events[-1]['type']}"
        EVENTS.validate_json(data.removeprefix("data: "), strict=True)
    assert [event["sequence_number"] for event in events] == [*range(len(events))]
    return events


def accumulated(events: list[dict[str, Any]]) -> list[dict[str, Any]]:
    """The output that the deltas add up to; every end must agree with it."""
    items: list[dict[str, Any]] = []
    for event in events:
        kind = event["type"].removeprefix("response.")
        if kind == "output_item.added":
            assert event["output_index"] == len(items)
            items.append(json.loads(json.dumps(event["item"])))
            assert items[-1]["status"] == "in_progress"
        elif kind in ("content_part.added", "reasoning_summary_part.added"):
            name = "summary" if "summary" in kind else "content"
            assert event[f"{name}_index"] == len(items[-1][name]) == 0
            items[-1][name].append({**event["part"]})
        elif kind == "function_call_arguments.delta":
            items[-1]["arguments"] += event["delta"]
        elif kind == "function_call_arguments.done":
            assert event["arguments"] == items[-1]["arguments"]
        elif kind.endswith(".delta"):
            assert event["delta"]
            name = "summary" if "summary" in kind else "content"
            items[-1][name][event[f"{name}_index"]]["text"] += event["delta"]
        elif kind.endswith("text.done"):
            name = "summary" if "summary" in kind else "content"
            assert event["text"] == items[-1][name][0]["text"]
        elif kind.endswith("part.done"):
            name = "summary" if "summary" in kind else "content"
            assert event["part"] == items[-1][name][0]
        elif kind == "output_item.done":
            said = {k: v for k, v in event["item"].items() if k != "encrypted_content"}
            assert said | {"status": "in_progress"} == items[-1]
            items[-1] = event["item"]
        if "item_id" in event:
            assert event["item_id"] == items[event["output_index"]]["id"]
    return items


def without_ids(value: Any) -> Any:
    """Without what differs between two equal answers."""
    if isinstance(value, dict):
        names = ("id", "call_id", "item_id", "created_at", "completed_at")
        return {name: without_ids(each) for name, each in value.items() if name not in names}
    return [without_ids(each) for each in value] if isinstance(value, list) else value


async def test_text_comes_back_with_usage_and_the_request_repeated() -> None:
    async with running_gateway(Script(tokens(TEXT))) as gateway:
        answer = await gateway.client.responses.create(
            **BODY, instructions="Be brief.", metadata={"a": "b"}, temperature=0.5, store=True
        )
        sent = gateway.scorer.requests[-1].prompt_token_ids
        raw = (await post(gateway, BODY)).text
    assert RESPONSE.validate_json(raw, strict=True).output_text == answer.output_text == TEXT
    assert answer.id.startswith("resp_")
    assert (answer.status, answer.incomplete_details, answer.error) == ("completed", None, None)
    assert answer.instructions == "Be brief."
    assert answer.metadata == {"a": "b"}
    assert answer.temperature == 0.5
    assert json.loads(raw)["store"] is False
    assert [*sent] == [0, *tokens("<|system|>Be brief.\n<|user|>Weather?\n<|assistant|>")]
    assert answer.usage is not None
    assert answer.usage.input_tokens == len(sent)
    assert answer.usage.input_tokens_details.cached_tokens == 1
    assert answer.usage.output_tokens == len(tokens(TEXT))
    assert answer.usage.output_tokens_details.reasoning_tokens == 0
    assert answer.usage.total_tokens == len(sent) + len(tokens(TEXT))


@pytest.mark.parametrize("summary", [None, "auto"])
@pytest.mark.parametrize("per_round", [*range(1, 17), 100])
async def test_calls_and_reasoning_are_the_same_whole_and_streamed(
    per_round: int, summary: Any
) -> None:
    body = CALLING if summary is None else {**CALLING, "reasoning": {"summary": summary}}
    async with running_gateway(Script(tokens(CALLS), per_round=per_round), **PARSERS) as gateway:
        whole = (await post(gateway, body)).json()
        events = await events_of(gateway, body)
    assert [event["type"] for event in events[:2]] == ["response.created", "response.in_progress"]
    last = events[-1]
    assert last["type"] == "response.completed"
    assert accumulated(events) == last["response"]["output"]
    assert without_ids(whole) == without_ids(last["response"])
    thought, said, *calls = whole["output"]
    place, kind = ("summary", "summary_text") if summary else ("content", "reasoning_text")
    assert thought[place] == [{"type": kind, "text": 'Where? "Paris".'}]
    assert not thought["content" if summary else "summary"]
    assert said["content"][0]["text"] == "I look."
    assert [(call["name"], json.loads(call["arguments"])) for call in calls] == [
        ("weather", {"city": "Paris é"}),
        ("forecast", {"city": "Rome"}),
    ]
    assert len({call["call_id"] for call in calls}) == 2
    assert {item["status"] for item in whole["output"]} == {"completed"}
    assert whole["usage"]["output_tokens_details"] == {"reasoning_tokens": THOUGHTS}


async def test_reasoning_is_where_clients_return_it_from_if_they_ask() -> None:
    body = {**BODY, "include": ["reasoning.encrypted_content"]}
    async with running_gateway(Script(tokens("<think>Hm.</think>Yes.")), **PARSERS) as gateway:
        events = await events_of(gateway, body)
        for item in ((await post(gateway, body)).json()["output"][0], accumulated(events)[0]):
            assert item["encrypted_content"] == "text:Hm."


async def test_official_stream_helper_accumulates_the_answer() -> None:
    async with (
        running_gateway(Script(tokens(CALLS), per_round=3), **PARSERS) as gateway,
        gateway.client.responses.stream(**CALLING) as stream,
    ):
        kinds = [event.type async for event in stream]
        final = await stream.get_final_response()
    assert final.output_text == "I look."
    assert [item.type for item in final.output] == [
        *("reasoning", "message", "function_call", "function_call")
    ]
    assert kinds.count("response.output_item.done") == 4
    assert "response.reasoning_text.delta" in kinds


class City(BaseModel):
    city: str


async def test_client_parses_formats_and_strict_tools() -> None:
    async with running_gateway(Script(tokens('{"city": "Rome"}'))) as gateway:
        parsed = await gateway.client.responses.parse(**BODY, text_format=City)
        assert parsed.output_parsed == City(city="Rome")
        assert "city" in gateway.scorer.requests[-1].constraint.json_schema
        assert parsed.text is not None
        assert parsed.text.format is not None
        assert parsed.text.format.type == "json_schema"
    async with running_gateway(Script(tokens(CALLS)), **PARSERS) as gateway:
        tool = openai.pydantic_function_tool(City, name="weather")["function"]
        calling = await gateway.client.responses.parse(
            **BODY, tools=[{"type": "function", **tool}, TOOLS[1]], parallel_tool_calls=False
        )
        (call,) = (item for item in calling.output if item.type == "function_call")
        assert call.parsed_arguments == {"city": "Paris é"}
        assert "weather" in gateway.scorer.requests[-1].constraint.grammar
        assert calling.parallel_tool_calls is False


async def test_output_goes_back_with_the_results_of_its_calls() -> None:
    async with running_gateway(Script(tokens(CALLS)), **PARSERS) as gateway:
        answer = await gateway.client.responses.create(**CALLING)
        for output in (answer.output, [item.model_dump() for item in answer.output]):
            history: Any = [{"role": "user", "content": "Weather?"}, *output]
            history += [
                {"type": "function_call_output", "call_id": item.call_id, "output": "snow"}
                for item in answer.output
                if item.type == "function_call"
            ]
            await gateway.client.responses.create(**{**CALLING, "input": history})
    first, second = (list(request.prompt_token_ids) for request in gateway.scorer.requests[1:])
    assert first == second
    shown = "<|user|>Weather?\n<|assistant|>I look.\n<|tool|>snow\n<|tool|>snow\n<|assistant|>"
    assert first == [0, *tokens(shown)]


async def test_answer_cut_by_max_output_tokens_is_incomplete() -> None:
    async with running_gateway(Script(tokens(TEXT))) as gateway:
        body = {**BODY, "max_output_tokens": 5}
        whole = (await post(gateway, body)).json()
        events = await events_of(gateway, body)
    assert events[-1]["type"] == "response.incomplete"
    assert without_ids(whole) == without_ids(events[-1]["response"])
    assert whole["status"] == whole["output"][0]["status"] == "incomplete"
    assert whole["incomplete_details"] == {"reason": "max_output_tokens"}
    assert whole["max_output_tokens"] == whole["usage"]["output_tokens"] == 5
    assert accumulated(events) == events[-1]["response"]["output"]


async def test_empty_answer_has_an_empty_message() -> None:
    async with running_gateway(Script([])) as gateway:
        events = await events_of(gateway, BODY)
        answer = await gateway.client.responses.create(**BODY)
    assert answer.output_text == ""
    assert [item.type for item in answer.output] == ["message"]
    assert accumulated(events) == events[-1]["response"]["output"]


async def test_aux_info_is_beside_the_response() -> None:
    async with running_gateway(Script(tokens(TEXT))) as gateway:
        body = {**BODY, "aux_info": True, "speculation": {"num_speculative_tokens": 3}}
        whole = (await post(gateway, body)).json()
        streamed = (await events_of(gateway, body))[-1]["response"]
        assert gateway.scorer.requests[-1].speculation.num_speculative_tokens == 3
    for response in (whole, streamed):
        assert response["aux_info"]["output_len"] == len(tokens(TEXT))
        assert response["metrics"]["speculative_decoding"]["num_spec_steps"] > 0


async def test_stream_that_breaks_ends_with_error_and_failed() -> None:
    script = Script(
        tokens(CALLS),
        die_after=24,
        dies_as=(grpc.StatusCode.UNAVAILABLE, "gone"),
    )
    async with running_gateway(script, resume_timeout_s=0.2, **PARSERS) as gateway:
        events = await events_of(gateway, CALLING)
    *_, error, failed = events
    assert error["type"] == "error"
    assert error["code"] == "service_unavailable"
    assert failed["type"] == "response.failed"
    assert failed["response"]["status"] == "failed"
    assert failed["response"]["error"]["code"] == "server_error"
    assert failed["response"]["error"]["message"] == error["message"]
    told = accumulated(events[:-2])
    assert without_ids(failed["response"]["output"])[-1]["status"] == "incomplete"
    assert [item["type"] for item in failed["response"]["output"]] == [
        item["type"] for item in told
    ]


async def test_error_before_the_stream_has_its_own_status() -> None:
    script = Script(tokens(TEXT), refuse=UnavailableError("No."))
    async with running_gateway(script, resume_timeout_s=0.2) as gateway:
        for stream in (False, True):
            with pytest.raises(openai.InternalServerError):
                await gateway.client.responses.create(**BODY, stream=stream)


@pytest.mark.parametrize(
    ("choice", "names"),
    [
        ("required", {"weather", "forecast"}),
        ({"type": "function", "name": "forecast"}, {"forecast"}),
        (
            {"type": "allowed_tools", "mode": "required"}
            | {"tools": [{"type": "function", "name": "weather"}]},
            {"weather"},
        ),
    ],
)
async def test_forced_call_constrains_the_answer(choice: Any, names: set[str]) -> None:
    async with running_gateway(Script(tokens("x"))) as gateway:
        answer = await gateway.client.responses.create(**CALLING, tool_choice=choice)
        grammar = gateway.scorer.requests[-1].constraint.grammar
    assert {name for name in ("weather", "forecast") if f'\\"{name}\\"' in grammar} == names
    assert answer.tool_choice == choice or answer.tool_choice.model_dump() == choice  # type: ignore[union-attr]


async def test_functions_of_a_namespace_are_called_by_their_own_names() -> None:
    group = {"type": "namespace", "name": "sky", "description": "g", "tools": [TOOLS[0]]}
    body = {**BODY, "tools": [group, TOOLS[1]]}
    said = CALLS.partition("</think>\n\n")[2].replace('"weather"', '"sky.weather"')
    async with running_gateway(Script(tokens(said)), **PARSERS) as gateway:
        whole = (await post(gateway, body)).json()
        events = await events_of(gateway, body)
        again = [{"role": "user", "content": "Weather?"}, *whole["output"]]
        await gateway.client.responses.create(model="default", input=again)
    assert accumulated(events) == events[-1]["response"]["output"]
    calls = [(item.get("namespace"), item["name"]) for item in whole["output"][1:]]
    assert calls == [("sky", "weather"), (None, "forecast")]
    assert whole["tools"][0] == group


IMAGE = {"type": "input_image", "image_url": "data:", "detail": "auto"}
ITEM = {"role": "user", "content": "x"}


@pytest.mark.parametrize(
    ("body", "param", "said"),
    [
        ({"previous_response_id": "resp_1"}, "previous_response_id", "not stored"),
        ({"conversation": "c"}, "conversation", "not stored"),
        ({"prompt": {"id": "p"}}, "prompt", "not stored"),
        ({"background": True}, "background", "not supported"),
        ({"truncation": "auto"}, "truncation", "shorten"),
        ({"top_logprobs": 2}, "top_logprobs", "/v1/chat/completions"),
        ({"include": ["message.output_text.logprobs"]}, "include", "not supported"),
        ({"input": [{**ITEM, "content": [IMAGE]}]}, "input.0.content.0", "'input_image'"),
        ({"input": [{"type": "item_reference", "id": "i"}]}, "input.0", "Send the item itself"),
        ({"input": [{"content": "x"}]}, "input.0.type", "missing"),
        ({"input": [{**ITEM, "extra": 1}]}, "input.0.extra", "Extra inputs"),
        ({"input": []}, "input", "at least 1"),
        ({"input": 3}, "input", "list"),
        ({"input": None}, "input", "list"),
        (
            {"input": [{"type": "reasoning", "summary": [], "encrypted_content": "x"}]},
            "input.0.encrypted_content",
            "cannot be read",
        ),
        ({"tools": [{"type": "web_search"}]}, "tools.0", "'web_search' is not supported"),
        ({"tool_choice": "required"}, "tool_choice", "none or auto"),
        ({"tool_choice": {"type": "mcp"}}, "tool_choice", "none, auto"),
        ({"max_output_tokens": 0}, "max_output_tokens", "at least 1"),
        ({"max_output_tokens": 10_000}, "input", "maximum context length"),
        ({"max_tokens": 5}, "max_tokens", "use max_output_tokens"),
        ({"messages": [ITEM]}, "messages", "use input"),
        ({"n": 2}, "n", "Unrecognized"),
        ({"frob": 1}, "frob", "Unrecognized"),
        ({"reasoning": {"effort": "much"}}, "reasoning.effort", "'low'"),
        ({"text": {"verbosity": "low"}}, "text.verbosity", "text.verbosity is not supported"),
        ({"text": {"format": {"type": "xml"}}}, "text.format", "'xml'"),
        ({"text": {"format": {"type": "json_schema", "name": "n"}}}, "text.format.schema", "miss"),
        ({"temperature": 3.0}, "temperature", "between"),
    ],
)
async def test_wrong_field_is_refused_by_its_name_here(body: Any, param: str, said: str) -> None:
    async with running_gateway(Script(tokens("x"))) as gateway:
        answer = await post(gateway, {**BODY, **body})
    error = answer.json()["error"]
    assert (answer.status_code, error["param"]) == (400, param)
    assert said in error["message"]


async def test_format_that_the_scorer_refuses_is_named_as_here() -> None:
    refusal = InvalidRequestError("json_schema cannot be used: why.", param="json_schema")
    form = {"type": "json_schema", "name": "n", "schema": {"type": "object"}}
    async with running_gateway(Script([], refuse=refusal)) as gateway:
        answer = await post(gateway, {**BODY, "text": {"format": form}})
    error = answer.json()["error"]
    assert (answer.status_code, error["param"]) == (400, "text.format")
    assert error["message"] == "text.format cannot be used: why."


async def test_fields_without_effect_are_taken() -> None:
    async with running_gateway(Script(tokens("x"))) as gateway:
        answer = await gateway.client.responses.create(
            **BODY,
            include=["reasoning.encrypted_content"],
            truncation="disabled",
            background=False,
            service_tier="auto",
            user="u",
            prompt_cache_key="k",
            safety_identifier="s",
            text={"format": {"type": "text"}, "verbosity": "medium"},
            reasoning={"effort": "none"},
            previous_response_id=None,
            max_tool_calls=3,
            top_logprobs=0,
        )
    assert answer.output_text == "x"
