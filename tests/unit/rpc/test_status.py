"""outrider/rpc/status.py: each error crosses a real RPC and comes out as itself."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import AsyncIterator
from typing import Any

import grpc
import pytest
from google.protobuf import any_pb2
from google.rpc import error_details_pb2, status_pb2

from outrider import errors
from outrider.rpc import status
from outrider.rpc.channel import open_channel
from outrider.rpc.server import GrpcServer
from outrider.v1 import scorer_pb2, scorer_pb2_grpc

ERRORS = [
    errors.InvalidRequestError("top_p must be ...", param="top_p"),
    errors.InvalidRequestError("no param"),
    errors.InvalidRequestError("bad", reason="BAD_BLOCKS"),
    errors.PromptTooLongError("too long", param="prompt"),
    errors.ModelNotFoundError("who?"),
    errors.UnauthenticatedError("key?"),
    errors.CapacityError("full", retry_after_s=2.5),
    errors.UnavailableError("draining"),
    errors.DeadlineError("late"),
    errors.ProposerRefusedError("no", reason="VOCAB_MISMATCH"),
    errors.UnsupportedModelError("moe"),
    errors.ConfigError("flag"),
    errors.InternalError("bug"),
]


class _Failing(scorer_pb2_grpc.ScorerServiceServicer):
    error: BaseException = errors.InternalError("unset")

    async def GetScorerInfo(  # noqa: N802
        self, _request: scorer_pb2.GetScorerInfoRequest, context: Any
    ) -> scorer_pb2.GetScorerInfoResponse:
        await status.abort(context, self.error)


@pytest.fixture
async def failing() -> AsyncIterator[tuple[_Failing, scorer_pb2_grpc.ScorerServiceAsyncStub]]:
    servicer = _Failing()

    def register(server: grpc.aio.Server) -> None:
        scorer_pb2_grpc.add_ScorerServiceServicer_to_server(servicer, server)

    server = GrpcServer("127.0.0.1:0", register, ["outrider.v1.ScorerService"])
    port = await server.start()
    async with open_channel(f"127.0.0.1:{port}") as channel:
        yield servicer, scorer_pb2_grpc.ScorerServiceStub(channel)
    await server.stop(0)


async def _fail(stub: scorer_pb2_grpc.ScorerServiceAsyncStub) -> grpc.aio.AioRpcError:
    with pytest.raises(grpc.aio.AioRpcError) as caught:
        await stub.GetScorerInfo(scorer_pb2.GetScorerInfoRequest(), timeout=10)
    return caught.value


@pytest.mark.parametrize("error", ERRORS, ids=lambda e: f"{type(e).__name__}-{e.reason}")
async def test_status_of_any_error_round_trips(
    failing: tuple[_Failing, scorer_pb2_grpc.ScorerServiceAsyncStub],
    error: errors.OutriderError,
) -> None:
    servicer, stub = failing
    servicer.error = error
    rpc_error = await _fail(stub)
    assert rpc_error.code() is status.code_of(error)
    back = status.from_rpc_error(rpc_error)
    assert type(back) is type(error)
    assert (back.message, back.reason) == (error.message, error.reason)
    assert getattr(back, "param", None) == getattr(error, "param", None)
    assert getattr(back, "retry_after_s", None) == getattr(error, "retry_after_s", None)


@pytest.mark.parametrize(
    ("error", "seconds"),
    [
        (errors.UnavailableError("no scorer"), 1),
        (errors.CapacityError("full", retry_after_s=2.0), 2),
        (errors.InternalError("a bug"), None),
    ],
)
def test_status_of_error_names_a_retry_delay_only_where_it_may_help(
    error: errors.OutriderError, seconds: int | None
) -> None:
    delays = []
    for detail in status.to_status(error).details:
        retry = error_details_pb2.RetryInfo()
        if detail.Is(retry.DESCRIPTOR):
            detail.Unpack(retry)
            delays.append(retry.retry_delay.seconds)
    assert delays == ([] if seconds is None else [seconds])


@pytest.mark.parametrize("character", ["x", "\n", "\u2603"])
async def test_status_with_long_message_cuts_it_and_keeps_the_code(
    failing: tuple[_Failing, scorer_pb2_grpc.ScorerServiceAsyncStub], character: str
) -> None:
    servicer, stub = failing
    servicer.error = errors.ModelNotFoundError(f"no model {character * 100_000}")
    back = status.from_rpc_error(await _fail(stub))
    assert type(back) is errors.ModelNotFoundError
    assert back.message.startswith(f"no model {character}")


async def test_status_of_unknown_error_hides_it_from_the_client(
    failing: tuple[_Failing, scorer_pb2_grpc.ScorerServiceAsyncStub],
    caplog: pytest.LogCaptureFixture,
) -> None:
    servicer, stub = failing
    servicer.error = ZeroDivisionError("secret detail")
    with caplog.at_level(logging.ERROR, logger="outrider.rpc.status"):
        rpc_error = await _fail(stub)
    assert rpc_error.code() is grpc.StatusCode.INTERNAL
    assert "secret" not in (rpc_error.details() or "")
    assert any("secret detail" in str(record.exc_info) for record in caplog.records)
    assert isinstance(status.from_rpc_error(rpc_error), errors.InternalError)


async def test_status_made_by_grpc_is_understood() -> None:
    async with open_channel("127.0.0.1:1") as channel:
        stub = scorer_pb2_grpc.ScorerServiceStub(channel)
        with pytest.raises(grpc.aio.AioRpcError) as caught:
            await stub.GetScorerInfo(scorer_pb2.GetScorerInfoRequest(), timeout=5)
    meant = status.from_rpc_error(caught.value)
    assert isinstance(meant, errors.UnavailableError)
    assert meant.message.startswith("nothing answers there: ")
    assert "refused" in meant.message
    assert "127.0.0.1" not in meant.message, "who asked knows the address"


def test_status_of_write_failed_before_status_is_no_internal_error() -> None:
    nothing = grpc.aio.Metadata()
    lost = grpc.aio.AioRpcError(
        grpc.StatusCode.INTERNAL, nothing, nothing, "Internal error from Core"
    )
    meant = status.from_rpc_error(lost)
    assert isinstance(meant, errors.UnavailableError)
    assert meant.message == "the stream broke"


@pytest.mark.parametrize("where", ["status", "detail"])
def test_status_with_unreadable_details_keeps_the_code(where: str) -> None:
    unreadable = b"\xff\xff"
    if where == "detail":
        detail = any_pb2.Any(type_url="type.googleapis.com/google.rpc.ErrorInfo", value=unreadable)
        unreadable = status_pb2.Status(details=[detail]).SerializeToString()
    metadata = grpc.aio.Metadata(("grpc-status-details-bin", unreadable))
    unavailable = grpc.StatusCode.UNAVAILABLE
    proxied = grpc.aio.AioRpcError(unavailable, grpc.aio.Metadata(), metadata, "no upstream")
    meant = status.from_rpc_error(proxied)
    assert isinstance(meant, errors.UnavailableError)
    assert meant.message == "no upstream"


def test_status_of_every_error_class_has_a_code() -> None:
    def leaves(cls: type[errors.OutriderError]) -> list[type[errors.OutriderError]]:
        return [cls, *(leaf for child in cls.__subclasses__() for leaf in leaves(child))]

    # A service may refine them for itself: its class takes the code of the one it refines.
    shared = {leaf for leaf in leaves(errors.OutriderError) if leaf.__module__ == errors.__name__}
    assert shared - {errors.OutriderError} <= {error_class for error_class, _ in status._TABLE}


async def test_server_on_taken_port_raises_and_health_follows_the_service() -> None:
    from grpc_health.v1 import health_pb2, health_pb2_grpc

    first = GrpcServer("127.0.0.1:0", lambda _: None, ["x.Y"])
    port = await first.start()
    second = GrpcServer(f"127.0.0.1:{port}", lambda _: None, [])
    with pytest.raises(errors.ConfigError, match=str(port)):
        await second.start()
    async with open_channel(f"127.0.0.1:{port}") as channel:
        stub = health_pb2_grpc.HealthStub(channel)
        for name in ("", "x.Y"):
            answer = await stub.Check(health_pb2.HealthCheckRequest(service=name), timeout=5)
            assert answer.status == health_pb2.HealthCheckResponse.NOT_SERVING
        await first.set_serving(True)
        answer = await stub.Check(health_pb2.HealthCheckRequest(service="x.Y"), timeout=5)
        assert answer.status == health_pb2.HealthCheckResponse.SERVING
    await first.stop(0)


class _Late(scorer_pb2_grpc.ScorerServiceServicer):
    def __init__(self) -> None:
        self.begun = asyncio.Event()
        self.raised: asyncio.Future[BaseException] = asyncio.get_running_loop().create_future()

    async def GetScorerInfo(  # noqa: N802
        self, _request: scorer_pb2.GetScorerInfoRequest, context: Any
    ) -> scorer_pb2.GetScorerInfoResponse:
        self.begun.set()
        try:
            await asyncio.sleep(3600)
        except asyncio.CancelledError:
            try:
                await status.abort(context, errors.DeadlineError("late"))
            except BaseException as error:
                self.raised.set_result(error)
                raise


async def test_status_of_error_after_client_left_is_a_cancellation(
    caplog: pytest.LogCaptureFixture,
) -> None:
    late = _Late()
    server = GrpcServer(
        "127.0.0.1:0",
        lambda each: scorer_pb2_grpc.add_ScorerServiceServicer_to_server(late, each),
        ["outrider.v1.ScorerService"],
    )
    port = await server.start()
    async with open_channel(f"127.0.0.1:{port}") as channel, asyncio.timeout(10):
        call = scorer_pb2_grpc.ScorerServiceStub(channel).GetScorerInfo(
            scorer_pb2.GetScorerInfoRequest()
        )
        await late.begun.wait()
        call.cancel()
        assert isinstance(await late.raised, asyncio.CancelledError)
    await server.stop(0)
    # asyncio's are of loops of earlier tests, which grpc still wakes.
    assert not [record for record in caplog.records if record.name != "asyncio"]


@pytest.mark.parametrize(
    "error",
    [
        errors.PromptTooLongError("too long", param="prompt"),
        errors.CapacityError("full", retry_after_s=2.5),
        errors.UnavailableError("gone"),
        errors.DeadlineError("late"),
    ],
)
def test_status_in_a_message_keeps_the_error(error: errors.OutriderError) -> None:
    read = status.from_status(status.to_status(error).SerializeToString())
    assert type(read) is type(error)
    assert (read.message, read.reason, read.retry_after_s) == (
        *(error.message, error.reason, error.retry_after_s),
    )
    assert getattr(read, "param", None) == getattr(error, "param", None)


def test_status_that_does_not_parse_is_an_internal_error() -> None:
    for unread in (b"\xff", b""):
        error = status.from_status(unread)
        assert type(error) is errors.InternalError
        assert error.message == "INTERNAL"
