"""The gateway's streams to its scorers: what they carry, and what they notice."""

from __future__ import annotations

import asyncio
import signal
import time
from collections import Counter
from contextlib import ExitStack
from typing import Any

import openai
import pytest

from gateway.routing import scorer as scorer_module
from gateway.routing import steps as steps_module
from gateway.routing.rounds import Round, round_from_proto
from gateway.routing.steps import Mailbox, StepsStream
from outrider.errors import DeadlineError, UnavailableError
from outrider.rpc.channel import open_channel
from outrider.types import FinishReason, TokenKind
from outrider.v1 import (
    common_pb2,
    generation_pb2,
    generation_pb2_grpc,
    scorer_pb2,
    scorer_pb2_grpc,
)
from tests.support.services.fake_scorer import FakeScorer, Script, logprobs_of
from tests.support.services.fake_scorer_process import scorer_process
from tests.support.services.gateway import Running, fake_scorer, running_gateway, tokens
from tests.support.waiting import until

TEXT = "hello world, the quick brown fox jumps over the lazy dog; naïve café 日本語 🎉"


async def complete(gateway: Running, **parameters: Any) -> str:
    answer = await gateway.client.completions.create(model="default", prompt="x", **parameters)
    return str(answer.choices[0].text)


async def test_gateway_with_many_requests_opens_one_stream_to_a_scorer() -> None:
    async with running_gateway(Script(tokens(TEXT), together=12, delay_s=0.01)) as gateway:
        texts = await asyncio.gather(*(complete(gateway) for _ in range(12)))
        assert texts == [TEXT] * 12
        assert gateway.scorer.streams == 1


async def test_gateway_with_request_too_large_for_a_scorer_refuses_it_alone(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    async with running_gateway(Script(tokens(TEXT))) as gateway:
        assert await complete(gateway) == TEXT
        with monkeypatch.context() as patched:
            patched.setattr(scorer_module, "_MAX_REQUEST_BYTES", 1)
            with pytest.raises(openai.BadRequestError, match="takes 1 at most"):
                await complete(gateway)
        assert await complete(gateway) == TEXT
        assert (gateway.scorer.streams, len(gateway.scorer.requests)) == (1, 2)


async def test_gateway_whose_client_leaves_cancels_that_request() -> None:
    async with running_gateway(Script(tokens(TEXT), delay_s=0.05)) as gateway:
        leaving = asyncio.create_task(complete(gateway))
        staying = asyncio.create_task(complete(gateway))
        await until(lambda: gateway.scorer.running == 2)
        leaving.cancel()
        await until(lambda: gateway.scorer.cancelled == 1)
        assert await staying == TEXT
        assert gateway.scorer.cancelled == gateway.scorer.streams == 1


async def is_busy(target: str) -> bool:
    async with open_channel(target) as channel:
        stub = scorer_pb2_grpc.ScorerServiceStub(channel)
        info = await stub.GetScorerInfo(scorer_pb2.GetScorerInfoRequest(), timeout=10)
    return info.running_requests > 0


class Beats:
    """An event loop's own time in seconds: the machine's delays of the loop are not in it."""

    def __init__(self) -> None:
        self.now = 0.0
        self._beating = asyncio.create_task(self._beat())

    async def _beat(self) -> None:
        while True:
            await asyncio.sleep(0.02)
            self.now += 0.02


async def test_gateway_leaves_a_stopped_scorer_and_goes_on_with_the_same_text() -> None:
    """Within 2 s of its own loop's time, by 6 ticks of 0.25 s."""
    script = Script(tokens(TEXT * 2), prompt_len=2, per_round=1, delay_s=0.02)
    with ExitStack() as stack:
        running = [
            stack.enter_context(scorer_process(fake_scorer(script, name)))
            for name in ("scorer-a", "scorer-b")
        ]
        async with running_gateway(scorers=tuple(target for _, target in running)) as gateway:
            stream = await gateway.client.completions.create(
                model="default", prompt=[5, 6], stream=True
            )
            beats = Beats()
            text, chunks, longest_s, last = "", 0, 0.0, beats.now
            async for chunk in stream:
                text += chunk.choices[0].text
                chunks += 1
                longest_s, last = max(longest_s, beats.now - last), beats.now
                if chunks == 10:
                    [process] = [each for each, target in running if await is_busy(target)]
                    process.send_signal(signal.SIGSTOP)
            assert text == TEXT * 2
            assert 1.0 < longest_s < 2.0
            assert gateway.metric("gateway_retries_total") == 1


async def test_answer_that_is_not_taken_holds_all_in_one_place() -> None:
    answer = Mailbox()
    for token in (5, 6, 7):
        response = scorer_pb2.ScorerServiceGenerateResponse(
            logprobs=[logprobs_of(token, 2)],
            usage=common_pb2.Usage(completion_tokens=token),
            aux_info=common_pb2.AuxInfo(rounds=token, accepted_per_pos=[token]),
        )
        if token == 7:
            response.finish_reason = common_pb2.FINISH_REASON_LENGTH
        answer.put([token], bytes([common_pb2.TOKEN_KIND_BONUS]), response)
    answer.fail(DeadlineError("late"))
    round_ = await answer.take()
    assert round_.token_ids == (5, 6, 7)
    assert round_.kinds == (TokenKind.BONUS,) * 3
    assert round_.finish_reason is FinishReason.LENGTH
    assert len(round_.logprobs) == 3
    assert round_.usage is not None
    assert round_.usage.completion_tokens == 7
    assert round_.aux_info is not None
    assert list(round_.aux_info.accepted_per_pos) == [7]
    with pytest.raises(DeadlineError):
        await answer.take()


async def test_many_tokens_at_once_become_text_over_several_turns_of_the_event_loop() -> None:
    answer, turns, most = Mailbox(), 0, 256
    total = 3 * most + 7
    answer.put([1] * most, bytes([common_pb2.TOKEN_KIND_PLAIN]) * most)
    answer.put([2] * (total - most), bytes([common_pb2.TOKEN_KIND_BONUS]) * (total - most))
    response = scorer_pb2.ScorerServiceGenerateResponse(
        logprobs=[logprobs_of(n, 1) for n in range(total)],
        finish_reason=common_pb2.FINISH_REASON_LENGTH,
        usage=common_pb2.Usage(completion_tokens=total),
        aux_info=common_pb2.AuxInfo(rounds=1),
    )
    expected = round_from_proto([], (), response).logprobs
    answer.put([], b"", response)

    async def count_turns() -> None:
        nonlocal turns
        while True:
            turns += 1
            await asyncio.sleep(0)

    counting = asyncio.create_task(count_turns())
    rounds = [await answer.take() for _ in range(4)]
    counting.cancel()
    assert turns >= 3, "others have their turn"
    assert [len(each.token_ids) for each in rounds] == [most, most, most, 7]
    assert sum((each.token_ids for each in rounds), ()) == (1,) * most + (2,) * (total - most)
    kinds = (TokenKind.PLAIN,) * most + (TokenKind.BONUS,) * (total - most)
    assert sum((each.kinds for each in rounds), ()) == kinds
    assert sum((each.logprobs for each in rounds), ()) == expected
    assert [each.finish_reason for each in rounds] == [None] * 3 + [FinishReason.LENGTH]
    assert [each.usage is None for each in rounds] == [True] * 3 + [False]


async def test_tokens_alone_are_taken_at_once_where_the_task_waits_for_nothing_else() -> None:
    taken: list[Round] = []
    free = True

    def take_round(round_: Round) -> bool:
        if round_.token_ids == (13,):
            raise ValueError("unlucky")
        if free:
            taken.append(round_)
        return free

    plain = bytes([common_pb2.TOKEN_KIND_PLAIN])
    answer = Mailbox(take_round)
    answer.put([1], plain)  # before the task waits
    assert (await answer.take()).token_ids == (1,)
    waiting = asyncio.create_task(answer.take())
    await asyncio.sleep(0)
    answer.put([2], plain)
    answer.put([3, 4], plain * 2)
    assert [(each.token_ids, each.kinds) for each in taken] == [
        ((2,), (TokenKind.PLAIN,)),
        ((3, 4), (TokenKind.PLAIN,) * 2),
    ]
    assert not waiting.done()
    free = False
    answer.put([5], plain)
    free = True
    answer.put([6], plain)  # behind what the task is to take
    assert (await waiting).token_ids == (5, 6)
    waiting = asyncio.create_task(answer.take())
    await asyncio.sleep(0)
    answer.put([7], plain, scorer_pb2.ScorerServiceGenerateResponse(stop_token_id=9))
    assert (await waiting).stop_token_id == 9
    waiting = asyncio.create_task(answer.take())
    await asyncio.sleep(0)
    answer.put([1] * 257, plain * 257)  # too many for one turn of the event loop
    assert len((await waiting).token_ids) == 256
    assert (await answer.take()).token_ids == (1,)
    waiting = asyncio.create_task(answer.take())
    await asyncio.sleep(0)
    answer.put([13], plain)
    answer.fail(UnavailableError("in the same turn: a retry would write to one that failed"))
    with pytest.raises(ValueError, match="unlucky"):
        await waiting
    assert len(taken) == 2


@pytest.mark.parametrize("face", ["grpc", "http"])
async def test_rounds_of_a_stream_reach_its_client_without_a_turn_of_its_task(
    face: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    takes = 0
    take = Mailbox.take

    async def counted(mailbox: Mailbox) -> Round:
        nonlocal takes
        takes += 1
        return await take(mailbox)

    monkeypatch.setattr(Mailbox, "take", counted)
    async with running_gateway(Script(tokens(TEXT), per_round=1, delay_s=0.01)) as gateway:
        if face == "grpc":
            request = generation_pb2.GenerateRequest(text="x")
            async with open_channel(gateway.grpc) as channel:
                stub = generation_pb2_grpc.GenerationServiceStub(channel)
                answers = [answer async for answer in stub.Generate(request, timeout=30)]
            texts, usage = [answer.text for answer in answers], answers[-1].usage
        else:
            stream = await gateway.client.completions.create(
                model="default", prompt="x", stream=True, stream_options={"include_usage": True}
            )
            chunks = [chunk async for chunk in stream]
            texts = [chunk.choices[0].text for chunk in chunks if chunk.choices]
            usage = chunks[-1].usage
    assert "".join(texts) == TEXT
    assert usage.completion_tokens == len(tokens(TEXT))
    assert takes < len(tokens(TEXT)) / 4


async def test_step_of_many_rows_reaches_its_clients_over_several_turns(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """However long these take, the scorer is not held to be silent meanwhile."""
    monkeypatch.setattr(steps_module, "_TICK_S", 0.001)
    rows = 3072
    release = asyncio.Event()

    class Stub:
        def GenerateSteps(self) -> Any:  # noqa: N802
            return self

        def cancel(self) -> None: ...

        async def write(self, message: Any) -> None: ...

        async def __aiter__(self) -> Any:
            await release.wait()
            yield scorer_pb2.GenerateStepsResponse(
                ids=range(1, rows + 1),
                counts=[1] * rows,
                token_ids=range(rows),
                kinds=bytes([common_pb2.TOKEN_KIND_PLAIN]) * rows,
            )
            await asyncio.Event().wait()

    stream = StepsStream(Stub())  # type: ignore[arg-type]
    request, turn, came = scorer_pb2.ScorerServiceGenerateRequest(), 0, []

    async def follow(number: int) -> None:
        with stream.begun(request, (), 60.0) as answer:
            round_ = await answer.take()
            came.append((turn, number, round_.token_ids))

    following = [asyncio.create_task(follow(n)) for n in range(rows)]
    await asyncio.sleep(0)
    release.set()
    while len(came) < rows:
        turn += 1
        time.sleep(0.002)  # noqa: ASYNC251
        await asyncio.sleep(0)
    await asyncio.gather(*following)
    await stream.close()
    assert [(number, tokens) for _, number, tokens in came] == [(n, (n,)) for n in range(rows)]
    assert max(Counter(turn for turn, *_ in came).values()) <= 64


async def test_steps_stream_closed_before_its_first_turn_fails_its_requests() -> None:
    async with open_channel("127.0.0.1:1") as channel:
        stream = StepsStream(scorer_pb2_grpc.ScorerServiceStub(channel))
        request = scorer_pb2.ScorerServiceGenerateRequest()
        with stream.begun(request, (), 60.0) as answer:
            await stream.close()
            async with asyncio.timeout(5):
                with pytest.raises(UnavailableError):
                    await answer.take()
        assert stream.broken


@pytest.mark.parametrize("field", ["kinds", "counts", "ids", "token_ids"])
async def test_gateway_whose_scorer_sends_rows_that_do_not_add_up_goes_on_elsewhere(
    field: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    broken = fake_scorer(Script(tokens(TEXT)), "scorer-a")
    sound = fake_scorer(Script(tokens(TEXT), prompt_len=2), "scorer-b")
    write = FakeScorer._row

    async def row(self: FakeScorer, begin: Any, down: Any) -> None:
        class Spoiled(asyncio.Queue[Any]):
            def put_nowait(self, item: Any) -> None:
                if item is not None and item.token_ids:
                    spoiled = {"kinds": b"", "counts": [7], "ids": [1, 2], "token_ids": [5]}
                    item.ClearField(field)
                    given = scorer_pb2.GenerateStepsResponse(**{field: spoiled[field]})
                    item.MergeFrom(given)
                down.put_nowait(item)

        await write(self, begin, Spoiled() if self is broken else down)

    monkeypatch.setattr(FakeScorer, "_row", row)
    async with running_gateway(broken, sound) as gateway:
        texts = await asyncio.gather(*(complete(gateway) for _ in range(12)))
        assert texts == [TEXT] * 12
        async with running_gateway(broken, resume_timeout_s=0.3) as alone:
            with pytest.raises(openai.APIStatusError) as refused:
                await complete(alone)
        assert refused.value.status_code == 503
