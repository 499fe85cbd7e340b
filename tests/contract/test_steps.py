"""GenerateSteps: what Generate says, for many requests over one stream."""

from __future__ import annotations

import asyncio
from typing import Any

import grpc
import pytest

from outrider import errors
from outrider.rpc import status
from outrider.rpc.channel import open_channel
from outrider.rpc.telemetry import configure
from outrider.rpc.versions import STEPS_VERSION
from outrider.v1 import common_pb2, scorer_pb2
from scorer_service import steps as steps_module
from scorer_service.steps import StepsStream
from tests.contract.test_scorer import BAD_REQUESTS, PROMPT, SCRIPTS, SLOW_S, greedy_text
from tests.support.services.scorer import RunningScorer, generate_request, running_scorer
from tests.support.services.scripted_proposer import ScriptedProposer, proposing
from tests.support.services.steps_client import Received, StepsClient, steps
from tests.support.waiting import until

Request = scorer_pb2.ScorerServiceGenerateRequest


def requests() -> list[Request]:
    """One of each kind."""
    greedy = generate_request(PROMPT)
    sampled = generate_request([7, 8], temperature=0.9, max_tokens=60)
    interval = generate_request([2, 2, 2], max_tokens=50)
    interval.stream_interval = 16
    scored = generate_request(PROMPT[:3], max_tokens=9)
    scored.top_logprobs, scored.prompt_logprobs = 3, 1
    watched = generate_request(PROMPT[2:], max_tokens=12)
    watched.running_stats = True
    text = greedy_text([5], 20)
    stopped = generate_request([5], max_tokens=20)
    stopped.stop.stop_token_ids.append(text[7])
    single = generate_request([9], max_tokens=1)
    return [greedy, sampled, interval, scored, watched, stopped, single]


async def unary(scorer: RunningScorer, request: Request) -> Received:
    received = Received()
    async for response in scorer.stub.Generate(request, timeout=30):
        received.add(response)
    return received


def counts(received: Received) -> common_pb2.AuxInfo:
    """The account without what the clock decides."""
    assert received.last is not None
    account = received.last.aux_info
    for descriptor, _ in account.ListFields():
        if descriptor.name.endswith("_ms") or descriptor.name == "cost_time":
            account.ClearField(descriptor.name)  # type: ignore[arg-type]
    return account


async def to_the_end(call: Any) -> None:
    while await call.read() is not grpc.aio.EOF:
        pass


async def test_steps_with_requests_of_each_kind_equal_generate() -> None:
    async with running_scorer() as scorer:
        assert (await scorer.info()).steps_version == STEPS_VERSION
        # In the same order, so that both find the same prompts cached.
        expected = [[await unary(scorer, each) for each in requests()] for _ in range(2)][1]
        async with steps(scorer.stub) as client:
            for call_id, request in enumerate(requests()):
                await client.begin(call_id, request)
            answers = [await client.answer(call_id) for call_id in range(len(expected))]
    for answer, wanted in zip(answers, expected, strict=True):
        assert answer.token_ids == wanted.token_ids
        assert answer.kinds == wanted.kinds
        assert answer.logprobs == wanted.logprobs
        assert answer.prompt_logprobs == wanted.prompt_logprobs
        assert answer.last is not None
        assert wanted.last is not None
        assert answer.last.finish_reason == wanted.last.finish_reason
        assert answer.last.usage == wanted.last.usage
        assert counts(answer) == counts(wanted)
        assert answer.last.HasField("stop_token_id") == wanted.last.HasField("stop_token_id")
        assert answer.last.stop_token_id == wanted.last.stop_token_id
    assert expected[3].prompt_logprobs is not None
    assert answers[4].accounts == answers[4].parts, "a message of several steps has one account"
    assert expected[5].last is not None
    assert expected[5].last.HasField("stop_token_id")


async def test_steps_with_drafts_keep_text_and_tell_kinds() -> None:
    async with (
        running_scorer() as scorer,
        proposing(ScriptedProposer(scorer.stub, SCRIPTS["right"])),
        steps(scorer.stub) as client,
    ):
        for call_id in range(8):
            await client.begin(call_id, generate_request(PROMPT[call_id % 4 :]))
        for call_id in range(8):
            answer = await client.answer(call_id)
            assert answer.token_ids == greedy_text(PROMPT[call_id % 4 :], 40)
            assert answer.last is not None
            accepted = answer.last.aux_info.accepted
            assert answer.kinds.count(common_pb2.TOKEN_KIND_ACCEPTED) == accepted > 0


async def test_step_with_many_rows_is_one_message() -> None:
    async with running_scorer(pause_s=0.02) as scorer, steps(scorer.stub) as client:
        for call_id in range(24):
            await client.begin(call_id, generate_request([3, call_id], max_tokens=30))
        for call_id in range(24):
            assert (await client.answer(call_id)).token_ids == greedy_text([3, call_id], 30)
    assert client.messages < 24 * 30 / 4, "rows share messages"


async def test_steps_without_requests_say_something_every_half_second() -> None:
    async with running_scorer() as scorer, steps(scorer.stub) as client:
        await until(lambda: client.messages == 1)
        begun = asyncio.get_running_loop().time()
        await until(lambda: client.messages == 3)
        assert 0.9 < asyncio.get_running_loop().time() - begun < 1.9
        assert client.empty == 3


@pytest.mark.parametrize("what", BAD_REQUESTS)
async def test_steps_with_a_bad_request_refuse_it_alone(what: str) -> None:
    request, param, reason = BAD_REQUESTS[what]
    async with running_scorer(pause_s=SLOW_S) as scorer, steps(scorer.stub) as client:
        await client.begin(1, generate_request(PROMPT))
        await client.begin(2, request)
        error = (await client.answer(2)).error
        assert isinstance(error, errors.InvalidRequestError)
        assert (error.param, error.reason) == (param, reason)
        assert (await client.answer(1)).token_ids == greedy_text(PROMPT, 40)


async def test_steps_with_cancelled_request_abort_it_alone() -> None:
    async with running_scorer(pause_s=SLOW_S) as scorer, steps(scorer.stub) as client:
        for call_id in (1, 2, 3):
            await client.begin(call_id, generate_request(PROMPT, max_tokens=140))
        await client.told(2, lambda answer: len(answer.token_ids) > 3)
        await client.cancel(2, 99, 1)
        await scorer.until(lambda: scorer.thread.snapshot().running == 1, "aborted")
        await client.cancel(2)
        await client.begin(4, generate_request(PROMPT, max_tokens=140))
        await client.cancel(4)  # maybe before the engine has seen it
        assert (await client.answer(3)).token_ids == greedy_text(PROMPT, 140)
        assert not any(client.answers[call_id].ended for call_id in (1, 2, 4))


async def test_steps_with_cancelled_request_write_none_of_its_tokens() -> None:
    """Not even those that waited to be written."""
    told: asyncio.Queue[scorer_pb2.GenerateStepsRequest] = asyncio.Queue()

    async def up() -> Any:
        while True:
            yield await told.get()

    unblocked, written = asyncio.Event(), []
    unblocked.set()

    async def write(message: scorer_pb2.GenerateStepsResponse) -> None:
        written.append(message)
        await unblocked.wait()

    def seen() -> set[int]:
        return {call_id for message in written for call_id in message.ids}

    async with running_scorer(pause_s=0.05) as scorer:
        stream = StepsStream(configure("slow"), scorer.servicer.accept)
        serving = asyncio.create_task(stream.serve(up(), write))
        for call_id in (1, 2):
            request = generate_request([call_id, 1], max_tokens=140)
            begin = scorer_pb2.StepsCall(id=call_id, request=request)
            told.put_nowait(scorer_pb2.GenerateStepsRequest(begin=begin))
        await scorer.until(lambda: seen() == {1, 2}, "both are in columns from now on")
        unblocked.clear()
        await scorer.until(lambda: sorted(stream._columns.ids) == [1, 2], "a token of each waits")
        told.put_nowait(scorer_pb2.GenerateStepsRequest(cancelled_ids=[1]))
        await scorer.until(lambda: stream._columns.ids == [2], "only one waits")
        before = len(written)
        unblocked.set()
        await scorer.until(lambda: len(written) > before + 1, "both messages were written")
        assert {call_id for message in written[before:] for call_id in message.ids} == {2}
        serving.cancel()
        await asyncio.gather(serving, return_exceptions=True)


async def test_steps_with_id_used_before_refuse_it() -> None:
    async with running_scorer(pause_s=SLOW_S) as scorer, steps(scorer.stub) as client:
        await client.begin(5, generate_request(PROMPT, max_tokens=140))
        await client.begin(6, generate_request(PROMPT))
        await client.told(5, lambda answer: bool(answer.token_ids))
        for call_id in (5, 4):
            await client.begin(call_id, generate_request(PROMPT))
            error = (await client.answer(call_id)).error
            assert isinstance(error, errors.InvalidRequestError)
            assert error.param == "id"
        assert (await client.answer(6)).token_ids == greedy_text(PROMPT, 40)
        assert scorer.thread.snapshot().running == 0, "the running one ended with the refusal"


async def test_steps_with_message_that_does_not_parse_end() -> None:
    async with (
        running_scorer() as scorer,
        open_channel(scorer.address) as channel,
        steps(scorer.stub) as polite,
    ):
        rude: Any = channel.stream_stream("/outrider.v1.ScorerService/GenerateSteps")(timeout=10)
        await rude.write(b"\xff\xff")
        with pytest.raises(grpc.aio.AioRpcError) as caught:
            await to_the_end(rude)
        error = status.from_rpc_error(caught.value)
        assert isinstance(error, errors.InvalidRequestError)
        assert "does not parse" in error.message
        await polite.begin(1, generate_request(PROMPT))
        assert (await polite.answer(1)).token_ids == greedy_text(PROMPT, 40)


async def test_steps_past_a_deadline_end_that_request() -> None:
    async with running_scorer(pause_s=0.05) as scorer, steps(scorer.stub) as client:
        await client.begin(1, generate_request(PROMPT, max_tokens=140), timeout_ms=400)
        await client.begin(2, generate_request(PROMPT, max_tokens=20))
        answer = await client.answer(1)
        assert isinstance(answer.error, errors.DeadlineError)
        assert answer.token_ids == greedy_text(PROMPT, 140)[: len(answer.token_ids)]
        assert answer.token_ids
        assert (await client.answer(2)).token_ids == greedy_text(PROMPT, 20)
        assert scorer.thread.snapshot().running == 0


async def test_steps_when_forward_fails_go_on() -> None:
    async with running_scorer() as scorer, steps(scorer.stub) as client:
        scorer.model.fail_next = True
        await client.begin(1, generate_request(PROMPT))
        error = (await client.answer(1)).error
        assert isinstance(error, errors.InternalError)
        assert "fell over" not in error.message
        await client.begin(2, generate_request(PROMPT))
        assert (await client.answer(2)).token_ids == greedy_text(PROMPT, 40)


async def test_steps_with_too_many_requests_refuse_more(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(steps_module, "_MAX_REQUESTS", 2)
    async with running_scorer(pause_s=SLOW_S) as scorer, steps(scorer.stub) as client:
        for call_id in (1, 2, 3):
            await client.begin(call_id, generate_request(PROMPT))
        error = (await client.answer(3)).error
        assert isinstance(error, errors.CapacityError)
        assert error.retry_after_s == 1.0
        for call_id in (1, 2):
            assert (await client.answer(call_id)).token_ids == greedy_text(PROMPT, 40)


async def test_steps_when_client_leaves_keep_nothing() -> None:
    async with running_scorer(pause_s=SLOW_S) as scorer:
        for half_close in (False, True):
            async with steps(scorer.stub) as client:
                for call_id in range(6):
                    await client.begin(call_id, generate_request(PROMPT, max_tokens=140))
                await client.told(0, lambda answer: bool(answer.token_ids))
                if half_close:
                    await client.call.done_writing()
                    assert await client.call.code() is grpc.StatusCode.OK
            await scorer.until(lambda: scorer.thread.snapshot().running == 0, "aborted", 5)


async def test_steps_that_are_not_read_merge_and_stall_nobody() -> None:
    request_queue: asyncio.Queue[scorer_pb2.GenerateStepsRequest | None] = asyncio.Queue()

    async def up() -> Any:
        while (message := await request_queue.get()) is not None:
            yield message

    blocked, written = asyncio.Event(), []

    async def write(message: scorer_pb2.GenerateStepsResponse) -> None:
        written.append(message)
        await blocked.wait()

    async with running_scorer() as scorer, steps(scorer.stub) as other:
        stream = StepsStream(configure("slow"), scorer.servicer.accept)
        serving = asyncio.create_task(stream.serve(up(), write))
        for call_id in range(8):
            begin = scorer_pb2.StepsCall(
                id=call_id, request=generate_request([call_id, 1], max_tokens=60)
            )
            request_queue.put_nowait(scorer_pb2.GenerateStepsRequest(begin=begin))
        await scorer.until(lambda: bool(written), "the first message")
        await other.begin(1, generate_request(PROMPT, max_tokens=140))
        assert (await other.answer(1)).token_ids == greedy_text(PROMPT, 140)
        await scorer.until(lambda: scorer.thread.snapshot().running == 0, "all have ended", 30)
        assert len(written) == 1, "the rest waits in one place for each request"
        blocked.set()
        client = StepsClient(None)
        await scorer.until(lambda: not stream._rows, "all was written")
        for message in written:
            client.take(message)
        assert len(written) <= 3
        for call_id in range(8):
            assert client.answers[call_id].token_ids == greedy_text([call_id, 1], 60)
        request_queue.put_nowait(None)
        await serving


async def test_steps_with_large_answers_are_cut_into_messages(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(steps_module, "_MESSAGE_BYTES", 40)
    monkeypatch.setattr(steps_module, "_MAX_COMMITS", 3)
    async with running_scorer() as scorer, steps(scorer.stub) as client:
        for call_id in range(6):
            await client.begin(call_id, generate_request([call_id, 1], max_tokens=140))
        for call_id in range(6):
            assert (await client.answer(call_id)).token_ids == greedy_text([call_id, 1], 140)


async def test_steps_when_draining_end_with_their_last_request() -> None:
    async with running_scorer(pause_s=0.01) as scorer, steps(scorer.stub) as client:
        await client.begin(1, generate_request(PROMPT, max_tokens=5))
        await client.begin(2, generate_request(PROMPT, max_tokens=140))
        await client.told(2, lambda answer: bool(answer.token_ids))
        draining = asyncio.create_task(scorer.servicer.drain(0.4))
        await asyncio.sleep(0)
        await client.begin(3, generate_request(PROMPT))
        assert isinstance((await client.answer(3)).error, errors.UnavailableError)
        assert (await client.answer(1)).token_ids == greedy_text(PROMPT, 5)
        late = await client.answer(2)
        assert isinstance(late.error, errors.UnavailableError)
        assert late.token_ids == greedy_text(PROMPT, 140)[: len(late.token_ids)]
        await draining
        async with asyncio.timeout(30):
            assert await client.call.code() is grpc.StatusCode.OK
