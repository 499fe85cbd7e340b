"""A proposer on vLLM's stepping thread, which drafts between a step's result and the next step."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import Any

import pytest
import torch

from outrider.draft_port import NO_DRAFTS, DeviceDrafts, DeviceNodes, DraftOffer
from outrider.draft_tree import DraftTree, chain_parents
from outrider.drafting.proposer import (
    NO_PACE,
    DraftRound,
    Pace,
    ProposerTraits,
    SessionKey,
    SessionStart,
)
from outrider.vllm.ahead.placed_drafts import PlacedDrafts
from outrider.vllm.waiting import LockstepFixedPolicy
from scorer_service.drafting.in_process import InProcessProposer
from scorer_service.drafting.in_process_link import attach
from tests.support.services.vllm_steps import (
    CONTEXT,
    MAX_WAIT_S,
    SERVED,
    VOCAB,
    K,
    VllmSteps,
    truth,
)


class Knowing:
    """A method that knows what the target says, until it fails."""

    traits = ProposerTraits(
        method="draft_model",
        model="m",
        vocab_size=VOCAB,
        max_sessions=8,
        max_draft_tokens=K,
        max_model_len=CONTEXT,
    )

    def __init__(self) -> None:
        self.texts: dict[SessionKey, list[int]] = {}
        self.closed: list[SessionKey] = []
        self.fails = self.guesses_nothing = False
        self.added = 0  # to the tokens that it knows

    @property
    def num_sessions(self) -> int:
        return len(self.texts)

    def open(self, session: SessionKey, start: SessionStart) -> None:
        self.texts[session] = [*start.prefix]

    def commit(self, session: SessionKey, base_len: int, tokens: Sequence[int], _: int) -> None:
        self.texts[session][base_len:] = tokens

    def close(self, session: SessionKey) -> None:
        self.closed.append(session)
        del self.texts[session]

    forget = close

    def draft(self, sessions: Sequence[SessionKey], _: Pace = NO_PACE) -> DraftRound:
        if self.fails:
            raise RuntimeError("no device")
        if self.guesses_nothing:
            return DraftRound(
                drafts=[(key, DraftTree.chain(len(self.texts[key]), ())) for key in sessions]
            )
        return DraftRound(drafts=[(key, self._tree(self.texts[key])) for key in sessions])

    def ahead(self, sessions: Sequence[SessionKey], pace: Pace) -> DraftRound:  # noqa: ARG002
        return DraftRound()

    def _tree(self, text: list[int]) -> DraftTree:
        name = next(n for n in "abc" if [truth(n, i) for i in range(3)] == text[:3])
        tokens = tuple([truth(name, len(text) + i) + self.added for i in range(K)])
        return DraftTree(len(text), tokens, chain_parents(K))


class World(VllmSteps):
    """Steps with a proposer on their thread."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch, max_wait_s: float = MAX_WAIT_S) -> None:
        super().__init__(monkeypatch, max_wait_s=max_wait_s)
        self.method = Knowing()
        self.proposer = proposer = InProcessProposer(lambda: (self.method, ""), "here")
        proposer.build()
        self.host.draft_with(proposer)
        attach(self.hub.registry, self.host, proposer, SERVED)

    async def run(self, steps: int) -> None:
        """Run steps, and let the event loop do its part after each."""
        for _ in range(steps):
            self.step()
            for _ in range(4):
                await asyncio.sleep(0)

    def launch(self, tokens: Callable[[], torch.Tensor] = lambda: torch.zeros(2, 1 + K)) -> Any:
        """Begin a step of "a" and "b" with all drafts; return what the proposer reads of it."""
        drafts = {name: [-1] * K for name in "ab"}
        self.host.begin_step((), dict.fromkeys("ab", 1 + K), drafts)
        self.host.draft_behind("ab", (0, 1), tokens)
        return self.seen.pop()

    def watch(self, monkeypatch: pytest.MonkeyPatch) -> None:
        """Note what the proposer reads after each launch."""
        self.seen: list[Any] = []
        see = lambda engine: self.seen.append(engine.verify_output)  # noqa: E731
        monkeypatch.setattr(self.proposer, "after_launch", see)

    def check_texts(self) -> None:
        for name, text in self.texts.items():
            assert text == [truth(name, i) for i in range(len(text))]


async def test_every_step_verifies_drafts_that_were_made_before_it(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    world = World(monkeypatch)
    await world.run(2)  # which begins the requests; the next commit asks for the first drafts
    before = {name: len(text) for name, text in world.texts.items()}
    await world.run(4)
    for name, text in world.texts.items():
        assert len(text) == before[name] + 4 * (1 + K), "all drafts were at hand, and right"
    assert sorted(world.method.texts.values()) == sorted(world.texts.values())
    world.check_texts()


async def test_texts_end_and_others_begin_beside_it(monkeypatch: pytest.MonkeyPatch) -> None:
    world = World(monkeypatch)
    await world.run(3)
    world.finish("a")
    world.open("c")
    await world.run(4)
    assert len(world.method.closed) == 1
    assert [text[:3] for text in world.method.texts.values()] == [
        [truth(name, i) for i in range(3)] for name in "bc"
    ]
    assert world.drafts["c"]
    world.check_texts()


@pytest.mark.parametrize(("fault", "value"), [("fails", True), ("added", VOCAB), ("added", -VOCAB)])
async def test_failure_or_token_outside_the_vocabulary_costs_drafts_only(
    fault: str, value: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    world = World(monkeypatch)
    await world.run(3)
    assert all(world.drafts.values())
    right = getattr(world.method, fault)
    setattr(world.method, fault, value)
    await world.run(1)
    assert not any(world.drafts.values())
    setattr(world.method, fault, right)
    await world.run(4)
    assert all(world.drafts.values()), "its sessions were opened again"
    world.check_texts()


async def test_no_step_waits_for_drafts_that_the_method_has_not_made(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    world = World(monkeypatch, max_wait_s=2.0)
    await world.run(3)
    world.method.guesses_nothing = True
    began = time.monotonic()
    await world.run(3)
    assert time.monotonic() - began < 1.0
    world.method.guesses_nothing = False
    await world.run(1)
    assert all(world.drafts.values())
    world.check_texts()


async def test_device_waits_for_drafts_that_are_made_before_its_step(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    world = World(monkeypatch)
    await world.run(3)
    assert world.host.write_branches({"a": 0}, None) is False  # type: ignore[arg-type]


async def test_drafts_behind_a_step_are_placed_unless_another_row_needs_the_host(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    world = World(monkeypatch)
    await world.run(3)
    world.open("c")
    await world.run(1)
    a, b, c = (world.host._rows[name] for name in "abc")
    tokens = torch.arange(2 * K, dtype=torch.int32).view(2, K)
    placed = {a.session_id: 1, b.session_id: 0}
    behind = DeviceDrafts(DeviceNodes(tokens), placed, {a.session_id: K, b.session_id: 2})
    rooms = {"c": 0, "b": K, "a": 3, "unknown": K}

    def drafts() -> PlacedDrafts | None:
        return world.host.drafts_behind(rooms)

    assert drafts() is None, "nothing was launched"
    world.host._worker._behind = behind
    found = drafts()
    assert found is not None
    none = [-1] * K
    assert found.lengths == [0, 2, 3, 0]
    assert found.tokens.tolist() == [
        *tokens[0, :2].tolist(),
        -1,
        -1,
        *tokens[1, :3].tolist(),
        *none,
    ]
    rooms["c"] = K  # its first draft is made behind the next step
    newcomer = drafts()
    assert newcomer is not None
    assert newcomer.lengths == found.lengths
    assert newcomer.tokens.tolist() == [*none, *found.tokens.tolist()]
    other = replace(c.drafting.offered, proposer=DraftOffer("elsewhere", K))
    monkeypatch.setattr(c.drafting, "offered", other)
    assert drafts() is None, "which may come until then"
    del rooms["c"]
    assert drafts() is not None
    world.host._worker._behind = behind._replace(nodes=DeviceNodes(tokens, tokens))
    assert drafts() is None, "vLLM verifies no trees"
    world.host._worker._behind = behind._replace(places={})
    assert drafts() is None


async def test_rows_that_are_to_have_no_drafts_need_no_room(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    world = World(monkeypatch)
    await world.run(3)
    a, b = (world.host._rows[name].drafting for name in "ab")

    def undrafted() -> frozenset[str]:
        return world.host.undrafted(["a", "b", "unknown"], any_step=False)

    assert undrafted() == {"unknown"}
    monkeypatch.setattr(a, "num_draft_tokens", 0)
    assert undrafted() == {"a", "unknown"}
    monkeypatch.setattr(a, "stance", None)  # it is chosen when the row goes into a step
    assert undrafted() == {"unknown"}
    monkeypatch.setattr(LockstepFixedPolicy, "drafting", False)
    assert undrafted() == {"a", "unknown"}
    monkeypatch.setattr(b, "offered", replace(b.offered, proposer=NO_DRAFTS))
    assert undrafted() == {"a", "b", "unknown"}


async def test_row_keeps_its_room_until_an_offer_may_have_come(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    steps = VllmSteps(monkeypatch, names=("a",))
    steps.step()
    row = steps.host._rows["a"]

    def undrafted(written: int) -> bool:
        row.drafting.offered = replace(row.drafting.offered, proposer=NO_DRAFTS)
        row.token_ids = [truth("a", i) for i in range(3 + written)]
        return "a" in steps.host.undrafted("a", any_step=False)

    assert not undrafted(0)
    assert undrafted(1), "none was found"


async def test_step_waits_for_no_draft_of_a_row_without_room(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    steps = VllmSteps(monkeypatch, max_wait_s=4.0)
    steps.step()
    proposer = steps.attach()
    steps.host.take_early()
    emitted = [[truth(name, 4)] for name in "ab"]
    steps.host.commit("ab", emitted, [5, 5], lambda row, n: [truth("ab"[row], i) for i in range(n)])
    steps.host.tell()
    steps.texts["a"] += emitted[0]
    steps.post(proposer, steps.block("a"))
    steps.host.take_early()
    began = time.monotonic()
    [draft] = steps.host.choose_drafts("a")
    assert time.monotonic() - began < 2.0
    assert draft == [truth("a", len(steps.texts["a"]) + i) for i in range(K)]


async def test_nobody_has_room_once_drafting_was_given_up(monkeypatch: pytest.MonkeyPatch) -> None:
    steps = VllmSteps(monkeypatch)
    steps.plugin._host = None
    assert steps.plugin.undrafted("ab") == {*"ab"}


async def test_rows_without_room_miss_no_drafts(monkeypatch: pytest.MonkeyPatch) -> None:
    steps = VllmSteps(monkeypatch)
    host, names = steps.host, ["a", "b"]
    host._ahead = True
    steps.step()
    steps.attach()  # and it does not draft

    def run(verified: dict[str, list[int]]) -> list[int]:
        for _ in range(2):
            host.take_early()
            emitted = [[truth(name, len(steps.texts[name]))] for name in names]
            for name, tokens in zip(names, emitted, strict=True):
                steps.texts[name] += tokens
            lengths = [len(steps.texts[name]) for name in names]
            host.commit(names, emitted, lengths, lambda row, n: steps.texts[names[row]][:n])
            host.chosen(dict.fromkeys(names, 0))
            host.begin_step((), {name: 1 + len(verified.get(name, ())) for name in names}, verified)
            host.account()
        return [host._rows[name].drafting.breaker.deadline_misses for name in names]

    assert run({}) == [0, 0]
    assert not host.tracker._in_vain
    assert run({"b": [-1] * K}) == [0, 2]


async def test_rows_have_all_room_where_graphs_are_for_rows_with_drafts_alone(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    steps = VllmSteps(monkeypatch, max_graph_rows=2)
    assert steps.host.undrafted("ab", any_step=False) == frozenset()
    assert steps.host.undrafted("a", any_step=True) == {"a"}
    steps.open("c")
    steps.step()
    assert steps.host.undrafted("abc", any_step=False) == {*"abc"}, "more than graphs have"


async def test_no_draft_is_launched_behind_a_text_that_may_not_be_vllms(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """The device accepted drafts that nobody noted: a loop would read past its inputs."""
    world = World(monkeypatch)
    await world.run(3)
    world.watch(monkeypatch)
    assert [row[2] for row in world.launch().rows] == [0, 1]
    world.host.distrust()
    assert world.launch() is None
    await world.run(4)
    assert [row[2] for row in world.launch().rows] == [0, 1], "their sessions were opened again"
    world.check_texts()


async def test_text_that_is_computed_again_is_not_read_as_a_round(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    world = World(monkeypatch)
    await world.run(3)
    world.watch(monkeypatch)
    # Of "a" the last tokens, no more than a round has.
    world.host.begin_step((), {"a": K, "b": 1 + K}, {"b": [-1] * K})
    world.host.draft_behind("ab", (0, 1), lambda: torch.zeros(2, 1 + K))
    assert [row[2] for row in world.seen.pop().rows] == [1]


async def test_fault_leaves_nothing_of_an_earlier_step(monkeypatch: pytest.MonkeyPatch) -> None:
    world = World(monkeypatch)
    await world.run(3)
    host, a = world.host, world.host._rows["a"]
    nodes = DeviceNodes(torch.zeros(1, K, dtype=torch.int32))
    behind = DeviceDrafts(nodes, {a.session_id: 0}, {a.session_id: K})
    monkeypatch.setattr(InProcessProposer, "launched_drafts", behind)
    world.watch(monkeypatch)
    world.launch()
    assert host.drafts_behind({"a": K, "b": K}) is not None

    def fail(*_: object) -> Any:
        raise RuntimeError("no device")

    with pytest.raises(RuntimeError):
        world.launch(fail)
    assert host.drafts_behind({"a": K, "b": K}) is None
    monkeypatch.setattr(world.proposer, "after_launch", fail)
    with pytest.raises(RuntimeError):
        world.launch()
    monkeypatch.setattr(world.proposer, "draft_between_steps", fail)
    with pytest.raises(RuntimeError):
        host.draft_now()
    assert host.engine.verify_output is None
    assert not host.engine.placed
    world.check_texts()


@pytest.mark.parametrize("placed", [0, K])
async def test_rows_that_begin_with_what_the_device_made_await_no_draft(
    placed: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    world = World(monkeypatch)
    await world.run(3)
    monkeypatch.setattr(world.proposer, "draft_between_steps", lambda _: None)
    host, texts = world.host, world.texts
    names = [*texts]
    for _ in range(4):
        for name, text in texts.items():
            text.append(truth(name, len(text)))
        emitted, lengths = [text[-1:] for text in texts.values()], map(len, texts.values())
        host.commit(names, emitted, [*lengths], lambda *_: [])
        host.draft_now()
        host.chosen(dict.fromkeys(names, placed))
        host.begin_step((), dict.fromkeys(names, 1 + K), dict.fromkeys(names, [-1] * K))
        host.account()
    for row in host._rows.values():
        breaker = row.drafting.breaker
        assert (breaker.deadline_misses, breaker.last_open_rounds) == (0, 0)
        assert row.drafting.measured.hit is (True if placed else None)
