"""The OpenAI face, through the official client, over a fake scorer on a real port."""

from __future__ import annotations

import asyncio
import json
import time
from collections.abc import AsyncIterator
from functools import partial
from typing import Any

import grpc
import httpx
import openai
import pytest
from opentelemetry.sdk.trace.export.in_memory_span_exporter import InMemorySpanExporter

from outrider.errors import CapacityError, UnavailableError
from outrider.models.tokenizer import Tokenizer
from outrider.rpc.channel import open_channel
from outrider.v1 import common_pb2, generation_pb2, generation_pb2_grpc
from tests.support.services.fake_scorer import Script
from tests.support.services.gateway import (
    MAX_MODEL_LEN,
    Running,
    running_gateway,
    tokenizers_that_hang,
    tokens,
)
from tests.support.waiting import until

TEXT = "hello 🎉 world, naïve café 日本語"
AUX_INFO = {field.name for field in common_pb2.AuxInfo.DESCRIPTOR.fields}


@pytest.fixture
async def gateway() -> AsyncIterator[Running]:
    async with running_gateway(Script(tokens(TEXT))) as running:
        yield running


async def post(running: Running, path: str, body: Any, **kwargs: Any) -> httpx.Response:
    async with httpx.AsyncClient(base_url=running.http) as client:
        content = body if isinstance(body, bytes) else json.dumps(body).encode()
        return await client.post(path, content=content, **kwargs)


# Answers


async def test_completion_with_text_returns_text_and_usage(gateway: Running) -> None:
    answer = await gateway.client.completions.create(model="default", prompt="def f(")
    assert answer.choices[0].text == TEXT
    assert answer.choices[0].finish_reason == "stop"
    assert answer.object == "text_completion"
    assert answer.id.startswith("cmpl-")
    assert answer.usage is not None
    assert answer.usage.prompt_tokens == len(tokens("def f(")) + 1  # BOS
    assert answer.usage.completion_tokens == len(tokens(TEXT))
    assert answer.usage.total_tokens == answer.usage.prompt_tokens + len(tokens(TEXT))
    assert answer.usage.prompt_tokens_details is not None
    assert answer.usage.prompt_tokens_details.cached_tokens == 1


async def test_requests_of_paddlenlp_clients_are_served_or_refused_with_advice(
    gateway: Running,
) -> None:
    url = f"{gateway.http}/v1/chat/completions"
    async with openai.AsyncOpenAI(base_url=url, api_key="EMPTY_API_KEY") as client:
        answer = await client.completions.create(model="default", prompt="Hello", max_tokens=50)
        assert answer.choices[0].text == TEXT
        stream = await client.completions.create(model="default", prompt="Hello", stream=True)
        assert "".join([chunk.choices[0].text async for chunk in stream]) == TEXT
    refused = await post(
        gateway, "/v1/chat/completions", {"model": "default", "text": "Hello, how are you?"}
    )
    assert refused.status_code == 400
    message = refused.json()["error"]["message"]
    assert 'send "messages": [{"role": "user", "content": "..."}]' in message
    assert "the prompt of /v1/completions" in message


async def test_model_named_default_is_the_served_one() -> None:
    async with running_gateway(Script(tokens(TEXT)), served_model_name="a/b") as running:
        for name in ("default", "a/b"):
            answer = await running.client.completions.create(model=name, prompt="def f(")
            assert (answer.model, answer.choices[0].text) == ("a/b", TEXT)


async def test_completion_when_streamed_has_whole_characters() -> None:
    apart = Script(tokens(TEXT), delay_s=0.02)  # rounds that come at once are one event
    async with running_gateway(apart) as gateway:
        stream = await gateway.client.completions.create(
            model="default", prompt="def f(", stream=True, stream_options={"include_usage": True}
        )
        chunks = [chunk async for chunk in stream]
    pieces = [chunk.choices[0].text for chunk in chunks if chunk.choices]
    assert "".join(pieces) == TEXT
    assert len(pieces) > 2
    assert not any("\ufffd" in piece for piece in pieces)
    reasons = [chunk.choices[0].finish_reason for chunk in chunks if chunk.choices]
    assert reasons == [None] * (len(reasons) - 1) + ["stop"]
    assert chunks[-1].choices == []
    assert chunks[-1].usage is not None
    assert chunks[-1].usage.completion_tokens == len(tokens(TEXT))
    assert all(chunk.usage is None for chunk in chunks[:-1])
    assert len({chunk.id for chunk in chunks}) == 1


async def test_chat_with_message_returns_text_and_usage(gateway: Running) -> None:
    answer = await gateway.client.chat.completions.create(
        model="default",
        messages=[
            {"role": "system", "content": "be brief"},
            {"role": "user", "content": [{"type": "text", "text": "hello"}]},
        ],
    )
    assert answer.choices[0].message.role == "assistant"
    assert answer.choices[0].message.content == TEXT
    sent = gateway.scorer.requests[-1].prompt_token_ids
    assert sent == [0, *tokens("<|system|>be brief\n<|user|>hello\n<|assistant|>")]


async def test_chat_when_streamed_returns_same_text(gateway: Running) -> None:
    stream = await gateway.client.chat.completions.create(
        model="default", messages=[{"role": "user", "content": "hello"}], stream=True
    )
    chunks = [chunk async for chunk in stream]
    assert chunks[0].choices[0].delta.role == "assistant"
    assert "".join(chunk.choices[0].delta.content or "" for chunk in chunks) == TEXT
    assert chunks[-1].choices[0].finish_reason == "stop"
    assert all(chunk.usage is None for chunk in chunks)


async def test_chat_with_returned_assistant_message_is_accepted(gateway: Running) -> None:
    ask: Any = [{"role": "user", "content": "hello"}]
    answer = await gateway.client.chat.completions.create(model="default", messages=ask)
    ask += [answer.choices[0].message.model_dump(), {"role": "user", "content": "go on"}]
    again = await gateway.client.chat.completions.create(model="default", messages=ask)
    assert again.choices[0].message.content == TEXT


async def test_completion_with_lists_or_tokens_answers_each_prompt(gateway: Running) -> None:
    prompts: list[Any] = [["one", "two", "three"], [5, 6, 7], [[5, 6], [7, 8]], ["one"]]
    for prompt in prompts:
        wanted = 1 if isinstance(prompt[0], int) else len(prompt)
        answer = await gateway.client.completions.create(model="default", prompt=prompt)
        assert [choice.index for choice in answer.choices] == list(range(wanted))
        assert [choice.text for choice in answer.choices] == [TEXT] * wanted
        assert answer.usage is not None
        assert answer.usage.completion_tokens == wanted * len(tokens(TEXT))
    assert [5, 6, 7] in [list(request.prompt_token_ids) for request in gateway.scorer.requests]
    assert len({request.request_id for request in gateway.scorer.requests}) == 7


async def test_completion_with_several_prompts_streams_side_by_side(gateway: Running) -> None:
    stream = await gateway.client.completions.create(
        model="default",
        prompt=["one", "two", "three"],
        stream=True,
        extra_body={"aux_info": True},
    )
    texts, reasons, chunk = ["", "", ""], [], None
    async for chunk in stream:
        texts[chunk.choices[0].index] += chunk.choices[0].text
        reasons += [chunk.choices[0].finish_reason] if chunk.choices[0].finish_reason else []
    assert texts == [TEXT] * 3
    assert reasons == ["stop"] * 3
    assert chunk is not None
    assert len(chunk.aux_info) == 3  # type: ignore[attr-defined]


async def test_completion_with_every_parameter_passes_them_to_scorer(gateway: Running) -> None:
    await gateway.client.completions.create(
        model="default",
        prompt="x",
        max_tokens=7,
        temperature=0.5,
        top_p=0.25,
        seed=-1,
        user="someone",
        presence_penalty=0.5,
        frequency_penalty=-0.25,
        logit_bias={"7": 2, "5": -100},
        logprobs=None,
        extra_body={
            "repetition_penalty": 1.5,
            "top_k": 40,
            "min_p": 0.125,
            "stop_token_ids": [3, 4],
            "ignore_eos": True,
            "min_tokens": 2,
            "speculation": {
                "enabled": True,
                "method": "inference_with_reference",
                "num_speculative_tokens": 6,
            },
        },
    )
    sent = gateway.scorer.requests[-1]
    assert (sent.sampling.temperature, sent.sampling.top_p) == (0.5, 0.25)
    assert (sent.sampling.top_k, sent.sampling.min_p) == (40, 0.125)
    assert sent.sampling.seed == 2**64 - 1
    assert (sent.stop.max_tokens, sent.stop.min_tokens) == (7, 2)
    assert list(sent.stop.stop_token_ids) == [3, 4]
    assert sent.stop.ignore_eos
    assert (sent.sampling.presence_penalty, sent.sampling.frequency_penalty) == (0.5, -0.25)
    assert sent.sampling.repetition_penalty == 1.5
    assert {bias.token_id: bias.bias for bias in sent.sampling.logit_bias} == {5: -100, 7: 2}
    assert (sent.speculation.enabled, list(sent.speculation.methods)) == (True, ["ngram"])
    assert sent.speculation.num_speculative_tokens == 6
    assert not sent.running_stats
    assert not sent.HasField("top_logprobs")
    assert not sent.HasField("constraint")
    assert not sent.speculation.HasField("advice")
    assert sent.tenant == ""


async def test_stream_interval_without_shown_tokens_is_long(
    gateway: Running,
) -> None:
    async def sent(**options: Any) -> int:
        answer = await gateway.client.completions.create(model="default", prompt="x", **options)
        if options.get("stream"):
            assert [event async for event in answer]
        return gateway.scorer.requests[-1].stream_interval

    assert 32 < await sent() <= 64
    assert await sent(stream=True) == 0
    # What is decoded behind it would be for nothing.
    assert await sent(stop="never there") == 8
    assert await sent(stop="never there", stream=True) == 0


async def test_chat_with_max_completion_tokens_finishes_with_length(gateway: Running) -> None:
    answer = await gateway.client.chat.completions.create(
        model="default", messages=[{"role": "user", "content": "x"}], max_completion_tokens=3
    )
    assert answer.choices[0].finish_reason == "length"
    assert answer.usage is not None
    assert answer.usage.completion_tokens == 3


async def test_chat_without_max_tokens_stays_within_context(gateway: Running) -> None:
    await gateway.client.completions.create(model="default", prompt=[5] * (MAX_MODEL_LEN - 10))
    assert gateway.scorer.requests[-1].stop.max_tokens == 10


async def test_completion_without_seed_draws_one(gateway: Running) -> None:
    for _ in range(2):
        await gateway.client.completions.create(model="default", prompt="x")
    await gateway.client.completions.create(model="default", prompt=["x", "x"])
    assert len({request.sampling.seed for request in gateway.scorer.requests}) == 4


# Stop strings


@pytest.mark.parametrize("stream", [False, True])
async def test_stop_string_in_text_ends_before_it_and_cancels_scorer(stream: bool) -> None:
    script = Script(tokens("hello world STOP and much more" * 3), delay_s=0.01)
    async with running_gateway(script) as gateway:
        parameters: dict[str, Any] = {
            "model": "default",
            "prompt": "x",
            "stop": ["###", "d STOP"],
            "extra_body": {"aux_info": True},
        }
        if stream:
            chunks = [
                chunk
                async for chunk in await gateway.client.completions.create(
                    stream=True, stream_options={"include_usage": True}, **parameters
                )
            ]
            text = "".join(chunk.choices[0].text for chunk in chunks if chunk.choices)
            reason, last = chunks[-2].choices[0].finish_reason, chunks[-1]
        else:
            last = await gateway.client.completions.create(**parameters)
            text, reason = last.choices[0].text, last.choices[0].finish_reason
        assert text == "hello worl"
        assert reason == "stop"
        aux_info = last.aux_info
        assert last.usage.completion_tokens == aux_info["output_len"]
        assert aux_info["output_len"] < len(tokens("hello world STOP"))
        assert aux_info["iter_count"] == aux_info["rounds"] + 1  # the scorer's own account
        assert aux_info["accepted"] <= aux_info["output_len"]
        assert last.usage.prompt_tokens_details.cached_tokens == 1
        await until(lambda: gateway.scorer.running == 0)
        assert gateway.scorer.cancelled == 1


# aux_info


@pytest.mark.parametrize("include_usage", [False, True])
async def test_aux_info_when_asked_for_comes_whole_with_last_chunk(include_usage: bool) -> None:
    async with running_gateway(Script(tokens(TEXT))) as gateway:
        plain = await gateway.client.completions.create(model="default", prompt="x")
        assert "aux_info" not in plain.model_dump()
        whole = await gateway.client.completions.create(
            model="default", prompt="x", extra_body={"aux_info": True}
        )
        options: Any = {"stream_options": {"include_usage": True}} if include_usage else {}
        stream = await gateway.client.completions.create(
            model="default", prompt="x", stream=True, extra_body={"aux_info": True}, **options
        )
        chunks = [chunk.model_dump() async for chunk in stream]
    assert [("aux_info" in chunk) for chunk in chunks] == [False] * (len(chunks) - 1) + [True]
    for aux_info in (whole.model_dump()["aux_info"], chunks[-1]["aux_info"]):
        assert set(aux_info) == AUX_INFO
        assert {"cost_time", "output_len", "iter_count", "avg_tokens_per_iter"} <= set(aux_info)
        assert aux_info["output_len"] == len(tokens(TEXT))
        assert aux_info["avg_tokens_per_iter"] == pytest.approx(
            aux_info["output_len"] / aux_info["iter_count"]
        )
        assert aux_info["cost_time"] > 0
        assert aux_info["retries"] == 0
        assert aux_info["scorer_id"] == "scorer-a"
        assert aux_info["proposer_ids"] == ["proposer-a"]


# Token kinds


async def test_token_kinds_when_asked_for_tell_every_token_of_answer(gateway: Running) -> None:
    extra: Any = {"token_kinds": True}
    complete = gateway.client.completions.create
    whole = await complete(model="default", prompt="x", extra_body=extra)
    stream = await complete(model="default", prompt="x", stream=True, extra_body=extra)
    chunks = [chunk.choices[0].model_dump() async for chunk in stream]
    chat = await gateway.client.chat.completions.create(
        model="default", messages=[{"role": "user", "content": "x"}], stream=True, extra_body=extra
    )
    deltas = [chunk.choices[0].model_dump() async for chunk in chat]
    assert all(
        chunk["text"] == "".join(token["text"] for token in chunk["tokens"])
        for chunk in chunks[:-1]
    )
    for choices in ([whole.choices[0].model_dump()], chunks, deltas):
        told = [token for choice in choices for token in choice.get("tokens", ())]
        assert [token["id"] for token in told] == tokens(TEXT)
        assert "".join(token["text"] for token in told) == TEXT
        rounds = len(told) // 2  # the fake scorer's: a draft token that is accepted, and a bonus
        assert [token["kind"] for token in told[: 2 * rounds]] == ["accepted", "bonus"] * rounds


async def test_token_kinds_when_not_asked_for_are_not_told(gateway: Running) -> None:
    answer = await gateway.client.completions.create(model="default", prompt="x")
    assert "tokens" not in answer.choices[0].model_dump()


# Errors


@pytest.mark.parametrize(
    "body",
    [
        b"",
        b"{",
        b"[]",
        b'"x"',
        b"\xff\xfe",
        b'{"prompt": "\\ud800"}',
        b'{"prompt": "x", "temperature": NaN}',
    ],
)
async def test_completion_with_broken_body_is_400(gateway: Running, body: bytes) -> None:
    response = await post(gateway, "/v1/completions", body)
    assert response.status_code == 400, response.text
    assert response.json()["error"]["message"]


async def test_completion_with_body_over_limit_is_413() -> None:
    async def trickle() -> AsyncIterator[bytes]:
        for _ in range(10):
            yield b"x" * 1000

    async with running_gateway(Script(tokens(TEXT)), max_body_bytes=4000) as gateway:
        declared = await post(gateway, "/v1/completions", b"x" * 5000)
        async with httpx.AsyncClient(base_url=gateway.http) as client:
            chunked = await client.post("/v1/completions", content=trickle())
        for response in (declared, chunked):
            assert response.status_code == 413
            assert response.json()["error"]["code"] == "request_too_large"


async def test_request_for_unknown_model_or_path_is_404(gateway: Running) -> None:
    with pytest.raises(openai.NotFoundError) as caught:
        await gateway.client.completions.create(model="gpt-99", prompt="x")
    assert caught.value.code == "model_not_found"
    assert caught.value.param == "model"
    with pytest.raises(openai.NotFoundError):
        await gateway.client.models.retrieve("gpt-99")
    served = (
        "/v1/chat/completions, /v1/completions, /v1/messages, /v1/messages/count_tokens, "
        "/v1/models, /v1/responses"
    )
    for method, path, status, message in (
        ("GET", "/nothing", 404, f"There is no /nothing here. Served: {served}."),
        ("GET", "/v1/completions", 405, "/v1/completions does not take GET."),
    ):
        async with httpx.AsyncClient(base_url=gateway.http) as client:
            response = await client.request(method, path)
        assert response.status_code == status
        assert response.json()["error"] == {
            "message": message,
            "type": "invalid_request_error",
            "param": None,
            "code": None,
        }


async def test_models_when_listed_include_the_served_name(gateway: Running) -> None:
    models = [model async for model in gateway.client.models.list()]
    assert [model.id for model in models] == ["default"]
    assert (await gateway.client.models.retrieve("default")).owned_by == "outrider"


async def test_request_without_valid_api_key_is_401(tmp_path: Any) -> None:
    keys = tmp_path / "keys"
    keys.write_text("# comment\n\nsecret-1\nsecret-2\n")
    async with running_gateway(
        Script(tokens(TEXT)), api_key_file=str(keys), api_key="secret-2"
    ) as gateway:
        answer = await gateway.client.completions.create(model="default", prompt="x")
        assert answer.choices[0].text == TEXT
        tenant = gateway.scorer.requests[-1].tenant
        await gateway.client.with_options(api_key="secret-1").completions.create(
            model="default", prompt="x", user="secret-2"
        )
        assert len({tenant, gateway.scorer.requests[-1].tenant, ""}) == 3
        assert "secret" not in tenant
        for authorization in (None, "Bearer wrong", "secret-2", "Basic secret-2", "Bearer é"):
            headers = {} if authorization is None else {"Authorization": authorization.encode()}
            response = await post(gateway, "/v1/completions", {"prompt": "x"}, headers=headers)
            assert response.status_code == 401
            assert response.json()["error"]["code"] == "invalid_api_key"
        with pytest.raises(openai.AuthenticationError):
            await gateway.client.with_options(api_key="wrong").models.list()
        async with httpx.AsyncClient(base_url=gateway.http) as client:
            assert (await client.get("/health")).status_code == 200


async def test_completion_when_scorer_is_full_is_429_with_retry_after() -> None:
    script = Script(tokens(TEXT), refuse=CapacityError("full", retry_after_s=2.5))
    async with running_gateway(script) as gateway:
        for stream in (False, True):
            with pytest.raises(openai.RateLimitError) as caught:
                await gateway.client.completions.create(model="default", prompt="x", stream=stream)
            assert caught.value.response.headers["retry-after"] == "3"


async def test_completion_when_gateway_is_full_is_429() -> None:
    script = Script(tokens(TEXT), hang_after=2)
    async with running_gateway(script, max_in_flight=2) as gateway:
        tasks = [
            asyncio.create_task(gateway.client.completions.create(model="default", prompt="x"))
            for _ in range(2)
        ]
        await until(lambda: gateway.scorer.running == 2)
        with pytest.raises(openai.RateLimitError):
            await gateway.client.completions.create(model="default", prompt="x")
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)


class Watching(asyncio.Protocol):
    """Asks once, and notes the gateway's completions under way whenever bytes arrive."""

    def __init__(self, gateway: Running, body: bytes) -> None:
        self._gateway = gateway
        self._body = body
        self._seen = b""
        self.at_end: asyncio.Future[float] = asyncio.get_running_loop().create_future()

    def connection_made(self, transport: Any) -> None:
        head = f"POST /v1/completions HTTP/1.1\r\nHost: x\r\nContent-Length: {len(self._body)}"
        transport.write(head.encode() + b"\r\n\r\n" + self._body)

    def data_received(self, data: bytes) -> None:
        self._seen += data
        if (b'"finish_reason":"' in self._seen or b'"error"' in self._seen) and (
            not self.at_end.done()
        ):
            self.at_end.set_result(self._gateway.metric("gateway_requests_in_flight"))


@pytest.mark.parametrize("offered", ["h2c", "websocket"])
async def test_client_that_offers_another_protocol_is_answered_as_any_other(
    offered: str, caplog: pytest.LogCaptureFixture
) -> None:
    headers = {"Connection": "Upgrade, HTTP2-Settings", "Upgrade": offered, "HTTP2-Settings": "A"}
    async with (
        running_gateway(Script(tokens(TEXT))) as gateway,
        httpx.AsyncClient(base_url=gateway.http, headers=headers) as client,
    ):
        for _ in range(2):
            response = await client.post("/v1/completions", json={"prompt": "x"})
            assert response.json()["choices"][0]["text"] == TEXT
    assert not [record for record in caplog.records if "upgrade" in record.getMessage().lower()]


@pytest.mark.parametrize("stream", [False, True])
@pytest.mark.parametrize("refuse", [None, CapacityError("full")])
async def test_client_that_reads_the_end_of_its_answer_may_ask_anew(
    stream: bool, refuse: CapacityError | None
) -> None:
    body = json.dumps({"prompt": "x", "stream": stream}).encode()
    async with running_gateway(Script(tokens(TEXT), refuse=refuse)) as gateway:
        port = httpx.URL(gateway.http).port
        make = partial(Watching, gateway, body)
        transport, watching = await asyncio.get_running_loop().create_connection(
            make, "127.0.0.1", port
        )
        assert await asyncio.wait_for(watching.at_end, 20) == 0
        transport.close()


async def test_completion_past_deadline_is_504_or_error_event() -> None:
    script = Script(tokens(TEXT), hang_after=4)
    async with running_gateway(script, request_timeout_s=0.5) as gateway:
        with pytest.raises(openai.InternalServerError) as caught:
            await gateway.client.completions.create(model="default", prompt="x")
        assert caught.value.status_code == 504
        stream = await gateway.client.completions.create(model="default", prompt="x", stream=True)
        text = ""
        with pytest.raises(openai.APIError, match="too long"):  # noqa: PT012
            async for chunk in stream:
                text += chunk.choices[0].text
        assert text
        assert TEXT.startswith(text)
        await until(lambda: gateway.scorer.running == 0)
        async with httpx.AsyncClient(base_url=gateway.http) as client:
            metrics = (await client.get("/metrics")).text
        late = 'operation="text_completion",outcome="DEADLINE_EXCEEDED"'
        assert f"outrider:gateway_requests_total{{{late}}} 2.0\n" in metrics


async def test_admission_when_full_refuses_before_encoding() -> None:
    """Or refusing would cost as much as serving, just when there is too much of it."""
    chat = {"messages": [{"role": "user", "content": "x"}]}
    async with running_gateway(Script(tokens(TEXT), hang_after=2), max_in_flight=1) as gateway:
        running = asyncio.create_task(post(gateway, "/v1/completions", {"prompt": "x"}, timeout=60))
        await until(lambda: gateway.scorer.running == 1)
        with pytest.MonkeyPatch.context() as patch:
            for method in ("encode", "encode_chat"):
                patch.delattr(Tokenizer, method)
            for path, body in (("completions", {"prompt": "x"}), ("chat/completions", chat)):
                assert (await post(gateway, f"/v1/{path}", body)).status_code == 429
            async with open_channel(gateway.grpc) as channel:
                stub = generation_pb2_grpc.GenerationServiceStub(channel)
                with pytest.raises(grpc.aio.AioRpcError) as refused:
                    await stub.Generate(generation_pb2.GenerateRequest(text="x")).read()
        assert refused.value.code() is grpc.StatusCode.RESOURCE_EXHAUSTED
        assert gateway.metric("gateway_requests_refused_total") == 3
        running.cancel()


async def test_admission_of_simultaneous_requests_happens_before_encoding(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    encoded: list[str] = []

    def slowly(self: Tokenizer, text: str, **options: Any) -> list[int]:
        encoded.append(text)
        time.sleep(0.05)  # others come meanwhile
        return encode(self, text, **options)

    async with running_gateway(Script(tokens(TEXT)), max_in_flight=2) as gateway:
        encode = Tokenizer.encode
        monkeypatch.setattr(Tokenizer, "encode", slowly)
        bodies = [{"prompt": "x" * i} for i in range(1, 8)]
        answers = await asyncio.gather(*(post(gateway, "/v1/completions", b) for b in bodies))
        assert sorted(answer.status_code for answer in answers) == [200] * 2 + [429] * 5
        assert len(encoded) == 2
        # Nor does one that is refused after that keep its place.
        for _ in range(3):
            answer = await post(gateway, "/v1/completions", {"prompt": ["x", ""]})
            assert answer.status_code == 400
        assert gateway.metric("gateway_requests_in_flight") == 0


async def test_request_cut_off_by_drain_counts_as_unavailable() -> None:
    async with httpx.AsyncClient() as client:
        async with running_gateway(Script(tokens(TEXT), hang_after=2)) as gateway:
            url = f"{gateway.http}/v1/completions"
            cut = asyncio.create_task(client.post(url, json={"prompt": "x"}))
            await until(lambda: gateway.scorer.running == 1)
        assert (await cut).status_code == 503
    outcome = {"operation": "text_completion", "outcome": "UNAVAILABLE"}
    assert gateway.metric("gateway_requests_total", **outcome) == 1


async def test_completion_when_encoding_hangs_is_504() -> None:
    async with running_gateway(Script(tokens(TEXT)), request_timeout_s=0.2) as gateway:
        with tokenizers_that_hang():
            with pytest.raises(openai.InternalServerError) as caught:
                await gateway.client.completions.create(model="default", prompt="x", timeout=10)
            assert caught.value.status_code == 504


async def test_completion_when_scorer_drains_is_503() -> None:
    script = Script(tokens(TEXT), refuse=UnavailableError("draining"))
    async with running_gateway(script, resume_timeout_s=0.3) as gateway:
        with pytest.raises(openai.InternalServerError) as caught:
            await gateway.client.completions.create(model="default", prompt="x")
        assert caught.value.status_code == 503
        assert caught.value.response.headers["retry-after"] == "1"


# Life


async def test_gateway_when_ready_serves_health_and_metrics(gateway: Running) -> None:
    await gateway.client.completions.create(model="default", prompt="x")
    async with httpx.AsyncClient(base_url=gateway.http) as client:
        health = await client.get("/health")
        metrics = (await client.get("/metrics")).text
    assert health.status_code == 200
    assert health.json()["scorers_serving"] == 1
    for name in (
        "gen_ai_server_request_duration",
        "gen_ai_server_time_to_first_token",
        "gen_ai_server_time_per_output_token",
        'outrider:gateway_requests_total{operation="text_completion",outcome="ok"} 1.0',
        f"outrider:gateway_generation_tokens_total {len(tokens(TEXT))}.0",
    ):
        assert name in metrics


@pytest.mark.parametrize("stream", [False, True])
async def test_stream_when_client_disconnects_cancels_scorer(stream: bool) -> None:
    async with running_gateway(Script(tokens(TEXT), hang_after=2)) as gateway:
        body = json.dumps({"prompt": "x", "stream": stream}).encode()
        host, port = gateway.http.removeprefix("http://").split(":")
        _, writer = await asyncio.open_connection(host, int(port))
        writer.write(
            b"POST /v1/completions HTTP/1.1\r\nHost: x\r\nContent-Length: %d\r\n\r\n" % len(body)
        )
        writer.write(body)
        await until(lambda: gateway.scorer.running == 1)
        await asyncio.sleep(0.1)
        writer.close()
        await until(lambda: gateway.scorer.running == 0)
        assert gateway.scorer.cancelled == 1


async def test_completion_with_64_streams_mixes_no_texts() -> None:
    async with running_gateway(Script(tokens(TEXT), together=64)) as gateway:

        async def one() -> str:
            stream = await gateway.client.completions.create(
                model="default", prompt="x", stream=True
            )
            return "".join([chunk.choices[0].text async for chunk in stream])

        texts = await asyncio.gather(*(one() for _ in range(64)))
        assert texts == [TEXT] * 64
        assert gateway.scorer.most_running == 64


async def test_request_when_traced_has_one_trace() -> None:
    exporter = InMemorySpanExporter()
    async with running_gateway(Script(tokens(TEXT)), exporter=exporter) as gateway:
        trace, parent = "0af7651916cd43dd8448eb211c80319c", "b7ad6b7169203331"
        await post(
            gateway,
            "/v1/completions",
            {"prompt": "x"},
            headers={"traceparent": f"00-{trace}-{parent}-01"},
        )
        sent = gateway.scorer.metadata[-1]["traceparent"]
    client, server = exporter.get_finished_spans()
    assert f"{server.context.trace_id:032x}" == trace
    assert f"{server.parent.span_id:016x}" == parent  # type: ignore[union-attr]
    assert client.parent is not None
    assert client.parent.span_id == server.context.span_id
    assert sent == f"00-{trace}-{client.context.span_id:016x}-01"
    assert server.attributes is not None
    assert server.attributes["gen_ai.usage.output_tokens"] == len(tokens(TEXT))
