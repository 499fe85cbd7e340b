"""Converts between `OutriderError` and gRPC status, by one table.

A status carries `google.rpc.ErrorInfo{reason, domain: "outrider", metadata: {param}}` and, where
trying again may help, `google.rpc.RetryInfo`.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
from typing import Any, Final, NoReturn

import grpc
from google.protobuf import any_pb2, duration_pb2
from google.protobuf.message import DecodeError
from google.rpc import error_details_pb2, status_pb2

from outrider import errors

DOMAIN: Final = "outrider"
_DETAILS_KEY: Final = "grpc-status-details-bin"
_WRITE_FAILED: Final = "Internal error from Core"
"""Details of grpc.aio for a call whose write failed before the peer's own status came."""
_log = logging.getLogger(__name__)

# An error takes the code of its nearest base class. A status takes the class that its ErrorInfo's
# reason names or, if gRPC itself made the status, the first class of its code.
_TABLE: Final[tuple[tuple[type[errors.OutriderError], grpc.StatusCode], ...]] = (
    (errors.InvalidRequestError, grpc.StatusCode.INVALID_ARGUMENT),
    (errors.PromptTooLongError, grpc.StatusCode.INVALID_ARGUMENT),
    (errors.ModelNotFoundError, grpc.StatusCode.NOT_FOUND),
    (errors.UnauthenticatedError, grpc.StatusCode.UNAUTHENTICATED),
    (errors.CapacityError, grpc.StatusCode.RESOURCE_EXHAUSTED),
    (errors.UnavailableError, grpc.StatusCode.UNAVAILABLE),
    (errors.UnavailableError, grpc.StatusCode.CANCELLED),
    (errors.DeadlineError, grpc.StatusCode.DEADLINE_EXCEEDED),
    (errors.ProposerRefusedError, grpc.StatusCode.FAILED_PRECONDITION),
    (errors.UnsupportedModelError, grpc.StatusCode.FAILED_PRECONDITION),
    (errors.ConfigError, grpc.StatusCode.FAILED_PRECONDITION),
    (errors.InternalError, grpc.StatusCode.INTERNAL),
)
_CODE_OF: Final = dict(reversed(_TABLE))
_CODE_BY_VALUE: Final[dict[int, grpc.StatusCode]] = {
    code.value[0]: code for code in grpc.StatusCode
}


def code_of(error: errors.OutriderError) -> grpc.StatusCode:
    """Return the gRPC status code of an error."""
    return next(
        (_CODE_OF[cls] for cls in type(error).__mro__ if cls in _CODE_OF), grpc.StatusCode.INTERNAL
    )


def to_status(error: errors.OutriderError) -> status_pb2.Status:
    """Return the status of an error with its details; a long message is cut."""
    info = error_details_pb2.ErrorInfo(reason=error.reason, domain=DOMAIN)
    if isinstance(error, errors.InvalidRequestError) and error.param is not None:
        info.metadata["param"] = errors.shortened(error.param)
    details = [_pack(info)]
    if error.retry_after_s is not None:
        delay = duration_pb2.Duration()
        delay.FromMilliseconds(round(error.retry_after_s * 1000))
        details.append(_pack(error_details_pb2.RetryInfo(retry_delay=delay)))
    return status_pb2.Status(
        code=code_of(error).value[0], message=errors.shortened(error.message), details=details
    )


def outrider_error(error: BaseException) -> errors.OutriderError:
    """Return what a client is told: an error that is not an `OutriderError` is logged."""
    if isinstance(error, errors.OutriderError):
        return error
    _log.error("unexpected error in an RPC", exc_info=error)
    return errors.InternalError("internal error; the server's log has the details")


async def abort(context: grpc.aio.ServicerContext[Any, Any], error: BaseException) -> NoReturn:
    """End the RPC with the status of `error`; never return.

    Cancellation is passed on, also where the client is gone.
    """
    if isinstance(error, asyncio.CancelledError):
        raise error
    if isinstance(error, grpc.aio.InternalError):  # of a write
        raise asyncio.CancelledError from error
    known = outrider_error(error)
    status = to_status(known)
    try:
        await context.abort(
            code_of(known),
            status.message,
            trailing_metadata=((_DETAILS_KEY, status.SerializeToString()),),
        )
    except grpc.aio.InternalError as gone:
        raise asyncio.CancelledError from gone
    raise AssertionError("abort returned")


def from_rpc_error(error: grpc.aio.AioRpcError) -> errors.OutriderError:
    """Return the error of the peer, or of gRPC itself."""
    if error.code() is grpc.StatusCode.INTERNAL and error.details() == _WRITE_FAILED:
        return errors.UnavailableError("the stream broke")
    info, retry = _details(error)
    code, message = error.code(), error.details() or error.code().name
    if nothing_answers(error):  # gRPC's details end with the reason
        message = f"nothing answers there: {message.rpartition(': ')[2]}"
    return _error(code, message, info, retry)


def from_status(data: bytes) -> errors.OutriderError:
    """Return the error of a serialized status, as `to_status` makes it."""
    status = status_pb2.Status()
    with contextlib.suppress(DecodeError):
        status.ParseFromString(data)
    code = _CODE_BY_VALUE.get(status.code, grpc.StatusCode.INTERNAL)
    if code is grpc.StatusCode.OK:  # nothing of it could be read
        code = grpc.StatusCode.INTERNAL
    return _error(code, status.message or code.name, *_unpacked(status))


def _error(
    code: grpc.StatusCode,
    message: str,
    info: error_details_pb2.ErrorInfo | None,
    retry: error_details_pb2.RetryInfo | None,
) -> errors.OutriderError:
    classes = [cls for cls, its_code in _TABLE if its_code is code] or [errors.InternalError]
    reason = info.reason if info is not None else ""
    error_class = next((cls for cls in classes if cls.reason == reason), classes[0])
    if issubclass(error_class, errors.CapacityError):
        delay_s = retry.retry_delay.ToMilliseconds() / 1000 if retry is not None else 1.0
        return errors.CapacityError(message, retry_after_s=delay_s)
    if issubclass(error_class, errors.InvalidRequestError):
        param = info.metadata.get("param") if info is not None else None
        return error_class(message, param=param, reason=reason or None)
    return error_class(message, reason=reason or None)


def nothing_answers(error: grpc.aio.AioRpcError) -> bool:
    """Return whether gRPC could not reach anybody at the address."""
    unavailable = error.code() is grpc.StatusCode.UNAVAILABLE and not from_service(error)
    return unavailable and "failed to connect" in (error.details() or "")


def from_service(error: grpc.aio.AioRpcError) -> bool:
    """Return whether a service called `abort`, rather than gRPC itself or a proxy."""
    return _details(error)[0] is not None


def _pack(message: Any) -> any_pb2.Any:
    packed = any_pb2.Any()
    packed.Pack(message)
    return packed


def _details(
    error: grpc.aio.AioRpcError,
) -> tuple[error_details_pb2.ErrorInfo | None, error_details_pb2.RetryInfo | None]:
    status = status_pb2.Status()
    with contextlib.suppress(DecodeError):  # the status is not Outrider's
        for key, value in error.trailing_metadata() or ():
            if key == _DETAILS_KEY and isinstance(value, bytes):
                status.ParseFromString(value)
    return _unpacked(status)


def _unpacked(
    status: status_pb2.Status,
) -> tuple[error_details_pb2.ErrorInfo | None, error_details_pb2.RetryInfo | None]:
    info: error_details_pb2.ErrorInfo | None = None
    retry: error_details_pb2.RetryInfo | None = None
    with contextlib.suppress(DecodeError):
        for detail in status.details:
            if detail.Is(error_details_pb2.ErrorInfo.DESCRIPTOR):
                candidate = error_details_pb2.ErrorInfo()
                detail.Unpack(candidate)
                info = candidate if candidate.domain == DOMAIN else info
            elif detail.Is(error_details_pb2.RetryInfo.DESCRIPTOR):
                retry = error_details_pb2.RetryInfo()
                detail.Unpack(retry)
    return info, retry
