"""What ends a conversation over a data connection, and what its proposer is told: scorer's side."""

from __future__ import annotations

import asyncio
import contextlib
import socket
from collections.abc import AsyncIterator, Callable

import grpc
import pytest

from outrider import errors
from outrider.rpc import status
from outrider.rpc.data_connection import Offer
from outrider.rpc.frames import Frames
from outrider.v1 import draft_pb2
from scorer_service.config import DraftLimits
from scorer_service.drafting.transport import through_frames
from tests.support.services.data_wire import DataWire, framed
from tests.support.services.guessing import guessing
from tests.support.services.scorer import Output, RunningScorer, running_scorer
from tests.support.services.scripted_proposer import ScriptedProposer, hello, proposing

PROMPT = [3, 1, 4, 1, 5, 9, 2, 6]
LENGTH = 140
SLOW_S = 0.003
MAX_MESSAGE_BYTES = 16 * 2**20

BROKEN: dict[str, tuple[Callable[[DataWire], None], bytes, str | None]] = {
    # what follows, after which bytes, and what the status says; None: it is OK
    "a message that is too long": (
        lambda _: None,
        (MAX_MESSAGE_BYTES + 1).to_bytes(4, "little"),
        f"at most {MAX_MESSAGE_BYTES} are read",
    ),
    "no DraftRequest": (lambda _: None, framed(b"\xff\xff\xff"), "no DraftRequest"),
    "half a message and the end": (
        DataWire.close_writing,
        framed(draft_pb2.DraftRequest(goodbye=draft_pb2.Goodbye()).SerializeToString())[:-1],
        None,
    ),
    "half a length and the end": (DataWire.close_writing, b"\x05\x00", None),
    "the end": (DataWire.close_writing, b"", None),
    "a reset": (DataWire.close, b"", None),
}


async def in_the_middle(
    scorer: RunningScorer, proposer: ScriptedProposer, event: Callable[[], object]
) -> Output:
    """What a request got whose proposer drafted for it until `event`."""
    request = asyncio.create_task(scorer.generate(PROMPT, max_tokens=LENGTH))
    await scorer.until(
        lambda: any(len(s.tokens) > len(PROMPT) + 10 for s in proposer.sessions.values()),
        "drafts were accepted",
    )
    result = event()
    if asyncio.iscoroutine(result):
        await result
    async with asyncio.timeout(10):
        await proposer.ended.wait()
    await scorer.until(lambda: not scorer.hub.registry.proposers, "it is detached")
    return await request


@pytest.mark.parametrize("what", BROKEN)
async def test_data_conversation_with_an_invalid_message_ends_only_the_stream(
    what: str,
) -> None:
    follows, sent, told = BROKEN[what]
    async with running_scorer(pause_s=SLOW_S) as scorer:
        async with proposing(guessing(scorer)) as proposer:

            async def breaks() -> None:
                assert proposer.data is not None
                proposer.script = lambda _: []  # nothing follows in the middle of it
                await asyncio.sleep(0.01)
                await proposer.data.send_bytes(sent)
                follows(proposer.data)

            output = await in_the_middle(scorer, proposer, breaks)
            if told is None:
                assert proposer.error is None
            else:
                assert proposer.error is not None
                assert proposer.error.code() is grpc.StatusCode.INVALID_ARGUMENT
                assert told in str(proposer.error.details())
        assert output.token_ids == scorer.model.greedy_text(PROMPT, LENGTH)
        assert output.aux_info.accepted > 0
        async with proposing(guessing(scorer)):  # and dials anew
            assert (await scorer.generate(PROMPT)).aux_info.accepted > 0


async def test_data_conversation_with_an_empty_message_is_counted() -> None:
    async with running_scorer() as scorer, proposing(guessing(scorer)) as proposer:
        assert proposer.data is not None
        await proposer.data.send_bytes(framed(b""))
        await scorer.until(
            lambda: scorer.metric("draft_blocks_total", fate="malformed") == 1, "it is counted"
        )
        assert (await scorer.generate(PROMPT)).aux_info.accepted > 0


async def test_data_conversation_with_endless_messages_lets_other_tasks_run() -> None:
    near, far = socket.socketpair()
    connected = asyncio.get_running_loop().create_future()
    connected.set_result(Frames(*await asyncio.open_connection(sock=near), MAX_MESSAGE_BYTES))
    wire = through_frames(silence(), Offer(draft_pb2.DataConnection(), connected))
    other_task_ran = asyncio.Event()
    with far:
        far.sendall(framed(b"") * 100)  # what is read at once
        async with contextlib.aclosing(wire.requests()) as requests:
            await anext(requests)
            asyncio.get_running_loop().call_soon(other_task_ran.set)
            await anext(requests)
            assert other_task_ran.is_set()


async def silence() -> AsyncIterator[draft_pb2.DraftRequest]:
    """The stream beside a connection, until it is cancelled."""
    await asyncio.Event().wait()
    yield draft_pb2.DraftRequest()


async def test_data_conversation_with_messages_through_the_stream_refuses_them() -> None:
    async with running_scorer(pause_s=SLOW_S) as scorer:
        async with proposing(guessing(scorer)) as proposer:
            stray = draft_pb2.DraftRequest(blocks=draft_pb2.BlockBatch())
            output = await in_the_middle(scorer, proposer, lambda: proposer.call.write(stray))
            assert proposer.error is not None
            assert proposer.error.code() is grpc.StatusCode.INVALID_ARGUMENT
        assert output.token_ids == scorer.model.greedy_text(PROMPT, LENGTH)


async def replaced(scorer: RunningScorer) -> None:
    anew = ScriptedProposer(scorer.stub, lambda _: [], hello(incarnation=2))
    await anew.dial()
    anew.call.cancel()


ENDED: dict[str, tuple[Callable[[RunningScorer, ScriptedProposer], object], str]] = {
    "drained": (lambda scorer, _: scorer.servicer.drain(10), "shutting down"),
    "replaced": (lambda scorer, _: replaced(scorer), "dialled anew"),
    "bad blocks": (
        lambda _, proposer: proposer.send(
            blocks=draft_pb2.BlockBatch(blocks=[draft_pb2.Block(session=2**40)] * 3)
        ),
        "never opened",
    ),
}


@pytest.mark.parametrize("how", ENDED)
async def test_data_conversation_when_scorer_ends_the_stream_says_why(how: str) -> None:
    end, told = ENDED[how]
    limits = DraftLimits(max_bad_blocks=3)
    async with running_scorer(pause_s=SLOW_S, limits=limits) as scorer:
        async with proposing(guessing(scorer)) as proposer:
            output = await in_the_middle(scorer, proposer, lambda: end(scorer, proposer))
            assert proposer.error is not None
            error = status.from_rpc_error(proposer.error)
            assert told in error.message
            if how == "bad blocks":
                assert isinstance(error, errors.InvalidRequestError)
                assert error.reason == "BAD_BLOCKS"
            else:
                assert isinstance(error, errors.UnavailableError)
            assert proposer.data is not None
            await proposer.data.until_closed()
        assert output.token_ids == scorer.model.greedy_text(PROMPT, LENGTH)


async def test_data_conversation_after_goodbye_closes_both_without_error() -> None:
    async with running_scorer() as scorer, proposing(guessing(scorer)) as proposer:
        assert (await scorer.generate(PROMPT)).aux_info.accepted > 0
        await proposer.send(goodbye=draft_pb2.Goodbye())
        await scorer.until(lambda: not proposer.sessions, "closed")
        await proposer.call.done_writing()
        async with asyncio.timeout(10):
            await proposer.ended.wait()
        assert proposer.error is None
        assert await proposer.call.code() is grpc.StatusCode.OK
        assert proposer.data is not None
        await proposer.data.until_closed()
        assert not scorer.hub.registry.proposers
