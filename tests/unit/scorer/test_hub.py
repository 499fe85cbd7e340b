"""Who drafts for whom: the hub's decisions, without RPC and engine."""

from __future__ import annotations

import asyncio
from collections import Counter
from collections.abc import Awaitable

import pytest

from outrider.draft_port import EarlyTokens, NewTokens
from outrider.draft_tree import DraftTree
from outrider.errors import (
    CapacityError,
    InternalError,
    InvalidRequestError,
    UnavailableError,
)
from outrider.features import FeatureRows
from outrider.params import NO_ADVICE, Advice, SpeculationParams
from outrider.rpc import codec
from outrider.rpc.channel import MAX_MESSAGE_BYTES
from outrider.types import (
    Commit,
    Failure,
    FinishReason,
    Grown,
    StepEvents,
    TokenKind,
)
from outrider.v1 import draft_pb2
from scorer_service.config import DraftLimits
from scorer_service.drafting.attached import AttachedProposer
from scorer_service.drafting.outbox import HELD_TOKENS
from scorer_service.drafting.registry import EXPLORE, ON_TRIAL
from scorer_service.mailbox import Mailbox
from scorer_service.sessions import Session
from scorer_service.token_columns import TokenColumns
from tests.support.services.hub import FINAL, TIMINGS, Bench, commit, sent
from tests.support.services.scorer import VOCAB
from tests.support.services.scripted_proposer import hello


@pytest.mark.parametrize(
    ("device", "proposers", "own"),
    [
        ("GPU-1", "GPU-2", True),
        ("GPU-1", "GPU-1", False),
        ("GPU-1", "", False),
        ("", "GPU-2", False),
    ],
)
async def test_attached_proposer_has_own_device_only_if_both_are_known(
    device: str, proposers: str, own: bool
) -> None:
    bench = Bench(device=device)
    bench.attach("a", device=proposers)
    assert bench.thread.own_device[bench.submit().id] is own


async def test_hub_with_events_of_one_step_sends_one_message() -> None:
    bench = Bench()
    proposer = bench.attach("a")
    sessions = [bench.submit() for _ in range(3)]
    batch = await sent(proposer)
    assert [o.session for o in batch.opens] == [s.id for s in sessions]
    assert all(o.num_draft_tokens == 4 and o.max_len == 3 + 256 for o in batch.opens)
    bench.step(commit(sessions[0], 5), commit(sessions[1], 6, 7), commit(sessions[2], 8))
    batch = await sent(proposer)
    assert [(c.base_len, list(c.tokens)) for c in batch.commits] == [
        (3, [5]),
        (3, [6, 7]),
        (3, [8]),
    ]
    assert all(c.num_draft_tokens == 3 for c in batch.commits)
    bench.step(commit(sessions[0], 9, finish=FinishReason.LENGTH), commit(sessions[1], 1))
    batch = await sent(proposer)
    assert [c.session for c in batch.closes] == [sessions[0].id]
    assert [c.session for c in batch.commits] == [sessions[1].id]


async def test_hub_with_early_tokens_tells_the_proposer_once_and_the_client_later() -> None:
    bench = Bench()
    proposer = bench.attach("a")
    drafted, plain, moved = sessions = [bench.submit() for _ in range(3)]
    await sent(proposer)
    rows = [NewTokens(drafted.id, 3, (5, 6)), NewTokens(plain.id, 3, (7,))]
    stale = [NewTokens(moved.id, 2, (3,)), NewTokens(99, 3, (8,))]
    bench.hub.on_early(EarlyTokens((*rows, *stale), 0.002))
    batch = await sent(proposer)
    assert batch.step_us == 2000
    assert [(c.session, c.base_len, list(c.tokens)) for c in batch.commits] == [
        (drafted.id, 3, [5, 6]),
        (plain.id, 3, [7]),
    ]
    assert not any(session.mailbox.holds_commits for session in sessions)

    grown = Grown((plain.id,), (3,), (7,), (3,))
    told = (commit(drafted, 5, 6)._replace(base_len=3), commit(moved, 9))
    bench.hub.on_events(StepEvents(told, (), TIMINGS, grown=grown))
    assert [c.session for c in (await sent(proposer)).commits] == [moved.id]
    assert [session.committed[3:] for session in sessions] == [[5, 6], [7], [9]]
    assert [each.token_ids for each in await drafted.mailbox.take()] == [(5, 6)]
    bench.step(commit(drafted, 1, finish=FinishReason.LENGTH), commit(plain, 2))
    batch = await sent(proposer)
    assert [(c.session, c.base_len, list(c.tokens)) for c in batch.commits] == [(plain.id, 4, [2])]


async def test_proposer_that_was_not_asked_hears_of_many_tokens_with_the_event_that_asks() -> None:
    bench = Bench()
    proposer = bench.attach("a")
    session = bench.submit()
    bench.step(commit(session, 5, k=0))
    await sent(proposer)
    bench.step(commit(session, *range(HELD_TOKENS - 1), k=0))
    length = len(session.committed)
    told = commit(session, 7, k=4)
    bench.hub.on_early(EarlyTokens((NewTokens(session.id, length, (7,)),), 0.002))
    bench.step(told)
    assert session.committed[length:] == [7]
    assert [c.num_draft_tokens for c in (await sent(proposer)).commits][-1] == 4


async def test_hub_with_many_clients_tells_the_proposer_first() -> None:
    bench = Bench()
    proposer = bench.attach("a")
    sessions = [bench.submit() for _ in range(20)]
    await sent(proposer)
    order: list[str] = []

    async def noted(name: str, taking: Awaitable[object]) -> object:
        taken = await taking
        order.append(name)
        return taken

    clients = [asyncio.create_task(noted("client", s.mailbox.take())) for s in sessions]
    told = asyncio.create_task(noted("proposer", sent(proposer)))
    await asyncio.sleep(0)
    bench.step(*[commit(session, 5) for session in sessions])
    async with asyncio.timeout(5):
        received = await asyncio.gather(*clients)
        batch = await told
    assert order == ["proposer", *["client"] * 20]
    assert len(batch.commits) == 20, "all at once: they are drafted for together"
    assert [[each.token_ids for each in got] for got in received] == [[(5,)]] * 20


async def test_hub_with_several_steps_delivers_each_before_the_next() -> None:
    bench = Bench()
    *others, last = sessions = [bench.submit() for _ in range(60)]
    first = asyncio.create_task(last.mailbox.take())
    await asyncio.sleep(0)
    bench.step(*[commit(session, 5) for session in sessions])
    bench.step(
        *[commit(session, 6) for session in others],
        failures=(Failure(last.id, InternalError("broken")),),
    )
    async with asyncio.timeout(5):
        for session in others:
            tokens: list[int] = []
            while len(tokens) < 2:
                tokens += [each.token_ids[0] for each in await session.mailbox.take()]
            assert tokens == [5, 6]
        assert [each.token_ids for each in await first] == [(5,)]
        with pytest.raises(InternalError, match="broken"):
            await last.mailbox.take()


async def test_check_hello_with_too_many_methods_refuses_at_once() -> None:
    with pytest.raises(InvalidRequestError, match="at most"):
        Bench().attach("a", method="ngram", methods=["ngram"] * 100)


async def test_block_receiver_with_too_many_blocks_counts_one_bad_message() -> None:
    bench = Bench()
    proposer = bench.attach("a")
    session = bench.submit()
    block = draft_pb2.Block(session=session.id, epoch=1, base_len=3, token_ids=[1])
    bench.hub.blocks.receive(proposer, [block] * (2**14 + 1))
    assert (proposer.bad_blocks, bench.thread.blocks) == (1, [])
    bench.hub.blocks.receive(proposer, [block])
    assert len(bench.thread.blocks) == 1


async def test_block_receiver_with_many_blocks_of_a_session_checks_the_newest() -> None:
    bench = Bench()
    proposer = bench.attach("a")
    sessions = [bench.submit() for _ in range(2)]
    blocks = [
        draft_pb2.Block(session=session.id, epoch=1, base_len=3, token_ids=[token])
        for token in range(1, VOCAB)
        for session in sessions
    ]
    bench.hub.blocks.receive(proposer, blocks)
    seen = [(session_id, tree.token_ids[0]) for session_id, tree, _ in bench.thread.blocks]
    assert seen == [
        (session.id, token) for token in range(VOCAB - 4, VOCAB) for session in sessions
    ]
    assert proposer.bad_blocks == 0


async def test_block_receiver_drops_each_bad_block_alone() -> None:
    bench = Bench(DraftLimits(max_bad_blocks=1000))
    proposer = bench.attach("a")
    session = bench.submit()
    good = {"session": session.id, "epoch": 1, "base_len": 3, "token_ids": [1, 2, 3]}
    shape = {"parents": [-1, 0, -1], "confidences": b"abc"}
    bad: list[dict[str, object]] = [
        {"session": 99},
        {"base_len": 4},
        {"method_index": 1},
        {"token_ids": [1, VOCAB, 3]},
        {"token_ids": [1] * 513},
        {"confidences": b"ab"},
        {"parents": [-1, 0]},
        {"parents": [-1, 1, -1]},
        {"parents": [-1, -2, -1]},  # -1 and -2 have one hash
        {"parents": [0, 0, -1]},
    ]
    for _ in range(2):  # a shape is known by then
        for fields in bad:
            blocks = [{}, {**shape, **fields}, {"epoch": 2}, shape]
            bench.hub.blocks.receive(proposer, [draft_pb2.Block(**good | each) for each in blocks])  # type: ignore[arg-type]
    assert proposer.bad_blocks == 2 * len(bad)
    trees = [tree for _, tree, _ in bench.thread.blocks]
    chain, tree = DraftTree.chain(3, (1, 2, 3)), DraftTree(3, (1, 2, 3), (-1, 0, -1), (), b"abc")
    assert trees == 2 * len(bad) * [chain, tree]


async def test_block_receiver_with_impossible_distributions_does_not_convert_them(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    bench = Bench()
    proposer = bench.attach("a")
    session = bench.submit()
    block = draft_pb2.Block(session=session.id, epoch=1, base_len=3, token_ids=[1])
    block.draft_probs.add(token_ids=[1] * 257, probs=bytes(4 * 257))
    with monkeypatch.context() as patch:
        patch.setattr(codec, "DraftProbs", None)
        bench.hub.blocks.receive(proposer, [block])
    del block.draft_probs[:]
    block.draft_probs.extend([draft_pb2.DraftProbs()] * 513)
    with monkeypatch.context() as patch:
        patch.setattr(codec, "draft_probs_from_proto", None)
        bench.hub.blocks.receive(proposer, [block])
    assert (proposer.bad_blocks, bench.thread.blocks) == (2, [])


async def test_hub_with_features_sends_them_with_their_commits() -> None:
    bench = Bench()
    asked = draft_pb2.FeatureSpec(final_norm=True, hidden_size=2)
    reader = bench.attach("reader", method="eagle", features=asked)
    session = bench.submit()
    order = bench.thread.orders[session.id]
    assert order is not None
    assert (order.epoch, order.spec, order.window) == (1, FINAL, reader.window)
    bench.step(
        commit(session, 5),
        features=(FeatureRows(session.id, order, 0, bytes(8)), FeatureRows(99, order, 0, b"gone")),
    )
    assert bench.thread.features.given_back == [(reader.window, 4)]  # of a session that is over
    batch = await sent(reader)
    [features] = batch.features
    assert (features.session, features.epoch, features.start) == (session.id, 1, 0)
    assert features.rows == bytes(8)
    assert len(batch.opens) == len(batch.commits) == 1
    bench.hub.registry.on_taken(reader.outbox)
    assert bench.thread.features.given_back[1:] == [(reader.window, 8)]
    bench.hub.registry.reassign(session)
    bench.step(features=(FeatureRows(session.id, order, 2, b"late"),))
    assert bench.thread.features.given_back[2:] == [(reader.window, 4)]  # of the epoch before
    assert not (await sent(reader)).features
    plain = bench.attach("plain")
    reader.draining = True
    bench.hub.registry.reassign(session)
    assert session.proposer is plain
    assert bench.thread.orders[session.id] is None


async def nothing_to_send(proposer: AttachedProposer) -> bool:
    try:
        async with asyncio.timeout(0):
            await proposer.outbox.take()
    except TimeoutError:
        return True
    return False


def commits_in(batch: draft_pb2.SessionBatch) -> list[tuple[int, list[int], int]]:
    return [(c.base_len, list(c.tokens), c.num_draft_tokens) for c in batch.commits]


async def test_outbox_when_no_drafts_are_wanted_wakes_no_proposer() -> None:
    bench = Bench()
    proposer = bench.attach("a")
    session = bench.submit()
    bench.step(commit(session, 4, k=0))
    assert commits_in(await sent(proposer)) == [(3, [4], 0)], "that it may rest is said at once"
    for token in range(HELD_TOKENS - 1):
        bench.step(commit(session, token, k=0))
    assert await nothing_to_send(proposer)
    bench.step(commit(session, 7, k=0))
    assert commits_in(await sent(proposer)) == [(4, [*range(HELD_TOKENS - 1), 7], 0)]
    bench.step(commit(session, 8, k=0))
    assert await nothing_to_send(proposer)
    bench.step(commit(session, 9, 10, k=2))
    base_len = len(session.committed) - 3
    assert commits_in(await sent(proposer)) == [(base_len, [8, 9, 10], 2)], "nothing is missing"
    bench.step(commit(session, 11, k=2))
    assert commits_in(await sent(proposer)) == [(base_len + 3, [11], 2)]


async def test_outbox_with_delayed_commits_sends_them_before_close() -> None:
    bench = Bench()
    proposer = bench.attach("a")
    session = bench.submit()
    bench.step(commit(session, 4, k=0))
    await sent(proposer)
    bench.step(commit(session, 5, k=0))
    bench.step(commit(session, 6, finish=FinishReason.LENGTH, k=0))
    batch = await sent(proposer)
    assert commits_in(batch) == [(4, [5, 6], 0)]
    assert [c.session for c in batch.closes] == [session.id]


async def test_registry_with_moved_session_opens_it_with_all_delayed_commits() -> None:
    bench = Bench()
    first, second = bench.attach("a"), bench.attach("b")
    session = bench.submit()
    assert session.proposer is first
    for token in (4, 5):
        bench.step(commit(session, token, k=0))
    bench.hub.registry.on_goodbye(first)
    assert session.proposer is second
    (opened,) = (await sent(second)).opens
    assert list(opened.prefix) == [1, 2, 3, 4, 5]
    bench.step(commit(session, 6, k=1))
    assert commits_in(await sent(second)) == [(5, [6], 1)]


async def test_registry_while_nothing_is_drafted_requests_no_first_draft() -> None:
    bench = Bench()
    proposer = bench.attach("a")
    bench.thread.drafting = False
    session = bench.submit()
    (opened,) = (await sent(proposer)).opens
    assert opened.num_draft_tokens == 0
    assert bench.thread.set[session.id] == ("a", 4)
    assert not bench.thread.asked[session.id], "or its row would wait"
    bench.step(commit(session, 4, k=0))
    assert await nothing_to_send(proposer)
    bench.step(commit(session, 5, k=3))
    assert commits_in(await sent(proposer)) == [(3, [4, 5], 3)]


async def test_registry_with_more_sessions_than_room_shares_load_and_queues_the_rest() -> None:
    bench = Bench()
    a, b = bench.attach("a", max_sessions=2), bench.attach("b", max_sessions=1)
    sessions = [bench.submit() for _ in range(4)]
    assert [s.proposer.id if s.proposer else None for s in sessions] == ["a", "b", "a", None]
    assert sessions[3].id not in bench.thread.set, "never waits"
    await bench.sent(b)
    bench.step(commit(sessions[1], 1, finish=FinishReason.STOP))
    assert sessions[3].proposer is None, "in a message, opens come first"
    assert [each.session for each in (await bench.sent(b)).batch.closes] == [sessions[1].id]
    assert sessions[3].proposer is b
    assert bench.thread.set[sessions[3].id] == ("b", 4)
    assert a.load == b.load == 1.0


async def test_registry_when_proposer_returns_prefers_running_sessions() -> None:
    bench = Bench()
    proposer = bench.attach("a", max_sessions=2)
    running = [bench.submit() for _ in range(2)]
    waiting = [bench.submit() for _ in range(2)]
    bench.hub.registry.detach(proposer)
    again = bench.attach("a", max_sessions=2)
    assert [*again.sessions.values()] == running
    bench.attach("b")
    assert all(session.proposer is not None for session in waiting)


async def test_registry_with_self_limiting_methods_asks_for_all_they_can_draft() -> None:
    bench = Bench()
    bench.attach("a", method="deterministic", max_draft_tokens=10_000)
    bench.attach("b", method="suffix", max_draft_tokens=24)
    bench.attach("c", method="ngram", max_draft_tokens=16)
    advised = Advice(token_ids=(1, 2))
    for speculation, drafting in (
        (SpeculationParams(), ("b", 24)),
        (SpeculationParams(advice=advised), ("a", 128)),
        (SpeculationParams(advice=advised, num_speculative_tokens=7), ("a", 7)),
        (SpeculationParams(methods=("ngram",)), ("c", 4)),
    ):
        assert bench.thread.set[bench.submit(speculation=speculation).id] == drafting


async def test_registry_with_methods_of_a_request_follows_their_order() -> None:
    bench = Bench()
    bench.attach("advice", method="deterministic")
    bench.attach("model")
    bench.attach("lookup", method="ngram")
    both = ["suffix", "draft_model"]
    bench.attach("both", method="suffix", methods=both)
    advised = Advice(token_ids=(1, 2))

    def chosen(*methods: str, advice: Advice = NO_ADVICE) -> str | None:
        session = bench.submit(speculation=SpeculationParams(methods=methods, advice=advice))
        return session.proposer.id if session.proposer else None

    assert chosen() == "both", "suffix comes before draft_model"
    assert chosen(advice=advised) == "advice"
    assert chosen("ngram", "suffix") == "lookup"
    assert chosen("draft_model") in ("model", "both")
    assert chosen("draft_model", "suffix") == "both", "it has the second one as well"
    assert chosen("ngram", advice=advised) == "lookup"
    assert chosen("deterministic") is None, "there is nothing to copy from"
    assert chosen("deterministic", "ngram") == "lookup"


@pytest.mark.parametrize(
    ("fields", "param"),
    [
        ({"pool": "x" * 1025}, "pool"),
        ({"model": "x" * 1025}, "model"),
        ({"proposer_id": "x" * 1025}, "proposer_id"),
        ({"methods": ["draft_model", "draft_model"]}, "methods"),
    ],
)
async def test_check_hello_with_long_names_refuses(fields: dict[str, object], param: str) -> None:
    bench = Bench()
    with pytest.raises(InvalidRequestError) as caught:
        bench.hub.registry.attach(hello(**fields))
    assert caught.value.param == param
    assert bench.hub.registry.proposers == ()


async def test_block_receiver_with_method_index_takes_only_known_methods() -> None:
    bench = Bench()
    proposer = bench.attach("a", method="suffix", methods=["suffix", "draft_model"])
    session = bench.submit()
    for index in (1, 2):
        block = draft_pb2.Block(session=session.id, epoch=1, base_len=3, token_ids=[1])
        block.method_index = index
        bench.hub.blocks.receive(proposer, [block])
    assert bench.thread.methods == ["draft_model"]
    assert proposer.bad_blocks == 1


async def test_registry_with_limits_of_request_and_proposer_applies_both() -> None:
    bench = Bench()
    bench.attach("a", max_draft_tokens=3)
    assert bench.thread.set[bench.submit().id] == ("a", 3)
    two = bench.submit(speculation=SpeculationParams(num_speculative_tokens=2))
    assert bench.thread.set[two.id] == ("a", 2)
    for off in (
        SpeculationParams(enabled=False),
        SpeculationParams(num_speculative_tokens=0),
        SpeculationParams(methods=("ngram",)),
    ):
        assert bench.submit(speculation=off).id not in bench.thread.set


async def test_hub_without_draft_tokens_gives_no_session_to_a_proposer() -> None:
    bench = Bench(k=0)
    bench.attach("a")
    asked = bench.submit(speculation=SpeculationParams(num_speculative_tokens=2))
    assert asked.proposer is None
    assert bench.thread.set == {}


async def test_hub_when_session_outgrows_the_proposers_context_reassigns_it() -> None:
    bench = Bench()
    bench.attach("short", max_model_len=5)
    session = bench.submit((1, 2, 3))
    assert session.proposer is not None
    bench.step(commit(session, 4, 5))
    assert session.proposer is None
    assert bench.thread.set[session.id] == (None, 0)
    bench.attach("long")
    assert bench.thread.set[session.id] == ("long", 4)


async def test_registry_with_proposer_that_does_not_read_detaches_it() -> None:
    bench = Bench(DraftLimits(max_backlog_tokens=10))
    proposer = bench.attach("a")
    session = bench.submit()
    for token in range(10):
        bench.step(commit(session, token))
    assert isinstance(proposer.detached.result(), CapacityError)
    assert bench.thread.set[session.id] == (None, 0)
    assert session.committed == [1, 2, 3, *range(10)]
    assert bench.hub.registry.proposers == ()


async def test_registry_when_sessions_exceed_a_message_opens_them_with_the_next() -> None:
    bench = Bench()
    large = Advice(token_ids=(2**20,) * 2**18)  # 3 bytes each
    sessions = [bench.submit(speculation=SpeculationParams(advice=large)) for _ in range(24)]
    proposer = bench.attach("a")
    opened, total = [], 0
    while len(opened) < len(sessions):
        assert not proposer.outbox.overflowed, "it reads"
        batch = await sent(proposer)
        assert proposer.outbox.made_room
        assert batch.ByteSize() < MAX_MESSAGE_BYTES
        total += batch.ByteSize()
        opened += [o.session for o in batch.opens]
        bench.hub.registry.assign_undrafted()
    assert total > MAX_MESSAGE_BYTES
    assert opened == [s.id for s in sessions]


async def test_registry_when_proposer_is_behind_lets_a_session_wait() -> None:
    bench = Bench()
    proposer = bench.attach("a", max_model_len=2**20)
    first = bench.submit()
    bench.step(commit(first, *[1] * 2**18))
    second = bench.submit()
    assert second.proposer is None
    assert [o.session for o in (await sent(proposer)).opens] == [first.id]
    assert proposer.outbox.made_room
    bench.hub.registry.assign_undrafted()
    assert second.proposer is proposer
    await sent(proposer)
    assert not proposer.outbox.made_room


async def test_outbox_with_advice_counts_it_as_backlog() -> None:
    bench = Bench(DraftLimits(max_backlog_tokens=100))
    proposer = bench.attach("a")
    bench.submit(speculation=SpeculationParams(advice=Advice((1,) * 60, references=((2,) * 60,))))
    bench.step()
    assert isinstance(proposer.detached.result(), CapacityError)


def sessions_given(bench: Bench, tokens: dict[str, int], num_sessions: int) -> Counter[str]:
    """By proposer, eight at a time for 16 rounds each; `tokens` are committed in each of them."""
    given: Counter[str] = Counter()
    running: list[Session] = []
    for _ in range(num_sessions):
        session = bench.submit()
        assert session.proposer is not None
        given[session.proposer.id] += 1
        session.drafted = True
        running.append(session)
        if len(running) == 8:
            for _ in range(16):
                of = {s.id: tokens[s.proposer.id] for s in running if s.proposer}
                bench.step(*[commit(s, *[5] * of[s.id]) for s in running])
            bench.step(commit(running.pop(0), 5, finish=FinishReason.LENGTH))
    return given


async def test_registry_with_rubbish_beside_good_drafts_gives_it_few_sessions() -> None:
    """Those of unknown worth, then by worth."""
    bench = Bench()
    good, rubbish = [bench.attach(each, max_sessions=512) for each in ("good", "rubbish")]
    given = sessions_given(bench, {good.id: 3, rubbish.id: 1}, 120)
    assert given[rubbish.id] == 4 + 1, "half of the first eight, and one in 64 of all others"


@pytest.mark.parametrize(("first", "second"), [(1, 5), (2, 5), (5, 1), (5, 2)])
async def test_registry_with_methods_of_unlike_worth_prefers_the_better(
    first: int, second: int
) -> None:
    """Whatever their usual order, also where the first method's drafts never come true."""
    bench = Bench()
    copying = bench.attach("copying", method="suffix", max_sessions=512)
    model = bench.attach("model", method="draft_model", max_sessions=512)
    given = sessions_given(bench, {copying.id: first, model.id: second}, 200)
    worse = copying if first < second else model
    tried = 8 + ON_TRIAL if worse is copying else 2 * ON_TRIAL
    assert 1 <= given[worse.id] <= tried + 200 // EXPLORE


async def test_registry_tries_each_worse_proposer_in_turn() -> None:
    bench = Bench()
    tokens = {"best": 2, "copies": 1, "head": 1}
    for name, method in (("best", "draft_model"), ("copies", "ngram"), ("head", "medusa")):
        bench.attach(name, method=method, max_sessions=512)
    sessions_given(bench, tokens, EXPLORE - 1)
    given = sessions_given(bench, tokens, 4 * EXPLORE)
    assert given == {"best": 4 * EXPLORE - 4, "copies": 2, "head": 2}


async def test_registry_with_proposers_as_good_shares_load_among_them() -> None:
    bench = Bench()
    proposers = [bench.attach("a"), bench.attach("b")]
    for session in [bench.submit() for _ in range(8)]:
        session.drafted = True
        for _ in range(40):
            bench.step(commit(session, 5, 6))
    for _ in range(8):
        bench.submit()
    assert [len(each.sessions) for each in proposers] == [8, 8]


async def test_registry_when_proposer_misses_deadlines_replaces_it() -> None:
    bench = Bench()
    slow = bench.attach("slow")
    session = bench.submit()
    bench.step(set_aside=(session.id,))
    assert session.proposer is slow, "better than none"
    quick = bench.attach("quick", method="ngram")
    bench.step(set_aside=(session.id,))
    assert session.proposer is quick
    assert bench.submit().proposer is quick
    assert session.epoch == 2


async def test_registry_sets_a_good_proposer_aside_only_for_others_that_are_not_worse() -> None:
    """A stall of good drafts, which counts in their worth, gave rubbish all sessions for 2 s."""
    bench = Bench()
    good, rubbish = [bench.attach(each, max_sessions=512) for each in ("good", "rubbish")]
    sessions_given(bench, {good.id: 3, rubbish.id: 1}, 20)
    session = bench.submit()
    assert session.proposer is good
    bench.step(set_aside=(session.id,))
    assert session.proposer is good
    assert bench.submit().proposer is good
    unknown = bench.attach("unknown")
    assert bench.submit().proposer is unknown


async def test_registry_keeps_a_session_of_a_full_proposer_from_one_that_is_worse() -> None:
    """A proposer without a place for another session has one for those that it has."""
    bench = Bench()
    good, rubbish = bench.attach("good", max_sessions=30), bench.attach("rubbish", max_sessions=512)
    sessions_given(bench, {good.id: 3, rubbish.id: 1}, 20)
    while good.has_room:
        session = bench.submit()
    assert session.proposer is good
    bench.step(set_aside=(session.id,))
    assert session.proposer is good
    assert bench.submit().proposer is rubbish


async def test_registry_leaves_a_proposer_that_hangs_for_one_that_was_worse() -> None:
    """Though it has sent no block for its new sessions, by which they would count."""
    bench = Bench()
    good, fair = [bench.attach(each, max_sessions=512) for each in ("good", "fair")]
    sessions_given(bench, {good.id: 4, fair.id: 2}, 20)
    for _ in range(20):
        session = bench.submit()
        if session.proposer is fair:
            break
        bench.step(set_aside=(session.id,))
        for _ in range(64):
            bench.step(commit(session, 5))
        bench.step(commit(session, 5, finish=FinishReason.LENGTH))
    else:
        pytest.fail("all sessions went to the one that hangs")


async def test_registry_with_many_pools_counts_a_bounded_number() -> None:
    bench = Bench()
    for i in range(300):
        bench.attach("a", pool=f"pool-{i % 2}")  # it dials anew
    bench.attach("b", pool="pool-1")
    bench.attach("c", pool="pool-1", method="ngram")

    def counts() -> dict[tuple[str, str], float]:
        (family,) = bench.metrics.proposers.collect()
        return {
            (sample.labels["pool"], sample.labels["method"]): sample.value
            for sample in family.samples
        }

    drafts, copies = ("pool-1", "draft_model"), ("pool-1", "ngram")
    assert counts() == {("pool-0", "draft_model"): 0, drafts: 2, copies: 1}
    for i in range(1000):
        bench.attach("c", pool=f"name-{i}")
    assert len(counts()) == 256
    assert (counts()[drafts], counts()[copies]) == (2, 0)


async def test_registry_when_all_miss_deadlines_leaves_sessions_in_place() -> None:
    bench = Bench()
    bench.attach("slow")
    bench.attach("slow, too")
    session = bench.submit()
    bench.step(set_aside=(session.id,))
    proposer, epoch = session.proposer, session.epoch
    assert proposer is not None
    assert proposer.id == "slow, too"
    for _ in range(3):
        bench.step(set_aside=(session.id,))
    assert session.proposer is proposer
    assert session.epoch == epoch, "it keeps what it knows"


async def test_hub_when_engine_refuses_a_submission_keeps_nothing() -> None:
    bench = Bench()
    proposer = bench.attach("a")
    bench.thread.refuse = CapacityError("full")
    with pytest.raises(CapacityError):
        bench.submit()
    assert not proposer.sessions
    assert await bench.hub.wait_idle(0.1)


async def test_hub_after_failure_and_abort_ends_the_session_once() -> None:
    bench = Bench()
    proposer = bench.attach("a")
    failed, aborted = bench.submit(), bench.submit()
    bench.hub.on_events(StepEvents((), (Failure(failed.id, InternalError("x")),), None))
    with pytest.raises(InternalError):
        await failed.mailbox.take()
    bench.hub.abort(failed)
    assert bench.thread.aborted == []
    bench.hub.abort(aborted, UnavailableError("drain"))
    bench.hub.abort(aborted)
    assert bench.thread.aborted == [aborted.id]
    with pytest.raises(UnavailableError):
        await aborted.mailbox.take()
    assert not proposer.sessions
    bench.step(commit(failed, 1), commit(aborted, 1))  # too late: nobody listens


async def test_hub_when_steps_fail_in_a_row_reports_failure() -> None:
    bench = Bench()
    for i in range(8):
        assert not bench.hub.failed.is_set()
        session = bench.submit()
        bench.hub.on_events(StepEvents((), (Failure(session.id, InternalError("x")),), None))
        if i == 3:
            bench.step()  # a good one in between starts the count anew
            for _ in range(4):
                again = bench.submit()
                bench.hub.on_events(StepEvents((), (Failure(again.id, InternalError("x")),), None))
    assert bench.hub.failed.is_set()


async def test_hub_when_engine_breaks_down_reports_failure_at_once() -> None:
    bench = Bench()
    bench.thread.running = False
    bench.hub.on_events(StepEvents((), (), None))
    assert bench.hub.failed.is_set()


def put(mailbox: Mailbox, commit: Commit) -> None:
    if mailbox.put(commit):
        mailbox.wake()


async def test_hub_passes_single_tokens_on_as_it_does_commits() -> None:
    """To a stream that takes them so, to another's mailbox, and to a session's proposer."""
    bench = Bench()
    straight, boxed, drafted = sessions = [bench.submit() for _ in range(3)]
    columns, taken = TokenColumns(lambda: None), []
    columns.join(straight.id, 70)
    bench.hub.columns.append(columns)
    ids = tuple([session.id for session in sessions])
    for base_len in (3, 4):
        grown = Grown((*ids, 99), (base_len,) * 4, (5, 6, 7, 8), (2,) * 4)
        bench.hub.on_events(StepEvents((), (), TIMINGS, grown=grown))
        taken.append(columns.take())
        for session, token in ((boxed, 6), (drafted, 7)):
            [got] = await session.mailbox.take()
            assert got == Commit(session.id, base_len, (token,), (TokenKind.PLAIN,), 2)
        if base_len == 3:
            proposer = bench.attach("a")
            await sent(proposer)
    assert taken == [([70], [5])] * 2
    assert not straight.mailbox.holds_commits
    assert [session.committed[3:] for session in sessions] == [[5] * 2, [6] * 2, [7] * 2]
    told = {c.session: c for c in (await sent(proposer)).commits}
    assert sorted(told) == sorted(ids)
    assert (told[drafted.id].base_len, list(told[drafted.id].tokens)) == (4, [7])
    assert told[drafted.id].num_draft_tokens == 2


async def test_mailbox_with_error_gives_commits_first() -> None:
    bench = Bench()
    session, mailbox = bench.submit(), Mailbox()
    first, second = commit(session, 1), commit(session, 2)
    put(mailbox, first)
    put(mailbox, second)
    mailbox.fail(UnavailableError("drain"))
    assert await mailbox.take() == [first, second]
    for _ in range(2):
        with pytest.raises(UnavailableError):
            await mailbox.take()


async def taken(mailbox: Mailbox) -> list[Commit] | None:
    """What it gives out without another commit."""
    try:
        async with asyncio.timeout(0.01):
            return await mailbox.take()
    except TimeoutError:
        return None


async def test_mailbox_with_interval_delays_all_but_the_first_and_last_tokens() -> None:
    bench = Bench()
    session, mailbox = bench.submit(), Mailbox(interval=4)
    first, second, third = (commit(session, *tokens) for tokens in ((1,), (2, 3), (4, 5)))
    put(mailbox, first)
    assert await taken(mailbox) == [first]
    put(mailbox, second)
    assert await taken(mailbox) is None
    put(mailbox, third)
    assert await taken(mailbox) == [second, third]
    put(mailbox, second)
    last = commit(session, 6, finish=FinishReason.LENGTH)
    put(mailbox, last)
    assert await taken(mailbox) == [second, last]


async def test_mailbox_with_delayed_tokens_gives_them_before_the_error() -> None:
    bench = Bench()
    session, mailbox = bench.submit(), Mailbox(interval=100)
    put(mailbox, commit(session, 1))
    await mailbox.take()
    put(mailbox, held := commit(session, 2))
    mailbox.fail(UnavailableError("drain"))
    assert await taken(mailbox) == [held]
    with pytest.raises(UnavailableError):
        await mailbox.take()
