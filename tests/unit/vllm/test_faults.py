"""Faults of proposers and of vLLM's batch: each costs drafts, and nothing else."""

from __future__ import annotations

import time
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
from numpy.typing import NDArray

from outrider.draft_port import DraftOffer
from outrider.drafted_nodes import DraftNodes
from outrider.errors import UnavailableError
from outrider.params import MAX_ADVICE_TOKENS
from outrider.v1 import draft_pb2
from outrider.vllm.adapter import StepPlan
from scorer_service.drafting.attached import AttachedProposer
from tests.support.services.vllm_steps import MAX_WAIT_S, VOCAB, K, VllmSteps, truth

World = VllmSteps
Peer = AttachedProposer
Fault = Callable[[World, Peer], object]


def bad(world: World, peer: Peer, **fields: object) -> None:
    world.post(peer, world.block("a", **fields))


def flood(world: World, peer: Peer) -> None:
    world.post(peer, *[world.block("a")] * (2**14 + 1))


def many_bad(world: World, peer: Peer) -> None:
    for _ in range(8):
        bad(world, peer, token_ids=[VOCAB])
    assert peer.detached.done()
    world.attach("another")


def late_true(world: World, peer: Peer) -> None:
    block = world.block("a", 8)
    world.step()
    world.post(peer, block)


def late_wrong(world: World, peer: Peer) -> None:
    block = world.block("a", token_ids=[truth("a", 9)] * 3)
    world.step()
    world.post(peer, block)


def outrun(world: World, peer: Peer) -> None:
    block = world.block("a", 1)
    world.step()
    world.step()
    world.post(peer, block)


def ended(world: World, peer: Peer) -> None:
    world.open("c")
    world.step()
    block = world.block("c")
    world.finish("c")
    world.post(peer, block)
    world.step()
    world.post(peer, block)


def aborted_while_it_runs(world: World, peer: Peer) -> None:
    world.open("c")
    world.step()
    world.post(peer, world.block("c"))
    world.step()
    assert world.drafts["c"]
    world.finish("c")  # with a draft that was to be verified


def same_name_again(world: World, _peer: Peer) -> None:
    world.open("c")
    world.step()
    world.finish("c")
    world.open("c")


def wrong_tail(world: World, peer: Peer) -> None:
    tokens = [truth("a", len(world.texts["a"])), 1, 1, 1]
    bad(world, peer, token_ids=tokens)
    world.step()


def tree_with_side_branches(world: World, peer: Peer) -> None:
    base = len(world.texts["a"])
    tokens = [truth("a", base), 1, truth("a", base + 1), 2]
    bad(world, peer, token_ids=tokens, parents=[-1, -1, 0, 1])


def detached(world: World, peer: Peer) -> None:
    world.post(peer, world.block("a"))
    world.hub.registry.detach(peer, UnavailableError("gone"))
    world.step()
    world.attach("another")


def detached_with_drafts_in_flight(world: World, peer: Peer) -> None:
    world.post(peer, world.block("a"), world.block("b"))
    world.step()
    world.hub.registry.detach(peer)
    world.attach("another")


def goodbye(world: World, peer: Peer) -> None:
    world.hub.registry.on_goodbye(peer)
    world.step()
    world.attach("another")


def lost(world: World, peer: Peer) -> None:
    session = world.session("a")
    world.hub.registry.on_lost(peer, draft_pb2.Lost(session=session.id, epoch=session.epoch))


def replaced(world: World, peer: Peer) -> None:
    world.attach("p", incarnation=2)
    assert peer.detached.done()


def preempted(world: World, peer: Peer) -> None:
    world.post(peer, world.block("a"))
    world.step("b")
    world.step("b")


def other_text(world: World, peer: Peer) -> None:
    """VLLM went on by itself with a row, as for a client that streams its input."""
    world.texts["a"] += [truth("a", len(world.texts["a"])) for _ in range(3)]
    world.post(peer, world.block("b"))


def prompts_only(world: World, _peer: Peer) -> None:
    world.open("c")
    world.batch.req_ids = ["c"]
    world.plugin.begin(StepPlan(world.new, (), {}, {"c": 2}))
    world.plugin.launched()
    world.new = []
    assert world.plugin.propose([[]], *arrays(3)) == [[]]


def nothing_scheduled(world: World, _peer: Peer) -> None:
    world.plugin.begin(StepPlan([], (), {}, {}))
    world.plugin.launched()


def unknown_row(world: World, _peer: Peer) -> None:
    world.batch.req_ids = ["never opened"]
    assert world.plugin.propose([[7]], *arrays(4)) == [[]]


def broken_host(world: World, _peer: Peer) -> None:
    """A bug of ours: the step goes on without drafts."""
    good = world.host.tracker.choose_rows
    world.host.tracker.choose_rows = None  # type: ignore[method-assign,assignment]
    assert not any(world.step().values())
    world.host.tracker.choose_rows = good  # type: ignore[method-assign]


def offer_for_nobody(world: World, _peer: Peer) -> None:
    world.host.set_drafting(10**6, DraftOffer("p", K))


FAULTS: dict[str, Fault] = {
    "late and true": late_true,
    "late and wrong": late_wrong,
    "late and outrun": outrun,
    "after the end": ended,
    "wrong from the first token": lambda w, p: bad(w, p, token_ids=[1, 1, 1, 1]),
    "wrong after the first token": wrong_tail,
    "longer than K": lambda w, p: w.post(p, w.block("a", 40)),
    "no guess": lambda w, p: bad(w, p, token_ids=[]),
    "a tree": tree_with_side_branches,
    "a session that was never opened": lambda w, p: bad(w, p, session=10**6),
    "session 0": lambda w, p: bad(w, p, session=0),
    "another epoch": lambda w, p: bad(w, p, epoch=99),
    "beyond what was committed": lambda w, p: bad(w, p, base_len=60),
    "a token outside the vocabulary": lambda w, p: bad(w, p, token_ids=[VOCAB]),
    "a parent after its child": lambda w, p: bad(w, p, token_ids=[1, 2], parents=[1, -1]),
    "too few parents": lambda w, p: bad(w, p, token_ids=[1, 2], parents=[-1]),
    "too large a block": lambda w, p: bad(w, p, token_ids=[1] * 513),
    "a method that was not named": lambda w, p: bad(w, p, method_index=3),
    "too many blocks at once": flood,
    "so many bad blocks that it is detached": many_bad,
    "detached between steps": detached,
    "detached with drafts in flight": detached_with_drafts_in_flight,
    "goodbye": goodbye,
    "lost session": lost,
    "dialled anew": replaced,
    "row preempted and resumed": preempted,
    "row aborted while its draft is verified": aborted_while_it_runs,
    "name used again": same_name_again,
    "row with another text": other_text,
    "a step within prompts": prompts_only,
    "nothing scheduled": nothing_scheduled,
    "a row that was never opened": unknown_row,
    "an error of the host": broken_host,
    "an offer for nobody": offer_for_nobody,
}


def arrays(length: int) -> tuple[NDArray[np.int32], NDArray[np.int32]]:
    return np.array([length], dtype=np.int32), np.zeros((1, 64), dtype=np.int32)


@pytest.mark.parametrize("fault", FAULTS.values(), ids=FAULTS.keys())
async def test_plugin_after_a_fault_drafts_again_for_every_row(
    fault: Fault, monkeypatch: pytest.MonkeyPatch
) -> None:
    world = VllmSteps(monkeypatch)
    peer = world.attach()
    world.step()  # the prompts' own
    world.post(peer, world.block("a"), world.block("b"))
    world.step()
    fault(world, peer)
    began = time.perf_counter()
    world.step()
    assert time.perf_counter() - began < MAX_WAIT_S + 0.5, "waits are bounded"
    world.step()
    present = world.hub.registry.proposers[-1]
    names = list(world.texts)
    for _ in range(2):  # the first may meet a session that has just been opened
        world.post(present, *[world.block(name, 12) for name in names])
        drafts = world.step()
    for name in names:
        base = len(world.texts[name])
        assert drafts[name] == [truth(name, base + i) for i in range(K)]
    for name in names:
        assert world.session(name).committed == world.texts[name], "proposers know the text"


@pytest.mark.parametrize(
    "extra_args",
    [
        {"outrider_advice": [-1]},
        {"outrider_advice": [VOCAB]},
        {"outrider_advice": [1] * (MAX_ADVICE_TOKENS + 1)},
        {"outrider_tenant": "\ud800"},
        {"outrider_methods": 7},
        {"outrider_methods": "sufix"},
    ],
    ids=["no token", "beyond the vocabulary", "too long", "no text", "no name", "no method"],
)
async def test_plugin_with_request_that_no_proposer_can_be_sent_drafts_for_the_others(
    extra_args: dict[str, Any],
    monkeypatch: pytest.MonkeyPatch,
    caplog: pytest.LogCaptureFixture,
) -> None:
    world = VllmSteps(monkeypatch, ("a",))
    peer = world.attach()
    world.open("c", **extra_args)
    world.step()
    for _ in range(2):
        world.post(peer, world.block("a", 12))
        drafts = world.step()
    assert (len(drafts["a"]), drafts["c"]) == (K, [])
    assert world.plugin._num_faults == 0
    assert "nothing is drafted for c: " in caplog.text


async def test_plugin_with_silent_proposer_stops_waiting(monkeypatch: pytest.MonkeyPatch) -> None:
    world = VllmSteps(monkeypatch)
    world.attach()
    world.step()
    times = []
    for _ in range(20):
        began = time.perf_counter()
        assert not any(world.step().values())
        times.append(time.perf_counter() - began)
    assert times[0] >= MAX_WAIT_S, "a draft may come"
    assert sorted(times[3:])[8] < MAX_WAIT_S / 2, "none came"


async def test_plugin_near_the_end_drafts_no_token_too_many(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    world = VllmSteps(monkeypatch, ())
    world.open("a", max_tokens=4)
    peer = world.attach()
    world.step()
    world.post(peer, world.block("a"))
    assert len(world.step()["a"]) == 4 - 2 - 1, "the last token needs no draft"
    session = world.session("a")
    world.step()
    running = world.host.take_stats("a")
    world.finish("a")
    world.open("b")
    world.step()
    stats = world.host.take_stats("a")
    assert stats == running
    assert stats is not None
    assert (stats.output_tokens, stats.drafted, stats.accepted) == (4, 1, 1)
    assert world.host.take_stats("a") is None
    assert session.id not in world.hub._sessions


async def test_plugin_tells_of_an_end_that_a_fault_has_kept_back(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Else its session would stay a proposer's for good, in the place of others."""
    world = VllmSteps(monkeypatch, ("b",))
    world.open("a", max_tokens=2)
    world.attach()
    world.step()
    session = world.session("a")
    with monkeypatch.context() as patch:
        patch.setattr(world.host, "choose_drafts", None)
        world.step()
    assert world.host._rows["a"].ended
    world.finish("a")
    world.step()
    assert session.id not in world.hub._sessions


async def test_plugin_after_many_faults_goes_on_without_drafts(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    world = VllmSteps(monkeypatch)
    world.plugin._server = None
    world.host.tracker = None  # type: ignore[assignment]
    for _ in range(20):
        assert not any(world.step().values())
    assert world.plugin._host is None


async def test_plugin_cuts_drafts_as_the_policy_says_by_confidence(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    world = VllmSteps(monkeypatch)
    policy, asked = world.host.tracker.policy, []

    def cut(drafts: list[tuple[object, DraftNodes]], *others: int) -> list[bool]:
        asked.append(([nodes for _, nodes in drafts], others))
        return [i < 2 for i in range(K)]

    monkeypatch.setattr(policy, "cut", cut)
    peer = world.attach()
    world.step()
    world.post(peer, world.block("a", confidences=bytes(range(9, 1, -1))), world.block("b"))
    before = len(world.texts["a"]), len(world.texts["b"])
    drafts = world.step()
    done = len(world.texts["a"]) - before[0]
    told = bytes(range(9, 1, -1))[done : done + K]
    assert asked == [([DraftNodes(told)], (2, 2 + K))]
    assert (len(drafts["a"]), len(drafts["b"])) == (2, K)
    world.step()
    world.host.take_stats("a")
    learned = world.host._rows["a"].drafting.unlearned
    assert learned[-1][1] == DraftNodes(told[:2]), "acceptance is learned by what was told"


async def test_clients_odd_parameters_are_no_fault(monkeypatch: pytest.MonkeyPatch) -> None:
    world = VllmSteps(monkeypatch)
    proposer = world.attach()
    odd: tuple[dict[str, object], ...] = (
        {"top_k": 2**40, "max_tokens": 2**40},  # as vLLM takes them
        {"extra_args": {"outrider_advice": [1] * (MAX_ADVICE_TOKENS + 1)}},
        {"presence_penalty": 3.0},  # as another version might
    )
    for name, params in zip("cde", odd, strict=True):
        world.open(name)
        vars(world.new[-1].sampling_params).update(params)
    world.step()
    assert world.plugin._num_faults == 0
    assert set(world.host._rows) == {"a", "b", "c"}
    world.plugin.launched()
    world.post(proposer, *(world.block(name) for name in "abc"))
    drafts = world.step()
    assert [len(drafts[name]) for name in "abcde"] == [K, K, K, 0, 0]
    assert world.host._rows["c"].request.sampling.top_k == VOCAB
