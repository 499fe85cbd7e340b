"""The gRPC face: chunks, statuses with details, cancellation."""

from __future__ import annotations

import asyncio
import re
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import grpc
import pytest
from grpc_health.v1 import health_pb2, health_pb2_grpc

from outrider.cli.client import stream
from outrider.errors import (
    CapacityError,
    InvalidRequestError,
    OutriderError,
    PromptTooLongError,
    UnauthenticatedError,
)
from outrider.models.chat_template import ChatTemplate, Conversation
from outrider.rpc.channel import open_channel
from outrider.rpc.status import from_rpc_error
from outrider.v1 import common_pb2, generation_pb2, generation_pb2_grpc
from tests.support.services.fake_scorer import Script, logprobs_of
from tests.support.services.gateway import (
    MAX_MODEL_LEN,
    Running,
    running_gateway,
    tokenizers_that_hang,
    tokens,
)
from tests.support.waiting import until

TEXT = "hello 🎉 world, naïve café 日本語"


@asynccontextmanager
async def stub_of(gateway: Running) -> AsyncIterator[generation_pb2_grpc.GenerationServiceStub]:
    async with open_channel(gateway.grpc) as channel:
        yield generation_pb2_grpc.GenerationServiceStub(channel)


async def generate(
    gateway: Running, request: generation_pb2.GenerateRequest, key: str | None = None
) -> list[generation_pb2.GenerateResponse]:
    metadata = (("authorization", f"Bearer {key}"),) if key else None
    async with stub_of(gateway) as stub:
        return [response async for response in stub.Generate(request, metadata=metadata)]


async def refusal(
    gateway: Running, request: generation_pb2.GenerateRequest, key: str | None = None
) -> tuple[grpc.StatusCode, OutriderError]:
    with pytest.raises(grpc.aio.AioRpcError) as caught:
        await generate(gateway, request, key)
    return caught.value.code(), from_rpc_error(caught.value)


def with_tool(**tool: str) -> generation_pb2.GenerateRequest:
    chat = generation_pb2.ChatPrompt(
        messages=[generation_pb2.ChatMessage(role="user", content="x")],
        tools=[generation_pb2.Tool(**tool)],  # type: ignore[arg-type]
    )
    return generation_pb2.GenerateRequest(chat=chat)


def with_advice(**advice: Any) -> generation_pb2.GenerateRequest:
    speculation = common_pb2.SpeculationParams(advice=common_pb2.Advice(**advice))
    return generation_pb2.GenerateRequest(text="x", speculation=speculation)


async def test_generate_with_text_returns_whole_text() -> None:
    async with running_gateway(Script(tokens(TEXT))) as gateway:
        responses = await generate(
            gateway, generation_pb2.GenerateRequest(text="x", aux_info=True, request_id="mine")
        )
    assert "".join(response.text for response in responses) == TEXT
    for response in responses:
        assert response.text == "".join(token.text for token in response.tokens)
        assert "\ufffd" not in response.text
        assert response.request_id == "mine"
    assert [token.id for r in responses for token in r.tokens] == tokens(TEXT)
    kinds = {token.kind for response in responses for token in response.tokens}
    assert kinds == {common_pb2.TOKEN_KIND_ACCEPTED, common_pb2.TOKEN_KIND_BONUS}
    *before, last = responses
    assert not any(r.finish_reason or r.HasField("usage") or r.HasField("aux_info") for r in before)
    assert last.finish_reason == common_pb2.FINISH_REASON_STOP
    assert last.usage.completion_tokens == last.aux_info.output_len == len(tokens(TEXT))


async def test_generate_with_tokens_or_chat_sends_their_ids() -> None:
    async with running_gateway(Script(tokens(TEXT))) as gateway:
        prompt = generation_pb2.TokenPrompt(token_ids=[5, 6])
        await generate(gateway, generation_pb2.GenerateRequest(tokens=prompt))
        assert list(gateway.scorer.requests[-1].prompt_token_ids) == [5, 6]
        turn = generation_pb2.ChatMessage(role="user", content="hello")
        chat = generation_pb2.ChatPrompt(messages=[turn])
        responses = await generate(gateway, generation_pb2.GenerateRequest(chat=chat))
        assert not responses[-1].HasField("aux_info")
        expected = [0, *tokens("<|user|>hello\n<|assistant|>")]
        assert list(gateway.scorer.requests[-1].prompt_token_ids) == expected


async def test_chat_message_with_name_reaches_template(monkeypatch: pytest.MonkeyPatch) -> None:
    rendered: list[dict[str, str]] = []

    def render(_: ChatTemplate, conversation: Conversation) -> str:
        rendered.extend(map(dict, conversation.messages))
        return "x"

    monkeypatch.setattr(ChatTemplate, "render", render)
    turns = [{"role": "user", "content": "hello", "name": "alice"}, {"role": "user", "content": ""}]
    chat = generation_pb2.ChatPrompt(
        messages=[generation_pb2.ChatMessage(**turn) for turn in turns]
    )
    async with running_gateway(Script(tokens(TEXT))) as gateway:
        await generate(gateway, generation_pb2.GenerateRequest(chat=chat))
    assert rendered == turns


async def test_stop_strings_in_text_cut_tokens_and_text() -> None:
    async with running_gateway(Script(tokens("hello world STOP more"))) as gateway:
        responses = await generate(
            gateway,
            generation_pb2.GenerateRequest(text="x", stop_strings=["world STOP"], aux_info=True),
        )
    assert "".join(response.text for response in responses) == "hello "
    returned = [token for response in responses for token in response.tokens]
    assert responses[-1].usage.completion_tokens == len(returned)
    assert responses[-1].finish_reason == common_pb2.FINISH_REASON_STOP
    accepted = sum(token.kind == common_pb2.TOKEN_KIND_ACCEPTED for token in returned)
    assert responses[-1].aux_info.accepted == accepted
    assert list(responses[-1].aux_info.accepted_per_pos) == [accepted]


async def test_sampling_when_unset_has_defaults_and_drawn_seed() -> None:
    async with running_gateway(Script(tokens(TEXT))) as gateway:
        await generate(gateway, generation_pb2.GenerateRequest(text="x"))
        sent = gateway.scorer.requests[-1]
    assert sent.sampling.HasField("seed")
    assert sent.sampling.temperature == 1.0
    assert sent.stop.max_tokens == MAX_MODEL_LEN - len(sent.prompt_token_ids)


async def test_logprobs_when_asked_for_come_with_their_tokens() -> None:
    async with running_gateway(Script(tokens(TEXT))) as gateway:
        responses = await generate(
            gateway, generation_pb2.GenerateRequest(text="x", top_logprobs=2, stop_strings=["caf"])
        )
        plain = await generate(gateway, generation_pb2.GenerateRequest(text="x"))
    returned = [token for response in responses for token in response.tokens]
    assert [token.logprobs for token in returned] == [logprobs_of(t.id, 2) for t in returned]
    assert responses[-1].usage.completion_tokens == len(returned) > 0
    assert not any(token.HasField("logprobs") for response in plain for token in response.tokens)


async def test_generate_with_every_field_passes_them_to_scorer() -> None:
    request = generation_pb2.GenerateRequest(
        text="x",
        sampling=common_pb2.SamplingParams(
            presence_penalty=0.5,
            repetition_penalty=1.5,
            logit_bias=[common_pb2.LogitBias(token_id=5, bias=-1)],
        ),
        constraint=common_pb2.Constraint(regex="[a-z]+"),
        speculation=common_pb2.SpeculationParams(
            methods=["suffix", "ngram"],
            verification=common_pb2.Verification(rule=common_pb2.VERIFICATION_RULE_REJECTION),
            advice=common_pb2.Advice(token_ids=[5, 6], edit=True),
        ),
        stream_interval=16,
    )
    async with running_gateway(Script(tokens(TEXT))) as gateway:
        await generate(gateway, request)
        sent = gateway.scorer.requests[-1]
    assert (sent.sampling.presence_penalty, sent.sampling.repetition_penalty) == (0.5, 1.5)
    assert list(sent.sampling.logit_bias) == list(request.sampling.logit_bias)
    assert sent.constraint == request.constraint
    assert list(sent.speculation.methods) == ["suffix", "ngram"]
    assert sent.speculation.verification.rule == common_pb2.VERIFICATION_RULE_REJECTION
    assert list(sent.speculation.advice.token_ids) == [5, 6]
    assert sent.speculation.advice.edit
    assert sent.stream_interval == 16


@pytest.mark.parametrize(
    ("request_", "param"),
    [
        (generation_pb2.GenerateRequest(), "prompt"),
        (generation_pb2.GenerateRequest(text=""), "text"),
        (generation_pb2.GenerateRequest(tokens=generation_pb2.TokenPrompt()), "tokens"),
        (generation_pb2.GenerateRequest(chat=generation_pb2.ChatPrompt()), "chat"),
        (generation_pb2.GenerateRequest(text="x" * 5000), "text"),
        (
            generation_pb2.GenerateRequest(
                text="x", sampling=common_pb2.SamplingParams(temperature=float("nan"))
            ),
            "temperature",
        ),
        (generation_pb2.GenerateRequest(text="x", stop_strings=[""]), "stop_strings"),
        (generation_pb2.GenerateRequest(text="x", stop_strings=["x" * 1025]), "stop_strings"),
        (
            generation_pb2.GenerateRequest(
                text="x", stop=common_pb2.StopParams(stop_token_ids=range(1025))
            ),
            "stop_token_ids",
        ),
        (generation_pb2.GenerateRequest(text="x", request_id="x" * 129), "request_id"),
        (generation_pb2.GenerateRequest(text="x", request_id="forged\nline"), "request_id"),
        (generation_pb2.GenerateRequest(text="x", top_logprobs=21), "top_logprobs"),
        (
            generation_pb2.GenerateRequest(
                text="x",
                sampling=common_pb2.SamplingParams(
                    logit_bias=[common_pb2.LogitBias(token_id=2**31, bias=1)]
                ),
            ),
            "logit_bias",
        ),
        (with_advice(token_ids=[2**31]), "advice"),
        (with_advice(min_token_match=65), "min_token_match"),
        (with_advice(min_token_match=3, max_token_match=2), "max_token_match"),
        (
            generation_pb2.GenerateRequest(text="x", constraint=common_pb2.Constraint(regex="")),
            "regex",
        ),
        (
            generation_pb2.GenerateRequest(
                text="x", speculation=common_pb2.SpeculationParams(method="magic")
            ),
            "method",
        ),
        (with_tool(name='f"\n'), "chat.tools.name"),
        (with_tool(name="f", parameters='{"a":' * 999 + "1" + "}" * 999), "chat.tools.parameters"),
        (with_tool(name="f", parameters='{"a": "\\ud800"}'), "chat.tools.parameters"),
    ],
)
async def test_generate_with_bad_field_names_it(
    request_: generation_pb2.GenerateRequest, param: str
) -> None:
    async with running_gateway(Script(tokens(TEXT))) as gateway:
        code, error = await refusal(gateway, request_)
    assert code is grpc.StatusCode.INVALID_ARGUMENT
    assert getattr(error, "param", None) == param
    assert not re.search(r"\bsp_|extra_config", str(error))


async def test_generate_without_a_possible_next_token_is_an_invalid_argument() -> None:
    stuck = InvalidRequestError("grammar leads to a place.", param="grammar")
    async with running_gateway(Script(tokens(TEXT), refuse=stuck, die_after=4)) as gateway:
        code, error = await refusal(gateway, generation_pb2.GenerateRequest(text="x"))
    assert code is grpc.StatusCode.INVALID_ARGUMENT
    assert isinstance(error, InvalidRequestError)
    assert error.param == "grammar"


async def test_generate_when_refused_has_matching_status() -> None:
    full = Script(tokens(TEXT), refuse=CapacityError("full", retry_after_s=2.5))
    async with running_gateway(full) as gateway:
        code, error = await refusal(gateway, generation_pb2.GenerateRequest(text="x"))
        assert code is grpc.StatusCode.RESOURCE_EXHAUSTED
        assert isinstance(error, CapacityError)
        assert error.retry_after_s == 2.5
        code, _ = await refusal(gateway, generation_pb2.GenerateRequest(text="x", model="gpt-99"))
        assert code is grpc.StatusCode.NOT_FOUND
    async with running_gateway(
        Script(tokens(TEXT), hang_after=2), request_timeout_s=0.5
    ) as gateway:
        code, _ = await refusal(gateway, generation_pb2.GenerateRequest(text="x"))
        assert code is grpc.StatusCode.DEADLINE_EXCEEDED


async def test_generate_without_valid_api_key_is_unauthenticated(tmp_path: Path) -> None:
    keys = tmp_path / "keys"
    keys.write_text("secret\n")
    async with running_gateway(Script(tokens(TEXT)), api_key_file=str(keys)) as gateway:
        request = generation_pb2.GenerateRequest(text="x")
        assert (await refusal(gateway, request))[0] is grpc.StatusCode.UNAUTHENTICATED
        assert (await refusal(gateway, request, "wrong"))[0] is grpc.StatusCode.UNAUTHENTICATED
        assert await generate(gateway, request, "secret")
        tenant = gateway.scorer.requests[-1].tenant
        async with open_channel(gateway.grpc) as channel:
            answer = stream(channel, request, timeout_s=30, api_key="secret")
            pieces = [piece.text async for piece in answer]
            for key, told in ((None, "asks for an API key"), ("wrong", "does not know this API")):
                with pytest.raises(UnauthenticatedError, match=f"{told}.*--api-key"):
                    [_ async for _ in stream(channel, request, timeout_s=30, api_key=key)]
        assert "".join(pieces) == TEXT
    assert tenant
    assert "secret" not in tenant


async def test_generate_when_cancelled_cancels_scorer() -> None:
    async with (
        running_gateway(Script(tokens(TEXT), hang_after=2)) as gateway,
        stub_of(gateway) as stub,
    ):
        call = stub.Generate(generation_pb2.GenerateRequest(text="x"))
        first = await call.read()
        assert isinstance(first, generation_pb2.GenerateResponse)
        call.cancel()
        await until(lambda: gateway.scorer.running == 0)
        assert gateway.scorer.cancelled == 1


async def test_generate_with_idle_reader_ends_at_deadline() -> None:
    text = "hello world " * 8
    async with (
        running_gateway(
            Script(tokens(text), per_round=1, delay_s=0.05), request_timeout_s=0.5
        ) as gateway,
        stub_of(gateway) as stub,
    ):
        call = stub.Generate(generation_pb2.GenerateRequest(text="x"))
        await until(lambda: gateway.scorer.running == 1)
        await until(lambda: gateway.scorer.running == 0)
        with pytest.raises(grpc.aio.AioRpcError) as caught:
            async for _ in call:
                pass
        assert caught.value.code() is grpc.StatusCode.DEADLINE_EXCEEDED


async def test_generate_with_largest_body_is_accepted() -> None:
    async with running_gateway(Script(tokens(TEXT)), max_body_bytes=4000) as gateway:
        small, large = (generation_pb2.GenerateRequest(text="x" * n) for n in (3900, 4100))
        code, error = await refusal(gateway, small)
        assert isinstance(error, PromptTooLongError), "received"
        code, _ = await refusal(gateway, large)
        assert code is grpc.StatusCode.RESOURCE_EXHAUSTED


async def test_generate_when_encoding_hangs_ends_at_deadline() -> None:
    async with (
        running_gateway(Script(tokens(TEXT)), request_timeout_s=0.2) as gateway,
        asyncio.timeout(10),
    ):
        with tokenizers_that_hang():
            code, _ = await refusal(gateway, generation_pb2.GenerateRequest(text="x"))
        assert code is grpc.StatusCode.DEADLINE_EXCEEDED


async def test_services_when_ready_list_models_and_serve_health() -> None:
    async with running_gateway(Script(tokens(TEXT))) as gateway, stub_of(gateway) as stub:
        models = (await stub.ListModels(generation_pb2.ListModelsRequest())).models
        assert [(model.id, model.max_model_len) for model in models] == [("default", MAX_MODEL_LEN)]
        async with open_channel(gateway.grpc) as channel:
            check = health_pb2.HealthCheckRequest(service="outrider.v1.GenerationService")
            answer = await health_pb2_grpc.HealthStub(channel).Check(check)
        assert answer.status == health_pb2.HealthCheckResponse.SERVING


async def test_generate_with_64_streams_mixes_no_texts() -> None:
    async with (
        running_gateway(Script(tokens(TEXT), delay_s=0.01)) as gateway,
        stub_of(gateway) as stub,
    ):

        async def one() -> str:
            request = generation_pb2.GenerateRequest(text="x")
            return "".join([response.text async for response in stub.Generate(request)])

        assert await asyncio.gather(*(one() for _ in range(64))) == [TEXT] * 64


@pytest.mark.parametrize("max_tokens", [None, 0])
async def test_prompt_is_scored_with_or_without_an_answer(max_tokens: int | None) -> None:
    async with running_gateway(Script(tokens(TEXT), scores_prompts=True)) as gateway:
        request = generation_pb2.GenerateRequest(text="hello world", prompt_logprobs=2)
        if max_tokens is not None:
            request.stop.max_tokens = max_tokens
        responses = await generate(gateway, request)
        (asked,) = gateway.scorer.requests
    last = responses[-1]
    told = [logprobs_of(token, 2) for token in asked.prompt_token_ids[1:]]
    assert [each.logprob for each in told] == list(last.prompt_logprobs.logprobs)
    assert [*told[0].top_token_ids] * len(told) == list(last.prompt_logprobs.top_token_ids)
    assert [*told[0].top_logprobs] * len(told) == list(last.prompt_logprobs.top_logprobs)
    assert not any(response.HasField("prompt_logprobs") for response in responses[:-1])
    assert "".join(response.text for response in responses) == (TEXT if max_tokens is None else "")
    if max_tokens == 0:
        assert asked.stop.max_tokens == 1
        assert last.usage.completion_tokens == 0
        assert last.finish_reason == common_pb2.FINISH_REASON_LENGTH


async def test_suffix_goes_with_a_text_and_a_tokenizer_that_knows_it() -> None:
    async with running_gateway(Script(tokens(TEXT), scores_prompts=True)) as gateway:
        for fields in (
            {"text": "a"},
            {"tokens": generation_pb2.TokenPrompt(token_ids=[1])},
            {"text": "a", "prompt_logprobs": 1},
            {"chat": generation_pb2.ChatPrompt(messages=[{"role": "user", "content": "x"}])},
        ):
            request = generation_pb2.GenerateRequest(suffix="b", **fields)  # type: ignore[arg-type]
            code, error = await refusal(gateway, request)
            assert code is grpc.StatusCode.INVALID_ARGUMENT
            assert isinstance(error, InvalidRequestError)
            assert error.param == "suffix"
        assert not gateway.scorer.requests
