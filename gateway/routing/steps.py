"""One stream to a scorer, for all requests that this gateway has there (GenerateSteps)."""

from __future__ import annotations

import asyncio
import contextlib
import logging
import math
from collections import OrderedDict
from collections.abc import Iterator
from typing import Any, Final

import grpc

from gateway.routing.rounds import Round, TakeRound, round_from_proto
from outrider.errors import DeadlineError, OutriderError, UnavailableError
from outrider.rpc.codec import kinds_from_bytes
from outrider.rpc.status import from_rpc_error, from_status
from outrider.rpc.tasks import first_of
from outrider.v1 import scorer_pb2, scorer_pb2_grpc

_TICK_S: Final = 0.25
_SILENT_TICKS: Final = 6
"""A scorer that is silent for so many ticks hangs or is gone, since its heartbeat takes 2 ticks.
Ticks are counted on this event loop, so a delay of the gateway itself is not the scorer's."""
_MAX_TIMEOUT_MS: Final = 2**32 - 1
_ROWS_A_TURN: Final = 64
"""Requests that get their tokens in one turn of the event loop, in which their clients do, too."""
_TOKENS_A_TURN: Final = 256
"""Tokens of a request that become text in one turn of the event loop."""
_log = logging.getLogger(__name__)


class Mailbox:
    """The tokens of one request that have come and were not taken.

    Tokens alone go to `take_round` instead, if the request's task waits for nothing but these.
    """

    __slots__ = (
        *("_error", "_kinds", "_loop", "_more", "_response", "_take_round", "_token_ids"),
        *("_waiter", "_waiting"),
    )

    def __init__(self, take_round: TakeRound | None = None) -> None:
        self._take_round = take_round
        self._waiting = False
        self._token_ids: list[int] = []
        self._kinds = b""
        self._response: scorer_pb2.ScorerServiceGenerateResponse | None = None
        self._error: Exception | None = None
        self._more = False  # tokens were left for a later turn
        self._waiter: asyncio.Future[None] | None = None
        self._loop = asyncio.get_running_loop()

    def put(
        self,
        token_ids: list[int],
        kinds: bytes,
        response: scorer_pb2.ScorerServiceGenerateResponse | None = None,
    ) -> None:
        """Add tokens, with their details."""
        if response is None and self._taken(token_ids, kinds):
            return
        self._token_ids += token_ids
        self._kinds += kinds
        if self._response is None:
            self._response = response
        elif response is not None:
            for name in ("usage", "aux_info"):  # the latest counts; logprobs add up
                if response.HasField(name):
                    self._response.ClearField(name)
            self._response.MergeFrom(response)
        self._notify()

    def _taken(self, token_ids: list[int], kinds: bytes) -> bool:
        take = self._take_round if self._waiting else None
        if take is None or len(token_ids) > _TOKENS_A_TURN:
            return False
        try:
            return take(Round(tuple(token_ids), kinds_from_bytes(kinds), None))
        except Exception as error:  # the request's task raises it, and no other request fails
            self._error = error
            self._notify()
            return True

    def fail(self, error: OutriderError) -> None:
        """End with an error, after what has come; the first one counts."""
        self._error = self._error or error
        self._notify()

    async def take(self) -> Round:
        """Return what came since the last call, once there is any. Raises the error of `fail`.

        Of more than `_TOKENS_A_TURN` tokens it returns the first, with their logprobs. The other
        tokens follow in later turns of the event loop, the last of them with the other details.
        """
        if self._more:
            await asyncio.sleep(0)
        while not self._token_ids and self._response is None:
            if self._error is not None:
                raise self._error
            self._waiter, self._waiting = self._loop.create_future(), True
            await self._waiter
        token_ids, kinds, response = self._token_ids, self._kinds, self._response
        self._more = len(token_ids) > _TOKENS_A_TURN
        self._token_ids, token_ids = token_ids[_TOKENS_A_TURN:], token_ids[:_TOKENS_A_TURN]
        self._kinds, kinds = kinds[_TOKENS_A_TURN:], kinds[:_TOKENS_A_TURN]
        if response is not None and self._more:
            scores, response = response.logprobs, scorer_pb2.ScorerServiceGenerateResponse()
            response.logprobs.extend(scores[:_TOKENS_A_TURN])
            del scores[:_TOKENS_A_TURN]
        else:
            self._response = None
        if response is None:
            return Round(tuple(token_ids), kinds_from_bytes(kinds), None)
        return round_from_proto(token_ids, kinds_from_bytes(kinds), response)

    def _notify(self) -> None:
        self._waiting = False
        if self._waiter is not None and not self._waiter.done():
            self._waiter.set_result(None)


class StepsStream:
    """The stream, from its making until it breaks or is closed."""

    def __init__(self, stub: scorer_pb2_grpc.ScorerServiceAsyncStub) -> None:
        self._answers: dict[int, Mailbox] = {}
        self._last_id = 0
        self._begun: OrderedDict[int, scorer_pb2.StepsCall] = OrderedDict()  # not sent yet
        self._cancelled: list[int] = []
        self._to_write = asyncio.Event()
        self._silent_ticks = 0
        self._retired = False
        self._error: OutriderError | None = None
        self._running = asyncio.create_task(self._run(stub))

    @property
    def broken(self) -> bool:
        """Return whether no request can be begun any more."""
        return self._error is not None

    @contextlib.contextmanager
    def begun(
        self,
        request: scorer_pb2.ScorerServiceGenerateRequest,
        metadata: tuple[tuple[str, str], ...],
        timeout_s: float,
        take_round: TakeRound | None = None,
    ) -> Iterator[Mailbox]:
        """Send a request; at the end of the context, it is aborted if it still runs."""
        answer = Mailbox(take_round)
        if self._error is not None:
            raise self._error
        self._last_id += 1
        call_id = self._last_id
        self._begun[call_id] = scorer_pb2.StepsCall(
            id=call_id,
            request=request,
            timeout_ms=min(_MAX_TIMEOUT_MS, math.ceil(timeout_s * 1e3)),
            metadata=dict(metadata),
        )
        self._answers[call_id] = answer
        self._to_write.set()
        error = DeadlineError("the request's deadline passed")
        timer = asyncio.get_running_loop().call_later(timeout_s, answer.fail, error)
        try:
            yield answer
        finally:
            timer.cancel()
            sent = self._begun.pop(call_id, None) is None
            if self._answers.pop(call_id, None) is not None and sent:
                self._cancelled.append(call_id)
                self._to_write.set()
            self._close_if_idle()

    def retire(self) -> None:
        """Close as soon as no request is left; no other is begun."""
        self._retired = True
        self._close_if_idle()

    async def close(self) -> None:
        """End at once, with all requests."""
        self._cancel()
        await asyncio.gather(self._running, return_exceptions=True)

    def _close_if_idle(self) -> None:
        if self._retired and not self._answers:
            self._cancel()

    def _cancel(self) -> None:
        self._running.cancel()  # whose task may have had no turn yet
        self._fail(UnavailableError("the stream was closed"))

    def _fail(self, error: OutriderError) -> None:
        self._error = error
        answers, self._answers = self._answers, {}
        for answer in answers.values():
            answer.fail(error)

    async def _run(self, stub: scorer_pb2_grpc.ScorerServiceAsyncStub) -> None:
        call = stub.GenerateSteps()
        error: OutriderError = UnavailableError("the stream ended")
        try:
            await first_of(self._read(call), self._write(call), self._watch())
        except UnavailableError as silent:
            error = silent
        except grpc.aio.AioRpcError as failed:
            error = from_rpc_error(failed)
            if not isinstance(error, UnavailableError):  # whatever it was, others may go on
                error = UnavailableError(error.message)
        except asyncio.InvalidStateError:
            pass  # of a write: the call has ended
        except Exception:
            _log.exception("the stream to a scorer failed")
        finally:
            call.cancel()
            self._fail(error)

    async def _read(self, call: Any) -> None:
        answers = self._answers
        async for message in call:
            self._silent_ticks = 0
            details = {each.id: each for each in message.details}
            token_ids, kinds, at = list(message.token_ids), message.kinds, 0
            rows = len(message.ids) == len(message.counts)
            if not (rows and sum(message.counts) == len(token_ids) == len(kinds)):
                raise UnavailableError("the scorer sent rows that do not add up")
            columns = zip(message.ids, message.counts, strict=True)
            for row, (call_id, count) in enumerate(columns, 1):
                if row % _ROWS_A_TURN == 0:
                    await asyncio.sleep(0)
                    self._silent_ticks = 0  # that turn was the gateway's own
                begin, at = at, at + count
                answer = answers.get(call_id)
                if answer is None:
                    continue  # it was cancelled
                about = details.pop(call_id, None) if details else None
                if about is None:
                    answer.put(token_ids[begin:at], kinds[begin:at])
                else:
                    self._put(about, token_ids[begin:at], kinds[begin:at])
            for about in details.values():
                self._put(about, [], b"")

    def _put(self, about: scorer_pb2.StepsDetails, token_ids: list[int], kinds: bytes) -> None:
        answer = self._answers.get(about.id)
        if answer is None:
            return
        ended = about.HasField("status")
        if about.HasField("response"):
            ended = ended or bool(about.response.finish_reason)
            answer.put(token_ids, kinds, about.response)
        elif token_ids:
            answer.put(token_ids, kinds)
        if about.HasField("status"):
            answer.fail(from_status(about.status))
        if ended:
            del self._answers[about.id]

    async def _write(self, call: Any) -> None:
        while True:
            await self._to_write.wait()
            self._to_write.clear()
            while self._begun:
                _, begin = self._begun.popitem(last=False)
                await call.write(scorer_pb2.GenerateStepsRequest(begin=begin))
            if self._cancelled:
                cancelled, self._cancelled = self._cancelled, []
                await call.write(scorer_pb2.GenerateStepsRequest(cancelled_ids=cancelled))

    async def _watch(self) -> None:
        while self._silent_ticks < _SILENT_TICKS:
            await asyncio.sleep(_TICK_S)
            self._silent_ticks += 1
        raise UnavailableError(f"the scorer said nothing for {_TICK_S * _SILENT_TICKS:g} s")
