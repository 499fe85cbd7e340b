"""A gateway without scorers: what it answers, whom it holds, and what it shows of their load."""

from __future__ import annotations

import asyncio
import json
import socket
from contextlib import AsyncExitStack

import grpc
import httpx
import openai
import pytest
from grpc_health.v1 import health_pb2, health_pb2_grpc

from gateway.config import GatewayConfig
from gateway.openai import answer
from gateway.service import Gateway
from outrider.rpc.channel import open_channel
from outrider.rpc.deployment import Deployment
from outrider.rpc.telemetry import configure
from outrider.v1 import generation_pb2, generation_pb2_grpc
from tests.support.ports import reserved_port
from tests.support.services.fake_scorer import Script, serving
from tests.support.services.gateway import fake_scorer, model_folder, running_gateway, tokens
from tests.support.waiting import until

TEXT = "hello world"


async def test_gateway_while_it_waits_for_its_first_scorer_serves_health_and_metrics(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(answer, "_SILENCE_S", 0.05)
    http, metrics, health, scorer = (reserved_port() for _ in range(4))
    gateway = Gateway(
        GatewayConfig(
            scorers=(f"127.0.0.1:{scorer}",),
            model=str(model_folder()),
            http_port=http,
            metrics_port=metrics,
            resume_timeout_s=3.0,
            deployment=Deployment(drain_grace_s=0.1, health_port=health),
        ),
        configure("test"),
    )
    starting = asyncio.create_task(gateway.start())
    try:
        async with httpx.AsyncClient(base_url=f"http://127.0.0.1:{http}") as client:
            async with asyncio.timeout(20):
                while (answered := await _try(client, "/health")) is None:  # noqa: ASYNC110
                    await asyncio.sleep(0.02)
            assert answered.status_code == 503
            shown = await client.get(f"http://127.0.0.1:{metrics}/metrics")
            assert "outrider:gateway_scorers_serving 0.0\n" in shown.text
            metrics = await client.get("/metrics")
            assert metrics.status_code == 404  # not where clients are
            assert "Metrics are on --metrics-port." in metrics.text
            async with open_channel(f"127.0.0.1:{health}") as channel:
                stub = health_pb2_grpc.HealthStub(channel)
                process = await stub.Check(health_pb2.HealthCheckRequest())
            assert process.status == health_pb2.HealthCheckResponse.SERVING
            assert not starting.done()
            body = {"prompt": "x", "stream": True}
            for refused in (
                await client.get("/v1/models"),
                await client.post("/v1/completions", json=body),  # with its status, no event
            ):
                assert refused.status_code == 503
                assert refused.headers["Retry-After"]
            asked = asyncio.create_task(
                client.post("/v1/completions", json={"prompt": "x"}, timeout=20)
            )
            async with serving(fake_scorer(Script(tokens(TEXT))), scorer):
                await starting
                assert (await asked).json()["choices"][0]["text"] == TEXT
                assert (await client.get("/health")).status_code == 200
    finally:
        starting.cancel()
        await asyncio.gather(starting, return_exceptions=True)
        await gateway.stop()


async def _try(client: httpx.AsyncClient, path: str) -> httpx.Response | None:
    try:
        return await client.get(path)
    except httpx.ConnectError:
        return None


@pytest.mark.usefixtures("quick_probes")
async def test_requests_when_scorers_are_at_zero_are_held_until_one_serves(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(answer, "_SILENCE_S", 0.05)
    scorer, port = fake_scorer(Script(tokens(TEXT))), reserved_port()
    scorer.target = f"127.0.0.1:{port}"
    async with AsyncExitStack() as stack:
        gateway = await stack.enter_async_context(
            running_gateway(scorer, hold_timeout_s=20.0, max_in_flight=2)
        )
        client = await stack.enter_async_context(httpx.AsyncClient(base_url=gateway.http))
        assert (await client.get("/health")).json()["status"] == "holding"

        async def streamed() -> str:
            body = {"prompt": "x", "stream": True}
            async with client.stream("POST", "/v1/completions", json=body, timeout=20) as stream:
                return "".join([text async for text in stream.aiter_text()])

        held = asyncio.create_task(streamed())
        channel = await stack.enter_async_context(open_channel(gateway.grpc))
        rpc = generation_pb2_grpc.GenerationServiceStub(channel).Generate(
            generation_pb2.GenerateRequest(text="x")
        )
        reading = asyncio.create_task(_text(rpc))
        await until(lambda: gateway.metric("gateway_num_requests_waiting") == 2)
        with pytest.raises(openai.RateLimitError):  # the queue has a bound
            await gateway.client.completions.create(model="default", prompt="x")
        await stack.enter_async_context(serving(scorer, port))
        text = await held  # no scorer was known: it was kept alive before it could be checked
        assert text.startswith(": waiting\n\n")
        assert TEXT.split()[0] in text
        assert "data: [DONE]" in text
        assert await reading == TEXT
        # Again at zero: the sizes are known now, and a stream is kept alive while it waits.
        assert scorer.server is not None
        await scorer.server.set_serving(False)
        await until(lambda: gateway.metric("gateway_scorers_serving") == 0)
        again = asyncio.create_task(streamed())
        await asyncio.sleep(0.3)
        await scorer.server.set_serving(True)
        text = await again
    assert text.startswith(": waiting\n\n")
    assert "data: [DONE]" in text


@pytest.mark.parametrize(
    ("hold_s", "prompt", "said"),
    [(0.5, "x", "No scorer"), (20.0, "x " * 2000, "prompt")],
)
async def test_held_stream_that_cannot_be_served_ends_with_an_error_event(
    hold_s: float, prompt: str, said: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(answer, "_SILENCE_S", 0.05)
    scorer, port = fake_scorer(Script(tokens(TEXT))), reserved_port()
    scorer.target = f"127.0.0.1:{port}"
    async with AsyncExitStack() as stack:
        gateway = await stack.enter_async_context(
            running_gateway(scorer, hold_timeout_s=hold_s, resume_timeout_s=0.5)
        )
        client = await stack.enter_async_context(httpx.AsyncClient(base_url=gateway.http))
        body = {"prompt": prompt, "stream": True}
        async with client.stream("POST", "/v1/completions", json=body, timeout=20) as stream:
            assert stream.status_code == 200
            lines = stream.aiter_lines()
            assert await anext(lines) == ": waiting"
            if hold_s > 1:
                await stack.enter_async_context(serving(scorer, port))
            events = [line async for line in lines if line.startswith("data: ")]
        await until(lambda: gateway.metric("gateway_num_requests_waiting") == 0)
    (told,) = [json.loads(line.removeprefix("data: ")) for line in events]
    assert said in told["error"]["message"]


async def _text(call: grpc.aio.UnaryStreamCall) -> str:  # type: ignore[type-arg]
    return "".join([response.text async for response in call])


async def test_held_request_past_its_time_is_refused_with_retry_after() -> None:
    scorer = fake_scorer(Script(tokens(TEXT)))
    scorer.target = f"127.0.0.1:{reserved_port()}"
    async with running_gateway(scorer, hold_timeout_s=0.2) as gateway:
        with pytest.raises(openai.InternalServerError) as caught:
            await gateway.client.completions.create(model="default", prompt="x")
    assert caught.value.status_code == 503
    assert caught.value.response.headers["retry-after"]


async def test_held_request_whose_client_goes_gives_its_place_back() -> None:
    scorer = fake_scorer(Script(tokens(TEXT)))
    scorer.target = f"127.0.0.1:{reserved_port()}"
    async with running_gateway(scorer, hold_timeout_s=20.0) as gateway:
        async with httpx.AsyncClient(base_url=gateway.http) as client:
            with pytest.raises(httpx.ReadTimeout):
                await client.post("/v1/completions", json={"prompt": "x"}, timeout=0.2)
        await until(lambda: gateway.metric("gateway_num_requests_waiting") == 0)


LOAD = {"running_requests": 3, "waiting_requests": 2, "total_pages": 100, "free_pages": 25}


@pytest.mark.usefixtures("quick_probes")
async def test_gateway_shows_load_of_its_scorers_under_its_own_names_and_vllms() -> None:
    scorers = [fake_scorer(Script(tokens(TEXT)), name, page_size=16, **LOAD) for name in ("a", "b")]
    async with running_gateway(
        *scorers, metrics_port=0, vllm_metrics=True, served_model_name="org/m"
    ) as gateway:
        await until(lambda: gateway.metric("gateway_scorers_serving") == 2)
        async with httpx.AsyncClient(base_url=gateway.http) as client:
            public = (await client.get("/metrics")).text
        ours = {
            name: gateway.metric(f"gateway_{name}")
            for name in ("num_requests_running", "num_requests_waiting", "kv_cache_usage_perc")
        }
        scorers[0].info.waiting_requests = 9  # as asked with the next probe
        await until(lambda: gateway.metric("gateway_num_requests_waiting") == 11)
    assert ours == {
        "num_requests_running": 6,
        "num_requests_waiting": 4,
        "kv_cache_usage_perc": 0.75,
    }
    for line in (
        'vllm:num_requests_running{model_name="org/m"} 6.0\n',
        'vllm:num_requests_waiting{model_name="org/m"} 4.0\n',
        'vllm:kv_cache_usage_perc{model_name="org/m"} 0.75\n',
        'vllm:cache_config_info{block_size="16",model_name="org/m",num_gpu_blocks="200"} 1.0\n',
    ):
        assert line in public
    assert "outrider:" not in public


async def test_served_model_under_an_alias_is_listed_and_answers() -> None:
    async with running_gateway(
        Script(tokens(TEXT)), served_model_name="org/m", served_model_aliases=("m",)
    ) as gateway:
        assert [card.id async for card in gateway.client.models.list()] == ["org/m", "m"]
        assert (await gateway.client.models.retrieve("m")).id == "m"
        done = await gateway.client.completions.create(model="m", prompt="x")
        assert done.choices[0].text == TEXT
        with pytest.raises(openai.NotFoundError):
            await gateway.client.completions.create(model="n", prompt="x")


async def test_adapters_of_all_scorers_are_models_that_requests_name() -> None:
    scorers = [
        fake_scorer(Script(tokens(TEXT)), name, adapters=adapters)
        for name, adapters in (("a", ["sql", "chat"]), ("b", ["sql"]))
    ]
    async with running_gateway(*scorers) as gateway:
        await until(lambda: gateway.metric("gateway_scorers_serving") == 2)
        assert [card.id async for card in gateway.client.models.list()] == ["default", "sql"]
        asked = {}
        for model in ("sql", "default"):
            done = await gateway.client.completions.create(model=model, prompt="x")
            assert done.model == model
            (asked[model],) = [request for fake in scorers for request in fake.requests]
            for fake in scorers:
                fake.requests.clear()
        assert {model: request.adapter for model, request in asked.items()} == {
            "sql": "sql",
            "default": "",
        }
        async with open_channel(gateway.grpc) as channel:
            stub = generation_pb2_grpc.GenerationServiceStub(channel)
            listed = await stub.ListModels(generation_pb2.ListModelsRequest())
            assert [model.id for model in listed.models] == ["default", "sql"]
            await _text(stub.Generate(generation_pb2.GenerateRequest(model="sql", text="x")))
        assert [request.adapter for fake in scorers for request in fake.requests] == ["sql"]
        with pytest.raises(openai.NotFoundError):  # one scorer alone has it
            await gateway.client.completions.create(model="chat", prompt="x")


def _has_ipv6() -> bool:
    try:
        with socket.create_server(("::1", 0), family=socket.AF_INET6):
            return True
    except OSError:
        return False


@pytest.mark.skipif(not _has_ipv6(), reason="no IPv6")
async def test_gateway_at_all_addresses_serves_ipv6_and_dials_it() -> None:
    scorer = fake_scorer(Script(tokens(TEXT)))
    async with serving(scorer, host="[::1]"), running_gateway(scorer, host="::") as gateway:
        port = gateway.http.rpartition(":")[2]
        async with httpx.AsyncClient(base_url=f"http://[::1]:{port}") as client:
            assert (await client.get("/health")).status_code == 200
            done = await client.post("/v1/completions", json={"prompt": "x"})
    assert done.json()["choices"][0]["text"] == TEXT
