"""The proposer service against a scorer played by hand: draft.proto's conversation."""

from __future__ import annotations

import asyncio
import itertools
import random
import threading
from collections.abc import AsyncIterator, Awaitable, Callable, Sequence
from contextlib import asynccontextmanager
from dataclasses import replace

import pytest
from opentelemetry.sdk.trace.export.in_memory_span_exporter import InMemorySpanExporter

from outrider.device import device_id
from outrider.drafting.building.config import DeterministicConfig, NgramConfig, SuffixConfig
from outrider.drafting.copying.ngram import NgramProposer
from outrider.drafting.draft_model.proposer import DraftModelProposer
from outrider.drafting.proposer import (
    DEFAULT_LIMITS,
    NO_PACE,
    DraftRound,
    Pace,
    Proposer,
    ProposerLimits,
    SessionKey,
)
from outrider.drafting.sessions import IDLE_S
from outrider.errors import CapacityError, DeadlineError, ProposerRefusedError
from outrider.process import watchdog
from outrider.rpc.channel import open_channel
from outrider.rpc.deployment import Deployment
from outrider.rpc.exposition import encode
from outrider.rpc.telemetry import configure
from outrider.v1 import common_pb2, draft_pb2, proposer_pb2, proposer_pb2_grpc
from proposer_service.config import LinkConfig, ProposerConfig
from proposer_service.service import ProposerService
from tests.support.models.hash_model import HashModel
from tests.support.services.draft_scorer import Conversation, DraftScorer, close, commit, open_
from tests.support.simulators.methods import Clock
from tests.support.waiting import until

PERIOD = [5, 6, 7, 5, 6, 7, 5, 6]  # prompt lookup goes on with 7, 5, 6, 7
LINK = LinkConfig(backoff_first_s=0.01, backoff_max_s=0.1, refused_retry_s=0.2)


def ngram_config(*scorers: str) -> ProposerConfig:
    return ProposerConfig(
        scorers=scorers,
        methods=(NgramConfig(max_branches=0),),
        proposer_id="p",
        link=LINK,
        deployment=Deployment(drain_grace_s=0.02),
    )


@asynccontextmanager
async def running(
    config: ProposerConfig,
    build: Callable[[ProposerConfig], tuple[Proposer, str]] | None = None,
    exporter: InMemorySpanExporter | None = None,
) -> AsyncIterator[tuple[ProposerService, proposer_pb2_grpc.ProposerServiceAsyncStub]]:
    telemetry = configure("proposer", exporter=exporter)
    service = (
        ProposerService(config, telemetry=telemetry)
        if build is None
        else ProposerService(config, build, telemetry)
    )
    try:
        addresses = await service.start()
        async with open_channel(addresses["grpc"]) as channel:
            yield service, proposer_pb2_grpc.ProposerServiceStub(channel)
    finally:
        await service.stop()


@pytest.fixture(params=[True, False], ids=["data connection", "stream"])
async def scorer(request: pytest.FixtureRequest) -> AsyncIterator[DraftScorer]:
    scorer = DraftScorer(data_connections=request.param)
    yield scorer
    await scorer.stop()


async def eventually(condition: Callable[[], Awaitable[bool]]) -> None:
    async with asyncio.timeout(30):
        while not await condition():  # noqa: ASYNC110
            await asyncio.sleep(0.01)


def hash_model_proposer(
    num_pages: int = 64, limits: ProposerLimits = DEFAULT_LIMITS
) -> Callable[[ProposerConfig], tuple[Proposer, str]]:
    model = HashModel(num_pages=num_pages)
    return lambda _: (DraftModelProposer(model, name="hash", limits=limits), "abc")


async def test_proposer_hello_after_dialling_describes_the_proposer(scorer: DraftScorer) -> None:
    address = await scorer.start()
    async with running(ngram_config(address)):
        hello = (await scorer.attached()).hello
    assert hello.protocol_version == 1
    assert (hello.proposer_id, hello.method, hello.pool) == ("p", "ngram", "default")
    assert (hello.vocab_size, hello.tokenizer_hash) == (0, "")
    assert hello.incarnation > 0
    assert hello.max_sessions == 256
    assert hello.max_draft_tokens == 16


async def test_proposer_stream_when_failed_is_dialled_anew(
    scorer: DraftScorer, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    hello, failures = ProposerService._hello, [RuntimeError("a bug")]

    def failing(self: ProposerService) -> draft_pb2.Hello:
        if failures:
            raise failures.pop()
        return hello(self)

    monkeypatch.setattr(ProposerService, "_hello", failing)
    address = await scorer.start()
    async with running(ngram_config(address)):
        assert (await scorer.attached()).hello.proposer_id == "p"
    assert "a bug" in caplog.text


async def test_proposer_when_drafting_fails_loses_the_sessions(
    scorer: DraftScorer, monkeypatch: pytest.MonkeyPatch
) -> None:
    def broken(*_: object) -> DraftRound:
        raise RuntimeError("the device fell over")

    address = await scorer.start()
    async with running(ngram_config(address)):
        stream = await scorer.attached()
        with monkeypatch.context() as patched:
            patched.setattr(NgramProposer, "draft", broken)
            stream.send(opens=[open_(1, PERIOD)])
            assert (await stream.next_lost()).session == 1
        stream.send(opens=[open_(1, PERIOD, epoch=2)])
        assert (await stream.next_block()).session == 1


async def test_proposer_stream_with_session_drafts_from_open_to_close(scorer: DraftScorer) -> None:
    address = await scorer.start()
    async with running(ngram_config(address)) as (_, stub):
        stream = await scorer.attached()
        stream.send(opens=[open_(1, PERIOD)])
        block = await stream.next_block()
        assert (block.session, block.epoch, block.base_len) == (1, 1, 8)
        assert list(block.token_ids) == [7, 5, 6, 7]
        assert list(block.parents) == []  # a chain
        stream.send(commits=[commit(1, 8, [7, 5, 9], k=2)])
        block = await stream.next_block()
        assert (block.base_len, list(block.token_ids)) == (11, [])  # nothing to guess
        stream.send(commits=[commit(1, 11, [7, 5], k=3)])
        block = await stream.next_block()
        assert (block.base_len, list(block.token_ids)) == (13, [9, 7, 5])
        stream.send(closes=[close(1)])

        async def forgotten() -> bool:
            info = await stub.GetProposerInfo(proposer_pb2.GetProposerInfoRequest())
            return info.sessions == 0 and info.scorers[0].sessions == 0

        await eventually(forgotten)


async def test_proposer_stream_with_repeated_commits_is_unharmed(scorer: DraftScorer) -> None:
    address = await scorer.start()
    async with running(ngram_config(address)):
        stream = await scorer.attached()
        stream.send(opens=[open_(1, PERIOD)])
        await stream.next_block()
        for base_len, tokens in ((8, [7, 5]), (8, [7, 5]), (9, [5, 6]), (6, [5, 6])):
            stream.send(commits=[commit(1, base_len, tokens)])
        while (block := await stream.next_block()).base_len < 11:
            pass
        assert list(block.token_ids) == [7, 5, 6, 7]
        await stream.silence()  # what says nothing new needs no answer


async def test_proposer_stream_with_k_zero_follows_without_drafting(scorer: DraftScorer) -> None:
    address = await scorer.start()
    async with running(ngram_config(address)):
        stream = await scorer.attached()
        stream.send(opens=[open_(1, PERIOD, k=0)])
        stream.send(commits=[commit(1, 8, [7], k=0)])
        await stream.silence()
        stream.send(commits=[commit(1, 9, [5], k=1)])
        block = await stream.next_block()
        assert (block.base_len, list(block.token_ids)) == (10, [6])


def ahead_config(*scorers: str) -> ProposerConfig:
    return replace(ngram_config(*scorers), methods=(NgramConfig(max_branches=8),))


async def test_proposer_stream_with_branches_sends_a_draft_only_where_they_miss(
    scorer: DraftScorer,
) -> None:
    address = await scorer.start()
    async with running(ahead_config(address)):
        stream = await scorer.attached()
        assert stream.hello.runs_ahead
        assert stream.hello.device == device_id("cpu")
        # After "5 6" came 7 most recently, and 8 before.
        stream.send(opens=[open_(1, [5, 5, 6, 8, 5, 6, 7, 9, 5, 6], k=2)])
        draft, tree = await stream.next_block(), await stream.next_block()
        assert list(draft.token_ids) == [7, 9]
        assert (draft.base_len, tree.base_len) == (10, 10)
        assert list(tree.token_ids[:5]) == [7, 9, 5, 6, 7], "the draft, and what follows it"
        # All of the draft and the token after it come true: only new branches are sent.
        stream.send(commits=[commit(1, 10, [7, 9, 5], k=2)])
        tree = await stream.next_block()
        assert (tree.base_len, list(tree.token_ids[:2])) == (13, [6, 7])
        assert len(tree.token_ids) > 2
        await stream.silence()
        # A token that nothing foretold: a draft first, then branches.
        stream.send(commits=[commit(1, 13, [5], k=2)])
        draft = await stream.next_block()
        assert (draft.base_len, list(draft.token_ids)) == (14, [6, 8])


async def test_proposer_stream_with_several_methods_names_each_blocks_method(
    scorer: DraftScorer,
) -> None:
    address = await scorer.start()
    config = replace(
        ngram_config(address),
        methods=(
            DeterministicConfig(max_branches=0),
            SuffixConfig(max_branches=0),
            NgramConfig(max_branches=0, prompt_lookup_min=1),
        ),
    )
    async with running(config):
        stream = await scorer.attached()
        hello = stream.hello
        assert (hello.method, hello.max_draft_tokens) == ("deterministic", 128)
        assert list(hello.methods) == ["deterministic", "suffix", "ngram"]
        advised = open_(1, [1, 2], k=8)
        advised.advice.token_ids.extend([5, 6, 7, 8])
        advised.advice.edit = True
        advised.num_output_tokens = 0
        stream.send(opens=[advised])
        block = await stream.next_block()
        assert (block.method_index, list(block.token_ids)) == (0, [5, 6, 7, 8])
        ordered = open_(2, PERIOD, k=2)
        ordered.methods.extend(["ngram", "suffix"])
        stream.send(opens=[ordered])
        block = await stream.next_block()
        assert (block.method_index, list(block.token_ids)) == (2, [7, 5])
        stream.send(opens=[open_(3, PERIOD, k=2)])
        block = await stream.next_block()
        assert (block.method_index, list(block.token_ids)) == (1, [7, 5])
        # A second epoch has output in its prefix: that is where the advice is followed from.
        advised.epoch, advised.num_output_tokens = 2, 2
        advised.prefix.extend([5, 6])
        stream.send(opens=[advised])
        block = await stream.next_block()
        assert (block.epoch, block.base_len, list(block.token_ids)) == (2, 4, [7, 8])
        # What session 3 was answered is remembered, but only for its tenant.
        stream.send(commits=[commit(3, 8, [30, 31, 32, 33], k=0)], closes=[close(3)])
        other = open_(4, [30, 31])
        other.tenant = "other"
        stream.send(opens=[other, open_(5, [30, 31])])
        drafts = {block.session: list(block.token_ids) for block in await stream.next_blocks()}
        assert drafts == {4: [], 5: [32, 33]}


async def test_proposer_stream_with_a_block_limit_keeps_blocks_within_it(
    scorer: DraftScorer,
) -> None:
    scorer.max_block_tokens = 5
    address = await scorer.start()
    async with running(ahead_config(address)):
        stream = await scorer.attached()
        stream.send(opens=[open_(1, PERIOD, k=4)])
        assert len((await stream.next_block()).token_ids) == 4
        assert len((await stream.next_block()).token_ids) == 5


async def test_proposer_stream_with_a_gap_says_lost_and_starts_over(
    scorer: DraftScorer,
) -> None:
    address = await scorer.start()
    async with running(ngram_config(address)):
        stream = await scorer.attached()
        stream.send(opens=[open_(1, PERIOD)])
        await stream.next_block()
        stream.send(commits=[commit(1, 20, [7])])
        lost = await stream.next_lost()
        assert (lost.session, lost.epoch) == (1, 1)
        stream.send(opens=[open_(1, PERIOD, epoch=2)])
        assert (await stream.next_block()).epoch == 2


async def test_proposer_stream_with_messages_of_another_epoch_drops_them(
    scorer: DraftScorer,
) -> None:
    address = await scorer.start()
    async with running(ngram_config(address)):
        stream = await scorer.attached()
        stream.send(opens=[open_(1, PERIOD, epoch=3)])
        await stream.next_block()
        stream.send(
            opens=[open_(1, [1, 2], epoch=2), open_(1, [1, 2], epoch=3)],
            commits=[commit(1, 8, [7], epoch=2), commit(1, 8, [9], epoch=4)],
            closes=[close(1, epoch=2)],
        )
        await stream.silence()
        stream.send(commits=[commit(1, 8, [7, 5, 6, 7, 5], epoch=3, k=1)])
        assert list((await stream.next_block()).token_ids) == [6]


async def test_proposer_stream_with_close_and_open_in_one_batch_reopens(
    scorer: DraftScorer,
) -> None:
    """A merged batch holds the Close of the old epoch beside the Open of the new."""
    address = await scorer.start()
    async with running(ngram_config(address)):
        stream = await scorer.attached()
        stream.send(opens=[open_(1, PERIOD)])
        await stream.next_block()
        stream.send(
            opens=[open_(1, [*PERIOD, 7], epoch=2)],
            commits=[commit(1, 8, [9]), commit(1, 9, [5], epoch=2)],
            closes=[close(1)],
        )
        block = await stream.next_block()
        assert (block.epoch, block.base_len) == (2, 10)


async def test_proposer_stream_with_several_scorers_mixes_no_sessions(scorer: DraftScorer) -> None:
    other = DraftScorer()
    addresses = [await scorer.start(), await other.start()]
    try:
        async with running(ngram_config(*addresses)):
            first, second = await scorer.attached(), await other.attached()
            first.send(opens=[open_(1, PERIOD)])
            second.send(opens=[open_(1, [8, 9, 8, 9])])
            assert list((await first.next_block()).token_ids) == [7, 5, 6, 7]
            assert list((await second.next_block()).token_ids) == [8, 9, 8, 9]
            second.send(closes=[close(1)])
            first.send(commits=[commit(1, 8, [7, 5, 6, 7, 5], k=1)])
            assert list((await first.next_block()).token_ids) == [6]
    finally:
        await other.stop()


class SlowProposer(NgramProposer):
    """Holds a cycle up until told to go on."""

    def __init__(self) -> None:
        super().__init__(max_branches=0)
        self.asked: list[list[int]] = []
        self.loop = asyncio.get_running_loop()
        self.begun = asyncio.Semaphore(0)
        self.go = asyncio.Semaphore(0)

    def draft(self, sessions: object, pace: Pace = NO_PACE) -> DraftRound:
        assert isinstance(sessions, list)
        if sessions:
            self.asked.append(sessions)
            asyncio.run_coroutine_threadsafe(self._pass(), self.loop).result(10)
        return super().draft(sessions, pace)

    async def _pass(self) -> None:
        self.begun.release()
        await self.go.acquire()


async def test_proposer_stream_with_several_commits_drafts_for_the_newest(
    scorer: DraftScorer,
) -> None:
    address = await scorer.start()
    slow = SlowProposer()
    async with running(ngram_config(address), lambda _: (slow, "")) as (_, stub):
        stream = await scorer.attached()
        stream.send(opens=[open_(1, PERIOD)])
        await slow.begun.acquire()
        # While the first draft is being made, much happens.
        stream.send(commits=[commit(1, 8, [7])])
        stream.send(commits=[commit(1, 9, [5])])
        stream.send(opens=[open_(2, PERIOD)], commits=[commit(1, 10, [6])])

        async def has_come() -> bool:
            info = await stub.GetProposerInfo(proposer_pb2.GetProposerInfoRequest())
            return bool(info.scorers[0].sessions == 2)

        await stream.written()
        if not scorer.data_connections:  # else the thread that drafts reads it
            await eventually(has_come)
        slow.go.release()
        assert (await stream.next_block()).base_len == 8
        await slow.begun.acquire()
        slow.go.release()
        blocks = await stream.next_blocks()  # one message for both
        assert [(b.session, b.base_len) for b in blocks] == [(1, 11), (2, 8)]
        await stream.silence()
    assert len(slow.asked) == 2


async def test_proposer_stream_after_the_scorer_died_is_dialled_anew(scorer: DraftScorer) -> None:
    address = await scorer.start()
    async with running(ngram_config(address)) as (_, stub):
        first = await scorer.attached()
        first.send(opens=[open_(1, PERIOD)])
        await first.next_block()
        await scorer.stop()

        async def gone() -> bool:
            info = await stub.GetProposerInfo(proposer_pb2.GetProposerInfoRequest())
            link = info.scorers[0]
            assert not link.refused
            return info.sessions == 0 and not link.connected and bool(link.last_error)

        await eventually(gone)
        await scorer.start(int(address.split(":")[1]))
        second = await scorer.attached()
        assert second.hello.proposer_id == first.hello.proposer_id
        assert second.hello.incarnation > first.hello.incarnation
        second.send(opens=[open_(1, PERIOD)])
        assert (await second.next_block()).epoch == 1


async def test_proposer_stream_after_the_scorer_hung_up_is_dialled_anew(
    scorer: DraftScorer,
) -> None:
    address = await scorer.start()
    async with running(ngram_config(address)):
        (await scorer.attached()).hang_up()
        await scorer.attached()


async def test_proposer_stream_when_refused_logs_and_retries_slowly(
    scorer: DraftScorer, caplog: pytest.LogCaptureFixture
) -> None:
    scorer.refusal = ProposerRefusedError("use another draft", reason="VOCAB_MISMATCH")
    address = await scorer.start()
    async with running(ngram_config(address)) as (_, stub):

        async def refused_twice() -> bool:
            return scorer.refused >= 2

        await eventually(refused_twice)
        info = await stub.GetProposerInfo(proposer_pb2.GetProposerInfoRequest())
        assert info.scorers[0].last_error == "use another draft"
        assert info.scorers[0].refused
        assert scorer.refused <= 3
        scorer.refusal = None
        await scorer.attached()
    refusals = [r for r in caplog.records if "refused this proposer" in r.message]
    assert len(refusals) == 1  # said once, not at every dial
    assert "use another draft (VOCAB_MISMATCH)" in refusals[0].message


async def test_proposer_stream_of_a_newer_version_is_refused(scorer: DraftScorer) -> None:
    scorer.version = 2
    async with running(ngram_config(await scorer.start())) as (_, stub):
        await (await scorer.attached()).ended.wait()

        async def said_why() -> bool:
            info = await stub.GetProposerInfo(proposer_pb2.GetProposerInfoRequest())
            return "newer than ours" in info.scorers[0].last_error

        await eventually(said_why)


async def test_proposer_goodbye_with_open_sessions_waits_for_the_closes(
    scorer: DraftScorer,
) -> None:
    address = await scorer.start()
    config = replace(ngram_config(address), deployment=Deployment(drain_grace_s=600))
    async with running(config) as (service, _):
        stream = await scorer.attached()
        stream.send(opens=[open_(1, PERIOD)])
        await stream.next_block()
        stopping = asyncio.create_task(service.stop())
        assert (await stream.next()).HasField("goodbye")
        await asyncio.sleep(0.1)
        assert not stream.ended.is_set()
        stream.send(closes=[close(1)])
        async with asyncio.timeout(30):
            await stream.ended.wait()
            await stopping


async def test_proposer_goodbye_without_closes_ends_in_time(scorer: DraftScorer) -> None:
    address = await scorer.start()
    async with running(ngram_config(address)) as (service, _):
        stream = await scorer.attached()
        stream.send(opens=[open_(1, PERIOD)])
        await stream.next_block()
        async with asyncio.timeout(30):
            await service.stop()


async def test_proposer_without_a_scorer_stops_when_asked() -> None:
    async with running(ngram_config("127.0.0.1:1")) as (service, _):
        async with asyncio.timeout(30):
            await service.stop()


async def test_proposer_with_evicted_sessions_reports_them_lost(scorer: DraftScorer) -> None:
    address = await scorer.start()
    clock = Clock()
    model = HashModel(num_pages=16)  # of 4 tokens: two sessions fit
    method = DraftModelProposer(model, name="hash", clock=clock)
    async with running(ngram_config(address), lambda _: (method, "abc")):
        stream = await scorer.attached()
        assert stream.hello.method == "draft_model"
        assert (stream.hello.vocab_size, stream.hello.tokenizer_hash) == (32, "abc")
        for session in (1, 2):
            stream.send(opens=[open_(session, [session] * 24, max_len=60)])
            assert (await stream.next_block()).base_len == 24
        clock.now = IDLE_S
        stream.send(opens=[open_(3, [3] * 24, max_len=60)])
        message = await stream.next()
        assert message.HasField("blocks")
        assert [block.session for block in message.blocks.blocks] == [3]
        lost = await stream.next_lost()
        assert (lost.session, lost.epoch) == (1, 1)


async def test_proposer_stream_with_evicted_session_closed_in_one_batch_goes_on(
    scorer: DraftScorer,
) -> None:
    address = await scorer.start()
    clock = Clock()
    method = NgramProposer(max_sessions=2, max_branches=0, clock=clock)
    async with running(ngram_config(address), lambda _: (method, "")):
        stream = await scorer.attached()
        for session in (1, 2):
            stream.send(opens=[open_(session, PERIOD)])
            await stream.next_block()
        clock.now = IDLE_S
        stream.send(opens=[open_(3, PERIOD)], commits=[commit(2, 8, [7])], closes=[close(1)])
        assert {block.session for block in await stream.next_blocks()} == {2, 3}


async def test_proposer_without_room_loses_newcomers(scorer: DraftScorer) -> None:
    address = await scorer.start()
    method = NgramProposer(max_sessions=2, max_branches=0)
    async with running(ngram_config(address), lambda _: (method, "")):
        stream = await scorer.attached()
        stream.send(opens=[open_(session, PERIOD) for session in (1, 2)])
        assert len(await stream.next_blocks()) == 2
        stream.send(opens=[open_(3, PERIOD)], commits=[commit(1, 8, [7])])
        assert [block.session for block in await stream.next_blocks()] == [1]
        lost = await stream.next_lost()
        assert (lost.session, lost.epoch) == (3, 1)
        stream.send(closes=[close(1)], commits=[commit(2, 8, [7])])
        assert (await stream.next_block()).session == 2
        stream.send(opens=[open_(3, PERIOD, epoch=2)])
        assert (await stream.next_block()).session == 3


async def test_proposer_with_long_prompts_alternates_them_with_drafts(scorer: DraftScorer) -> None:
    address = await scorer.start()
    async with running(
        ngram_config(address), hash_model_proposer(limits=ProposerLimits(prefill_budget=18))
    ):
        stream = await scorer.attached()
        stream.send(opens=[open_(1, [3] * 40, max_len=60), open_(2, [4], max_len=60)])
        assert [b.session for b in await stream.next_blocks()] == [2]
        block = await stream.next_block()
        assert (block.session, block.base_len, len(block.token_ids)) == (1, 40, 4)


async def test_proposer_when_drafting_fails_loses_sessions_and_not_the_process(
    scorer: DraftScorer,
) -> None:
    address = await scorer.start()
    model = HashModel()
    async with running(
        ngram_config(address), lambda _: (DraftModelProposer(model, name="hash"), "")
    ):
        stream = await scorer.attached()
        model.fail_next = True
        stream.send(opens=[open_(1, [1, 2, 3], max_len=60)])
        assert (await stream.next_lost()).session == 1
        stream.send(opens=[open_(1, [1, 2, 3], epoch=2, max_len=60)])
        assert (await stream.next_block()).epoch == 2


class BrokenProposer(NgramProposer):
    def draft(self, sessions: object, pace: Pace = NO_PACE) -> DraftRound:  # noqa: ARG002
        if sessions:
            raise RuntimeError("the device is gone")
        return DraftRound()


async def test_proposer_when_drafting_keeps_failing_ends_the_process(scorer: DraftScorer) -> None:
    address = await scorer.start()
    async with running(ngram_config(address), lambda _: (BrokenProposer(), "")) as (service, _):
        stream = await scorer.attached()
        for epoch in range(1, 4):
            stream.send(opens=[open_(1, [1, 2, 3], epoch=epoch)])
            assert (await stream.next_lost()).epoch == epoch
        async with asyncio.timeout(30):
            await service.wait_failed()


async def test_proposer_that_cannot_draft_any_more_waits_for_no_session(
    scorer: DraftScorer,
) -> None:
    address = await scorer.start()
    config = replace(
        ngram_config(address),
        link=LinkConfig(backoff_first_s=30),
        deployment=Deployment(drain_grace_s=60),
    )
    async with (
        asyncio.timeout(20),
        running(config, lambda _: (BrokenProposer(), "")) as (service, _),
    ):
        stream = await scorer.attached()
        for epoch in range(1, 4):
            stream.send(opens=[open_(1, [1, 2, 3], epoch=epoch)])
            assert (await stream.next_lost()).epoch == epoch
        await service.wait_failed()
        await stream.ended.wait()


class HangingProposer(NgramProposer):
    """Its drafts do not return before they are told to."""

    def __init__(self) -> None:
        super().__init__()
        self.back = threading.Event()

    def draft(self, sessions: Sequence[SessionKey], pace: Pace = NO_PACE) -> DraftRound:
        if sessions:
            assert self.back.wait(60)
        return super().draft(sessions, pace)


async def test_proposer_whose_draft_hangs_releases_its_sessions(
    scorer: DraftScorer, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr(watchdog, "PATIENCE_S", 0.1)
    address = await scorer.start()
    proposer = HangingProposer()
    config = replace(
        ngram_config(address),
        link=LinkConfig(backoff_first_s=30),
        deployment=Deployment(drain_grace_s=60),
    )
    async with asyncio.timeout(20), running(config, lambda _: (proposer, "")) as (service, _):
        stream = await scorer.attached()
        with pytest.raises(TimeoutError):  # nothing to draft for
            await asyncio.wait_for(service.wait_failed(), 0.5)
        stream.send(opens=[open_(1, PERIOD)])
        await service.wait_failed()
        await stream.ended.wait()
        assert not proposer.back.is_set()
        proposer.back.set()
    assert "the drafting thread hangs" in caplog.text


async def test_proposer_session_span_with_traceparent_joins_the_trace(scorer: DraftScorer) -> None:
    exporter = InMemorySpanExporter()
    address = await scorer.start()
    trace_id, span_id = "0af7651916cd43dd8448eb211c80319c", "b7ad6b7169203331"
    async with running(ngram_config(address), exporter=exporter):
        stream = await scorer.attached()
        stream.send(opens=[open_(1, PERIOD, traceparent=f"00-{trace_id}-{span_id}-01")])
        await stream.next_block()
        stream.send(opens=[open_(2, PERIOD, traceparent="not a traceparent")], closes=[close(1)])
        await stream.next_block()
    spans = {span.context.trace_id: span for span in exporter.get_finished_spans()}
    span = spans[int(trace_id, 16)]
    assert span.parent is not None
    assert span.parent.span_id == int(span_id, 16)
    assert span.attributes == {"outrider.method": "ngram", "outrider.rounds": 1}


async def test_proposer_start_with_failed_build_raises_its_error() -> None:
    def build(_: ProposerConfig) -> tuple[Proposer, str]:
        raise CapacityError("no memory")

    with pytest.raises(CapacityError, match="no memory"):
        async with running(ngram_config("127.0.0.1:1"), build):
            pass


async def test_proposer_start_with_slow_build_times_out() -> None:
    go_on = threading.Event()

    def build(_: ProposerConfig) -> tuple[Proposer, str]:
        go_on.wait(60)
        return NgramProposer(), ""

    config = replace(ngram_config("127.0.0.1:1"), start_timeout_s=0.1)
    try:
        with pytest.raises(DeadlineError, match=r"not ready within 0\.1 s"):
            async with running(config, build):
                pass
    finally:
        go_on.set()


def _metrics(service: ProposerService) -> str:
    return encode(service._telemetry.registry, "")[0].decode()


async def test_proposer_metrics_after_a_draft_count_it(scorer: DraftScorer) -> None:
    address = await scorer.start()
    async with running(ngram_config(address)) as (service, _):
        stream = await scorer.attached()
        stream.send(opens=[open_(1, PERIOD)])
        await stream.next_block()
        cycles = 'outrider:proposer_cycle_seconds_count{pool="default"} 1.0'
        await until(lambda: cycles in _metrics(service))  # counted once the block is on its way
        text = _metrics(service)
    assert 'outrider:proposer_draft_tokens_total{pool="default"} 4.0' in text
    assert 'outrider:proposer_links{pool="default"} 1.0' in text
    assert 'outrider:proposer_session_limit{pool="default"} 256.0' in text


# ProposerService


async def test_get_proposer_info_describes_the_proposer() -> None:
    async with running(ngram_config(), hash_model_proposer()) as (_, stub):
        info = await stub.GetProposerInfo(proposer_pb2.GetProposerInfoRequest())
        assert (info.method, info.model, info.vocab_size) == ("draft_model", "hash", 32)
        assert info.protocol_version == 1
        assert info.sessions == 0


# Malformed input


def random_batch(rng: random.Random) -> dict[str, list[object]]:
    def number(*usual: int) -> int:
        return rng.choice([*usual, 0, 1, 2**31, 2**32 - 1])

    def tokens(limit: int) -> list[int]:
        return [number(3, 4, 31, 32) for _ in range(rng.randrange(limit))]

    opens = [
        draft_pb2.Open(
            session=number(1, 2, 3),
            epoch=number(1, 2, 3),
            prefix=tokens(90),
            sampling=common_pb2.SamplingParams(
                temperature=rng.choice([0.0, 1.0, -3.0, float("nan"), float("inf")]),
                top_k=number(5),
                top_p=rng.choice([0.5, 1.0, 0.0, float("nan")]),
                min_p=rng.choice([0.0, 0.1, 1.0, 2.0]),
                seed=number(7),
            ),
            num_draft_tokens=number(4),
            max_len=number(60),
            traceparent=rng.choice(["", "00-bad", "\x00"]),
        )
        for _ in range(rng.randrange(3))
    ]
    commits = [
        draft_pb2.Commit(
            session=number(1, 2, 3),
            epoch=number(1, 2, 3),
            base_len=number(1, 2, 40),
            tokens=tokens(6),
            num_draft_tokens=number(4),
        )
        for _ in range(rng.randrange(5))
    ]
    closes = [
        draft_pb2.Close(session=number(1, 2, 3), epoch=number(1, 2, 3))
        for _ in range(rng.randrange(2))
    ]
    return {"opens": opens, "commits": commits, "closes": closes}  # type: ignore[dict-item]


async def drained(stream: Conversation) -> None:
    while not stream.received.empty():
        message = stream.received.get_nowait()
        for block in message.blocks.blocks:
            assert all(token < 32 for token in block.token_ids)
            assert len(block.token_ids) <= 16


@pytest.mark.parametrize("seed", range(5))
async def test_proposer_stream_with_malformed_batches_goes_on(
    scorer: DraftScorer, seed: int
) -> None:
    address = await scorer.start()
    model = HashModel()
    # Room for every number that a session may be given, and for one that behaves.
    proposer = DraftModelProposer(model, name="hash", limits=ProposerLimits(max_sessions=8))
    rng = random.Random(seed)
    async with running(ngram_config(address), lambda _: (proposer, "")) as (service, _):
        stream = await scorer.attached()
        sessions = itertools.count(100)
        for _ in range(60):
            stream.send(**random_batch(rng))  # type: ignore[arg-type]
            if rng.random() < 0.2:  # a well-behaved session is served all along
                session = next(sessions)
                stream.send(opens=[open_(session, [1, 2, 3], max_len=60)])
                while True:
                    message = await stream.next()
                    if any(b.session == session for b in message.blocks.blocks):
                        break
                stream.send(closes=[close(session)])
        await drained(stream)
        assert service._thread is not None
        assert not service._thread.ended.is_set()
    proposer.check_invariants()
    assert proposer.num_sessions == 0
