"""What becomes of sessions where several scorers have more of them than their proposer has room."""

from __future__ import annotations

import random

from outrider.drafting.copying.ngram import NgramProposer
from outrider.drafting.sessions import IDLE_S
from outrider.v1 import draft_pb2
from scorer_service.config import DraftLimits
from tests.support.services.hub import Bench, commit
from tests.support.services.scripted_proposer import hello
from tests.support.services.shared_proposer import SharedProposer
from tests.support.simulators.methods import Clock

FULL_S = DraftLimits().full_s


def shared(max_sessions: int, num_scorers: int = 2) -> SharedProposer:
    clock = Clock()
    method = NgramProposer(max_sessions=max_sessions, max_branches=0, clock=clock)
    return SharedProposer(method, clock, num_scorers)


async def test_registry_when_full_loses_no_drafted_session_and_drafts_for_all() -> None:
    world = shared(12)
    a, b = world.scorers
    first = a.submit(8, 100)
    second = b.submit(8, 100)
    world.exchange()
    assert (a.undrafted, b.undrafted) == ([], second[4:]), "those that came last"
    world.run(60)  # three seconds
    assert (a.undrafted, b.undrafted) == ([], second[4:])
    assert set(b.refused) == set(b.refused[:4]) | {second[4].id}, "the oldest is tried again"
    assert 2 <= len(b.refused) - 4 <= 3, "once a second"
    third = a.submit(8, 100)
    world.run(39)
    assert (a.undrafted, b.undrafted) == (third, second[4:])
    world.run(1)  # the first sixteen end
    assert a.running.keys() == set(third)
    world.run(1)
    assert (a.undrafted, b.running) == ([], {})
    world.run(100)
    assert a.running == {}
    assert a.evicted == b.evicted == []
    assert all(not session.losses for session in (*first, *second, *third))


async def test_registry_when_another_scorer_leaves_room_finds_it_in_two_seconds() -> None:
    world = shared(32)
    a, b = world.scorers
    a.submit(32, 20)
    world.exchange()
    waiting = b.submit(24)
    world.run(19)
    assert b.undrafted == waiting
    assert len(b.refused) == 24, "all at once, before it was known that there is no room"
    world.run(1)
    assert a.running == {}
    world.run(40)
    assert b.undrafted == []
    assert len(b.opened) - len(b.refused) == 24
    assert b.evicted == []


async def test_registry_probe_of_full_proposer_opens_one_session_then_others() -> None:
    world = shared(8)
    a, b = world.scorers
    [*ending] = a.submit(3, 25)
    a.submit(5)
    waiting = b.submit(6)
    world.exchange()
    assert b.refused == [session.id for session in waiting]
    world.run(19)
    assert len(b.opened) == 6, "none within a second"
    world.run(2)
    assert b.opened[6:] == b.refused[6:] == [waiting[0].id]
    world.run(10)
    assert ending[0] not in a.running
    world.run(20)
    assert b.undrafted == waiting[3:]
    assert b.opened[7:10] == [session.id for session in waiting[:3]]
    tried = len(b.opened)
    world.run(100)
    assert 4 <= len(b.opened) - tried <= 5, "once a second"
    assert a.evicted == b.evicted == []


async def test_registry_when_session_ends_gives_its_place_to_the_next() -> None:
    world = shared(4)
    a, b = world.scorers
    a.submit(2)
    short = b.submit(2, 3)
    waiting = b.submit(3)
    world.exchange()
    refused = len(b.refused)
    world.run(3)
    assert short[0] not in b.running
    assert b.undrafted == waiting[2:]
    assert len(b.refused) == refused
    assert a.evicted == b.evicted == []


async def test_registry_of_a_single_scorer_fills_a_proposer() -> None:
    """A place is free once its Close was sent: in a message, opens come before closes."""
    world = shared(4, num_scorers=1)
    [scorer] = world.scorers
    for tokens in range(3, 15):
        scorer.submit(1, tokens)
    world.exchange()
    while scorer.running:
        world.run(1)
        assert len(scorer.running) - len(scorer.undrafted) == min(4, len(scorer.running))
    assert scorer.refused == scorer.evicted == []


async def test_registry_limit_after_idle_time_is_lifted() -> None:
    world = shared(16)
    a, b = world.scorers
    a.submit(16, 5)
    world.exchange()
    b.submit(4, 3)
    world.run(5)
    assert a.running == b.running == {}
    assert b.proposer.limit < 16
    world.clock.now += FULL_S  # in which no step is run
    sessions = b.submit(16)
    assert b.undrafted == []
    world.exchange()
    assert b.undrafted == []
    assert len(sessions) == len(b.proposer.sessions)


async def test_registry_with_idle_sessions_makes_room_for_another_scorer_once() -> None:
    world = shared(4)
    a, b = world.scorers
    idle = a.submit(4)
    world.exchange()
    a.running.clear()  # the scorer is busy with something else
    a.bench.thread.drafting = False
    world.clock.now += IDLE_S
    b.submit(2)
    world.exchange()
    assert a.evicted == [session.id for session in idle[:2]]
    assert a.refused == a.evicted, "reopened, but drafts of theirs are not wanted: they wait"
    assert b.undrafted == []


async def test_registry_under_any_load_ends_with_all_sessions_drafted_for() -> None:
    rng = random.Random(5)
    world = shared(10, num_scorers=3)
    for _ in range(300):
        for scorer in world.scorers:
            if len(scorer.running) < 8 and rng.random() < 0.3:
                scorer.submit(rng.randrange(1, 4), rng.randrange(1, 60))
        world.run(1)
        held = sum(len(scorer.proposer.sessions) for scorer in world.scorers)
        assert held <= 10
    kept = sum(len(scorer.running) for scorer in world.scorers)
    for scorer in world.scorers:
        assert scorer.evicted == []
        for session in list(scorer.running)[3:]:
            scorer.running[session] = 1
    world.run(1)
    assert kept > 9
    world.run(40)
    assert [scorer.undrafted for scorer in world.scorers] == [[], [], []]


async def test_registry_session_lost_before_first_draft_is_not_lost_too_often() -> None:
    clock = Clock()
    bench = Bench(DraftLimits(max_reopens=0), clock=clock)
    proposer = bench.attach("a")
    session = bench.submit()
    for epoch in range(1, 6):
        assert (session.proposer, session.epoch) == (proposer, epoch)
        bench.hub.registry.on_lost(proposer, draft_pb2.Lost(session=session.id, epoch=epoch))
        await bench.sent(proposer)
        bench.step(commit(session, 1))
        assert session.proposer is None
        clock.now += FULL_S
        bench.step(commit(session, 1))
    blocks = [draft_pb2.Block(session=session.id, epoch=6, base_len=3)]
    bench.hub.blocks.receive(proposer, blocks)
    bench.hub.registry.on_lost(proposer, draft_pb2.Lost(session=session.id, epoch=6))
    assert session.proposer is None
    clock.now += FULL_S
    bench.step(commit(session, 1))
    assert session.proposer is None, "that one counts"
    assert hello().max_sessions == proposer.limit


async def test_registry_session_without_room_moves_to_a_proposer_that_has_some() -> None:
    bench = Bench(clock=Clock())
    full, other = bench.attach("full"), bench.attach("other", method="ngram")
    session = bench.submit()
    assert session.proposer is full
    bench.hub.registry.on_lost(full, draft_pb2.Lost(session=session.id, epoch=1))
    assert session.proposer is other
    assert bench.submit().proposer is other


async def test_registry_proposer_with_overstated_room_gets_no_more_than_others() -> None:
    bench = Bench(DraftLimits(max_sessions=64), clock=Clock())
    boaster = bench.attach("boaster", max_sessions=2**32 - 1)
    other = bench.attach("other", max_sessions=64)
    for _ in range(10):
        bench.submit()
    assert len(boaster.sessions) == len(other.sessions) == 5
