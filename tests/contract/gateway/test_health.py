"""A gateway's health over both protocols, browsers, and names of parameters."""

from __future__ import annotations

import asyncio

import grpc
import httpx
import pytest
from grpc_health.v1 import health_pb2, health_pb2_grpc

from outrider.errors import InvalidRequestError
from outrider.rpc.channel import open_channel
from outrider.rpc.status import from_rpc_error
from outrider.v1 import generation_pb2
from tests.contract.gateway.test_grpc import refusal
from tests.support.services.fake_scorer import Script
from tests.support.services.gateway import Running, running_gateway, tokens

ORIGIN = "https://app.example.com"


async def _watch(gateway: Running, status: int) -> None:
    """Wait until gRPC's health says `status` of the service; the process is always well."""
    async with open_channel(gateway.grpc) as channel, asyncio.timeout(20):
        check = health_pb2.HealthCheckRequest(service="outrider.v1.GenerationService")
        async for answer in health_pb2_grpc.HealthStub(channel).Watch(check):
            if answer.status == status:
                break
        process = await health_pb2_grpc.HealthStub(channel).Check(health_pb2.HealthCheckRequest())
        assert process.status == health_pb2.HealthCheckResponse.SERVING


@pytest.mark.usefixtures("quick_probes")
async def test_gateway_when_its_scorer_leaves_and_returns_reports_its_health() -> None:
    async with (
        running_gateway(Script(tokens("x"))) as gateway,
        httpx.AsyncClient(base_url=gateway.http) as client,
    ):
        server = gateway.scorer.server
        assert server is not None
        for serving, status, code in (
            (True, health_pb2.HealthCheckResponse.SERVING, 200),
            (False, health_pb2.HealthCheckResponse.NOT_SERVING, 503),
            (True, health_pb2.HealthCheckResponse.SERVING, 200),
        ):
            await server.set_serving(serving)
            await _watch(gateway, status)
            assert (await client.get("/health")).status_code == code


@pytest.mark.parametrize("allowed", [(ORIGIN,), ("*",), ()])
async def test_gateway_with_cors_origins_answers_only_browsers_of_these(
    allowed: tuple[str, ...],
) -> None:
    headers = {
        "Origin": ORIGIN,
        "Access-Control-Request-Method": "POST",
        "Access-Control-Request-Headers": "authorization,content-type",
    }
    async with (
        running_gateway(Script(tokens("x")), cors_origins=allowed) as gateway,
        httpx.AsyncClient(base_url=gateway.http) as client,
    ):
        preflight = await client.options("/v1/chat/completions", headers=headers)
        answer = await client.get("/v1/models", headers={"Origin": ORIGIN})
        other = await client.get("/v1/models", headers={"Origin": "https://evil.example.com"})
    if not allowed:
        assert preflight.status_code == 405
        assert "access-control-allow-origin" not in answer.headers
        return
    assert preflight.status_code == 200
    assert answer.headers["access-control-allow-origin"] == allowed[0]
    if allowed != ("*",):
        assert "access-control-allow-origin" not in other.headers


@pytest.mark.parametrize("stops", [["a"] * 17, [""], ["b" * 1025]])
async def test_generate_with_refused_stop_strings_names_the_field_of_the_message(
    stops: list[str],
) -> None:
    async with running_gateway(Script(tokens("x"))) as gateway:
        _, error = await refusal(
            gateway, generation_pb2.GenerateRequest(text="x", stop_strings=stops)
        )
    assert isinstance(error, InvalidRequestError)
    assert error.param == "stop_strings"


async def test_chat_with_cache_hints_in_text_parts_is_accepted() -> None:
    part = {"type": "text", "text": "hello", "cache_control": {"type": "ephemeral"}}
    async with (
        running_gateway(Script(tokens("x"))) as gateway,
        httpx.AsyncClient(base_url=gateway.http) as client,
    ):
        body = {"messages": [{"role": "user", "content": [part]}]}
        answer = await client.post("/v1/chat/completions", json=body)
    assert answer.status_code == 200


BROKEN = b"\xff" * 9
BAD_UTF_8 = b"\x0a\x02\xff\xfe"


@pytest.mark.parametrize(
    ("method", "data"), [("Generate", BAD_UTF_8), ("Generate", BROKEN), ("ListModels", BROKEN)]
)
async def test_grpc_request_with_bytes_that_do_not_parse_is_an_invalid_argument(
    method: str, data: bytes, caplog: pytest.LogCaptureFixture
) -> None:
    async with (
        running_gateway(Script(tokens("x"))) as gateway,
        open_channel(gateway.grpc) as channel,
    ):
        call = channel.unary_stream if method == "Generate" else channel.unary_unary
        answer = call(f"/outrider.v1.GenerationService/{method}")(data)
        with pytest.raises(grpc.aio.AioRpcError) as caught:
            await (answer.read() if method == "Generate" else answer)
    assert caught.value.code() is grpc.StatusCode.INVALID_ARGUMENT
    assert isinstance(from_rpc_error(caught.value), InvalidRequestError)
    assert not caplog.records
