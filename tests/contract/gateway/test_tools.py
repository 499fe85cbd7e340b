"""Tools and reasoning through the official client, over a scripted model."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import grpc
import httpx
import openai
import pytest
from pydantic import BaseModel

from gateway.openai import answer as sending
from outrider.models.tokenizer import Tokenizer
from outrider.rpc.channel import open_channel
from outrider.v1 import common_pb2, generation_pb2, generation_pb2_grpc, scorer_pb2
from tests.support.models.tokenizers import byte_level_bpe, save
from tests.support.services.fake_scorer import Script
from tests.support.services.gateway import Running, fake_scorer, running_gateway, tokens

USER: Any = [{"role": "user", "content": "Weather?"}]
TOOLS: Any = [
    {
        "type": "function",
        "function": {
            "name": name,
            "description": "d",
            "parameters": {
                "type": "object",
                "properties": {"city": {"type": "string"}},
                "required": ["city"],
                "additionalProperties": False,
            },
        },
    }
    for name in ("weather", "forecast")
]
CALLS = (
    '<think>\nWhere? "Paris".\n</think>\n\nI look.\n<tool_call>\n{"name": "weather", "arguments": '
    '{"city": "Paris é"}}\n</tool_call>\n<tool_call>\n{"name": "forecast", "arguments": '
    '{"city": "Rome"}}\n</tool_call>'
)
THOUGHTS = len(tokens(CALLS.partition("</think>")[0])) - len(tokens("<think>"))
PARSERS = {"tool_call_parser": "hermes", "reasoning_parser": "think"}
EXPECTED = [("weather", {"city": "Paris é"}), ("forecast", {"city": "Rome"})]


def parsed(message: Any) -> list[tuple[str, Any]]:
    return [
        (call.function.name, json.loads(call.function.arguments)) for call in message.tool_calls
    ]


@pytest.mark.parametrize("per_round", [1, 2, 7, 100])
async def test_calls_and_reasoning_are_the_same_whole_and_streamed(per_round: int) -> None:
    script = Script(tokens(CALLS), per_round=per_round)
    async with running_gateway(script, **PARSERS) as gateway:
        request: Any = {"model": "default", "messages": USER, "tools": TOOLS}
        answer = await gateway.client.chat.completions.create(**request)
        async with gateway.client.chat.completions.stream(
            **request, stream_options={"include_usage": True}
        ) as stream:
            events = [event.type async for event in stream]
            streamed = await stream.get_final_completion()
    for each in (answer, streamed):
        message: Any = each.choices[0].message
        assert each.choices[0].finish_reason == "tool_calls"
        assert message.content == "I look."
        assert message.reasoning_content == message.reasoning == 'Where? "Paris".'
        assert parsed(message) == EXPECTED
        assert len({call.id for call in message.tool_calls}) == 2
        assert each.usage is not None
        assert each.usage.completion_tokens == len(tokens(CALLS))
        details = each.usage.completion_tokens_details
        assert details is not None
        assert details.reasoning_tokens == THOUGHTS
    assert "tool_calls.function.arguments.done" in events
    assert events.count("tool_calls.function.arguments.delta") > (per_round < 7)


async def test_second_call_is_left_out_without_parallel_calls() -> None:
    async with running_gateway(Script(tokens(CALLS)), **PARSERS) as gateway:
        for stream in (False, True):
            answer: Any = await gateway.client.chat.completions.create(
                model="default",
                messages=USER,
                tools=TOOLS,
                parallel_tool_calls=False,
                stream=stream,
                extra_body={"include_reasoning": False},
            )
            if stream:
                deltas = [chunk.choices[0].delta async for chunk in answer]
                assert {c.index for d in deltas for c in d.tool_calls or ()} == {0}
                assert not any(hasattr(delta, "reasoning") for delta in deltas)
            else:
                assert parsed(answer.choices[0].message) == EXPECTED[:1]
                assert not hasattr(answer.choices[0].message, "reasoning")


async def test_request_without_tools_gets_calls_as_text() -> None:
    text = CALLS.partition("</think>\n\n")[2]
    async with running_gateway(Script(tokens(text)), **PARSERS) as gateway:
        for body in ({}, {"tools": TOOLS, "tool_choice": "none"}):
            answer = await gateway.client.chat.completions.create(
                model="default", messages=USER, **body
            )
            assert answer.choices[0].message.content == text
            assert answer.choices[0].finish_reason == "stop"


@pytest.mark.parametrize("tool_choice", ["auto", "required"])
async def test_call_cut_before_its_arguments_is_content_unless_it_is_forced(
    tool_choice: str,
) -> None:
    cut = '<tool_call>\n{"name": "wea'
    script = Script(tokens(cut), per_round=3, finish=common_pb2.FINISH_REASON_LENGTH)
    async with running_gateway(script, tool_call_parser="hermes") as gateway:
        request: Any = {"model": "default", "messages": USER, "tools": TOOLS, "seed": 1}
        request["tool_choice"] = tool_choice
        answer = await gateway.client.chat.completions.create(**request)
        stream = await gateway.client.chat.completions.create(**request, stream=True)
        streamed = "".join([chunk.choices[0].delta.content or "" async for chunk in stream])
    assert answer.choices[0].finish_reason == "length"
    assert not answer.choices[0].message.tool_calls
    assert (answer.choices[0].message.content or "") == streamed
    assert streamed == ("" if tool_choice == "required" else cut)


async def test_cut_call_has_finish_reason_length() -> None:
    cut = CALLS[: CALLS.index("Paris é") + 3]
    script = Script(tokens(cut), finish=common_pb2.FINISH_REASON_LENGTH)
    async with running_gateway(script, **PARSERS) as gateway:
        answer = await gateway.client.chat.completions.create(
            model="default", messages=USER, tools=TOOLS
        )
    (call,) = answer.choices[0].message.tool_calls or ()
    assert answer.choices[0].finish_reason == "length"
    assert call.type == "function"
    assert call.function.arguments == '{"city": "Par'


@pytest.mark.parametrize("stream", [False, True])
async def test_stop_string_cuts_the_text_that_calls_are_read_from(stream: bool) -> None:
    async with running_gateway(Script(tokens(CALLS)), **PARSERS) as gateway:
        request: Any = {"model": "default", "messages": USER, "tools": TOOLS, "logprobs": True}
        request["stop"] = ['\n<tool_call>\n{"name": "forecast']
        if stream:
            async with gateway.client.chat.completions.stream(**request) as chunks:
                answer: Any = await chunks.get_final_completion()
        else:
            answer = await gateway.client.chat.completions.create(**request)
    (choice,) = answer.choices
    assert parsed(choice.message) == EXPECTED[:1]
    assert choice.message.content == "I look."
    spelled = b"".join(bytes(entry.bytes or ()) for entry in choice.logprobs.content)
    assert CALLS.encode().startswith(spelled)


async def test_several_choices_with_logprobs_are_read_apart() -> None:
    text = '{"name": "weather", "parameters": {"city": "Paris"}}'
    async with running_gateway(Script(tokens(text)), tool_call_parser="llama3_json") as gateway:
        stream = await gateway.client.chat.completions.create(
            model="default", messages=USER, tools=TOOLS, n=3, logprobs=True, stream=True
        )
        arguments, entries, reasons = ["", "", ""], [0, 0, 0], ["", "", ""]
        async for chunk in stream:
            choice = chunk.choices[0]
            for call in choice.delta.tool_calls or ():
                assert call.function is not None
                arguments[choice.index] += call.function.arguments or ""
            if choice.logprobs is not None:
                entries[choice.index] += len(choice.logprobs.content or ())
            reasons[choice.index] += choice.finish_reason or ""
    assert arguments == ['{"city": "Paris"}'] * 3
    assert entries == [len(tokens(text))] * 3
    assert reasons == ["tool_calls"] * 3


async def test_special_tokens_of_the_templates_format_are_read_and_others_hidden(
    tmp_path: Path,
) -> None:
    made = byte_level_bpe()
    made.add_special_tokens(["[TOOL_CALLS]", "[ARGS]", "[OTHER]"])
    call = "{{ '[TOOL_CALLS]' + name + '[ARGS]' }}"
    template = "x{{ (tools or []) | length }}{% if calls %}" + call + "{% endif %}"
    folder = save(made, tmp_path, chat_template=template)
    tokenizer = Tokenizer.load(folder)
    text = 'Well.[OTHER][TOOL_CALLS]weather[ARGS]{"city": "Paris"}[OTHER]'
    ids = tokenizer.encode(text, add_special_tokens=False)
    fake = fake_scorer(
        Script(ids, per_round=3),
        vocab_size=tokenizer.vocab_size,
        tokenizer_hash=tokenizer.hash,
    )
    async with running_gateway(fake, model=str(folder)) as gateway:
        request: Any = {"model": "default", "messages": USER}
        answer = await gateway.client.chat.completions.create(**request, tools=TOOLS)
        plain = await gateway.client.chat.completions.create(**request)
        await gateway.client.chat.completions.create(**request, tools=TOOLS, tool_choice="required")
        grammar = gateway.scorer.requests[-1].constraint.grammar
    message = answer.choices[0].message
    assert message.content == "Well."
    assert parsed(message) == [("weather", {"city": "Paris"})]
    assert message.tool_calls is not None
    assert len(message.tool_calls[0].id) == 9
    assert plain.choices[0].message.content == 'Well.weather{"city": "Paris"}'
    assert answer.usage is not None
    assert plain.usage is not None
    assert answer.usage.completion_tokens == plain.usage.completion_tokens == len(ids)
    (mark,) = tokenizer.special_ids(["[TOOL_CALLS]"])
    assert f"<[{mark}]>" in grammar


class weather(BaseModel):  # noqa: N801 - the tool's name
    city: str


async def test_client_parses_strict_tools_into_its_models() -> None:
    async with running_gateway(Script(tokens(CALLS)), **PARSERS) as gateway:
        tool = openai.pydantic_function_tool(weather)
        answer = await gateway.client.chat.completions.parse(
            model="default", messages=USER, tools=[tool]
        )
        message = answer.choices[0].message
        assert message.tool_calls is not None
        assert message.tool_calls[0].function.parsed_arguments == weather(city="Paris é")
        assert "weather" in gateway.scorer.requests[-1].constraint.grammar
        # The message goes back as it came, with the tool's answer.
        call_id = message.tool_calls[0].id
        history = [*USER, message, {"role": "tool", "tool_call_id": call_id, "content": "sunny"}]
        await gateway.client.chat.completions.create(model="default", messages=history, tools=TOOLS)
        dumped = [*USER, message.model_dump(), history[-1]]
        await gateway.client.chat.completions.create(model="default", messages=dumped, tools=TOOLS)


@pytest.mark.parametrize(
    ("choice", "names"),
    [
        ("required", {"weather", "forecast"}),
        ({"type": "function", "function": {"name": "forecast"}}, {"forecast"}),
    ],
)
async def test_forced_call_constrains_even_a_model_that_knows_no_tools(
    choice: Any, names: set[str]
) -> None:
    async with running_gateway(Script(tokens("x"))) as gateway:
        body: Any = {"model": "default", "messages": USER, "tools": TOOLS}
        await gateway.client.chat.completions.create(**body, tool_choice=choice)
        grammar = gateway.scorer.requests[-1].constraint.grammar
        assert {name for name in ("weather", "forecast") if f'\\"{name}\\"' in grammar} == names
        with pytest.raises(openai.BadRequestError, match="knows no tools"):
            await gateway.client.chat.completions.create(**body)
        with pytest.raises(openai.BadRequestError, match="no format of its own"):
            await gateway.client.chat.completions.create(
                **body, tool_choice=choice, extra_body={"structured_outputs": {"regex": "a"}}
            )
        # OpenAI's format is about text, of which there is none; Instructor sends both.
        await gateway.client.chat.completions.create(
            **body, tool_choice=choice, response_format={"type": "json_object"}
        )
        assert gateway.scorer.requests[-1].constraint.grammar == grammar


async def test_grpc_chat_answers_with_parts() -> None:
    tools = [
        generation_pb2.Tool(name=name, parameters='{"properties": {"city": {"type": "string"}}}')
        for name in ("weather", "forecast")
    ]
    called = generation_pb2.ToolCall(id="1", name="weather", arguments='{"city": "Oslo"}')
    turns = [
        generation_pb2.ChatMessage(role="user", content="Weather?"),
        generation_pb2.ChatMessage(role="assistant", tool_calls=[called], reasoning="Hm."),
        generation_pb2.ChatMessage(role="tool", content="snow", tool_call_id="1"),
    ]
    async with (
        running_gateway(Script(tokens(CALLS)), **PARSERS) as gateway,
        open_channel(gateway.grpc) as channel,
    ):
        stub = generation_pb2_grpc.GenerationServiceStub(channel)
        chat = generation_pb2.ChatPrompt(messages=turns, tools=tools)
        responses = [r async for r in stub.Generate(generation_pb2.GenerateRequest(chat=chat))]
        for wrong in (
            {"function": "x"},
            {"tool_choice": "TOOL_CHOICE_REQUIRED", "tools": []},
            {"template_variables": "[]"},
        ):
            refused = generation_pb2.ChatPrompt(**{"messages": turns, "tools": tools, **wrong})
            with pytest.raises(grpc.aio.AioRpcError) as caught:
                await stub.Generate(generation_pb2.GenerateRequest(chat=refused)).read()
            assert caught.value.code() is grpc.StatusCode.INVALID_ARGUMENT
    assert "".join(response.text for response in responses) == CALLS
    parts = [part for response in responses for part in response.parts]
    assert "".join(part.content for part in parts) == "I look."
    assert "".join(part.reasoning for part in parts) == 'Where? "Paris".'
    calls: list[list[str]] = []
    for part in parts:
        if part.HasField("call"):
            calls.append([part.call.name, ""])
        elif part.HasField("arguments"):
            calls[-1][1] += part.arguments
    assert [(name, json.loads(arguments)) for name, arguments in calls] == EXPECTED


def thinking_model(text: str) -> Callable[[scorer_pb2.ScorerServiceGenerateRequest], list[int]]:
    """Thinks on, unless its prompt shows that it has been ended."""
    ended = tokens("\n</think>\n\n")

    def answer(request: scorer_pb2.ScorerServiceGenerateRequest) -> list[int]:
        given = list(request.prompt_token_ids)
        if given[-len(ended) :] == ended:
            return tokens("Yes.")
        return tokens(text)[: request.stop.max_tokens]

    return answer


@pytest.mark.parametrize("stream", [False, True])
async def test_thinking_budget_ends_the_reasoning(stream: bool) -> None:
    text = "<think>\nWell, well, well, well, well."
    budget = len(tokens(text)) - 4
    script = Script(thinking_model(text), finish=common_pb2.FINISH_REASON_LENGTH)
    async with running_gateway(script, **PARSERS) as gateway:
        answer: Any = await gateway.client.chat.completions.create(
            model="default",
            messages=USER,
            stream=stream,
            max_tokens=60,
            logprobs=True,
            extra_body={"thinking_token_budget": budget},
        )
        reasoning = content = ""
        entries = 0
        choices = [c.choices[0] async for c in answer] if stream else answer.choices
        for choice in choices:
            message = choice.delta if stream else choice.message
            reasoning += getattr(message, "reasoning", "")
            content += message.content or ""
            entries += len(choice.logprobs.content) if choice.logprobs else 0
        first, second = gateway.scorer.requests
    head = tokens(text)[:budget]
    ended = tokens("\n</think>\n\n")
    assert content == "Yes."
    assert text.removeprefix("<think>\n").startswith(reasoning)
    assert reasoning
    assert entries == budget + len(ended) + len(tokens("Yes."))
    assert first.stop.max_tokens == budget
    assert second.stop.max_tokens == 60 - budget - len(ended)
    assert list(second.prompt_token_ids) == [*first.prompt_token_ids, *head, *ended]
    assert second.num_resumed_tokens == budget + len(ended)


async def test_prompt_logprobs_beside_no_thinking_are_refused_unless_nothing_is_generated() -> None:
    async with running_gateway(Script(tokens("x")), **PARSERS) as gateway:
        request: Any = {"model": "default", "messages": USER}
        extra = {"thinking_token_budget": 0, "prompt_logprobs": 0}
        with pytest.raises(openai.BadRequestError, match="prompt_logprobs must be left out beside"):
            await gateway.client.chat.completions.create(**request, extra_body=extra)
        with pytest.raises(openai.InternalServerError):  # this scorer sends none
            await gateway.client.chat.completions.create(**request, max_tokens=0, extra_body=extra)
        assert [r.prompt_logprobs for r in gateway.scorer.requests] == [0]


async def test_answer_whose_reasoning_is_left_out_keeps_its_connection_alive(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(sending, "_SILENCE_S", 0.0)
    async with (
        running_gateway(Script(tokens("<think>\nWell, well.\n</think>\n\nYes.")), **PARSERS) as it,
        httpx.AsyncClient(base_url=it.http) as client,
    ):
        body = {"messages": USER, "stream": True, "include_reasoning": False}
        text = (await client.post("/v1/chat/completions", json=body)).text
    assert ": waiting" in text.partition("data: ")[2]


async def test_thinking_that_ends_within_its_budget_goes_on_unchanged() -> None:
    text = tokens("<think>a</think>And so on and on and on.")

    def answer(request: scorer_pb2.ScorerServiceGenerateRequest) -> list[int]:
        done = request.num_resumed_tokens
        return text[done : done + request.stop.max_tokens]

    async with running_gateway(Script(answer), **PARSERS) as gateway:
        gateway.scorer.script.finish = common_pb2.FINISH_REASON_LENGTH
        got = await gateway.client.chat.completions.create(
            model="default",
            messages=USER,
            max_tokens=len(text),
            extra_body={"thinking_token_budget": len(text) - 4},
        )
    assert got.choices[0].message.content == "And so on and on and on."
    assert got.usage is not None
    assert got.usage.completion_tokens == len(text)


async def test_template_gets_effort_and_variables(monkeypatch: pytest.MonkeyPatch) -> None:
    from outrider.models.chat_template import ChatTemplate, Conversation

    seen: list[Conversation] = []

    def render(_: ChatTemplate, conversation: Conversation) -> str:
        seen.append(conversation)
        return "x"

    monkeypatch.setattr(ChatTemplate, "render", render)
    async with running_gateway(Script(tokens("x"))) as gateway:
        for effort in ("high", "none"):
            await gateway.client.chat.completions.create(
                model="default",
                messages=USER,
                reasoning_effort=effort,  # type: ignore[arg-type]
                extra_body={"chat_template_kwargs": {"a": [1]}},
            )
    assert seen[0].variables == {"reasoning_effort": "high", "a": [1]}
    assert seen[1].variables == {"enable_thinking": False, "thinking": False, "a": [1]}
    assert isinstance(gateway, Running)
