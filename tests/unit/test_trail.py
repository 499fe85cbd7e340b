"""Drafts that are enqueued behind a verification are those made after it, or dropped."""

from __future__ import annotations

import random
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from outrider.config import EngineConfig
from outrider.drafting.draft_model import DraftModelProposer
from outrider.drafting.draws import TorchDraws
from outrider.drafting.graph_chains import GraphChains
from outrider.drafting.proposer import SessionKey, SessionStart
from outrider.drafting.recorded_loops import Recording, make_shapes
from outrider.drafting.trail import TrailRow
from outrider.engine.cuda.graph_runner import GraphRunner
from outrider.engine.engine import Engine
from outrider.engine.policy import Policy
from outrider.engine.static_step import make_buckets
from outrider.engine.verifier import choose_and_verify
from outrider.params import SamplingParams, StopParams
from outrider.types import Request
from scorer_service.in_process import InProcessProposer
from tests.support.recordable import RecordableHashModel, recordable_llama, rerun

K, WIDTH = 4, 6  # draft tokens; what the target chooses per row at most
SAMPLINGS = (
    SamplingParams(temperature=0.0),
    SamplingParams(temperature=1.0, seed=5),
    SamplingParams(temperature=0.8, seed=2**63, top_k=9, top_p=0.9),
)


class Drafting:
    """Sessions of one proposer whose drafts are verified, and what is known of each."""

    def __init__(self, seed: int, num_pages: int = 200) -> None:
        self.rng = random.Random(seed)
        model = RecordableHashModel(num_pages=num_pages)
        shapes = make_shapes(rows=(1, 2, 4), query_lens=(1, 2, 16), num_tokens=(1, 2, K, 6))
        loops = GraphChains(model, Recording(shapes, rerun, TorchDraws()))
        self.proposer = DraftModelProposer(model, name="hash", chain_drafter=loops, max_branches=0)
        self.lengths: dict[SessionKey, int] = {}
        self.held: dict[SessionKey, tuple[int, ...]] = {}
        self.wanted: dict[SessionKey, int] = {}
        self.trails = 0

    def open(self, key: SessionKey) -> None:
        length = self.rng.randint(1, 20)
        prompt = [self.rng.randrange(60) for _ in range(length)]
        self.proposer.open(key, SessionStart(prompt, self.rng.choice(SAMPLINGS), K, 110))
        self.lengths[key], self.wanted[key], self.held[key] = length, K, ()

    def draft(self) -> dict[SessionKey, tuple[int, ...]]:
        """Whatever is wanted, until all have it."""
        left = [key for key in self.lengths if self.wanted[key]]
        drafts: dict[SessionKey, tuple[int, ...]] = {}
        while left:
            done = self.proposer.draft(left)
            self.proposer.check_invariants()
            assert not done.lost
            drafts |= {key: tree.token_ids for key, tree in done.drafts}
            drafts |= {key: self.proposer._sessions[key].held for key in done.at_hand}
            assert all(tree.base_len == self.lengths[key] for key, tree in done.drafts)
            left = done.unfinished
        for key in sorted(drafts):  # the policy may verify less of it
            self.held[key] = drafts[key][: self.rng.randint(0, K)]
        return drafts

    def verify(self, *, behind: bool) -> None:
        """A step verifies all drafts, `behind` which the next ones are enqueued, and ends."""
        keys = sorted(self.lengths)
        self.rng.shuffle(keys)
        verdicts = torch.full((len(keys) + 1, 1 + WIDTH), 61, dtype=torch.int32)
        rows: list[TrailRow] = []
        for i, key in enumerate(keys):
            draft = self.held[key]
            accepted = self.rng.randint(0, len(draft))
            verdicts[i, 0] = accepted
            chosen = [*draft[:accepted], self.rng.randrange(60)]
            verdicts[i, 1 : 2 + accepted] = torch.tensor(chosen)
            self.wanted[key] = self.rng.randint(0, K) if self.rng.random() < 0.3 else K
            rows.append(TrailRow(key, draft, max(1, self.wanted[key])))
        ended = self.rng.randrange(3 * len(keys)) if keys else 0
        if behind:
            self.proposer.draft_behind(rows, verdicts)
            self.trails += self.proposer._trail is not None
        for i, key in enumerate(keys):
            output = verdicts[i, 1 : 2 + int(verdicts[i, 0])].tolist()
            if i == ended:  # its text is cut at a stop
                self.proposer.commit(key, self.lengths[key], output[:1], K)
                self.end(key)
                continue
            self.proposer.commit(key, self.lengths[key], output, self.wanted[key])
            self.lengths[key] += len(output)
            self.held[key] = ()

    def end(self, key: SessionKey) -> None:
        self.proposer.close(key)
        for known in (self.lengths, self.held, self.wanted):
            known.pop(key, None)


def texts(seed: int, *, behind: bool) -> tuple[list[dict[SessionKey, tuple[int, ...]]], int]:
    """All drafts of some rounds in which sessions come and go."""
    world = Drafting(seed)
    chances = random.Random(seed)  # the same with and without
    said = []
    for key in range(3):
        world.open(key)
    for round_ in range(14):
        said.append(world.draft())
        world.verify(behind=behind)
        if chances.random() < 0.2 and world.lengths:
            world.end(chances.choice(sorted(world.lengths)))
        if chances.random() < 0.2 and len(world.lengths) < 4:
            world.open(10 + round_)
    return said, world.trails


@settings(max_examples=60, deadline=None, derandomize=True)
@given(st.integers(0, 2**32))
def test_what_is_drafted_behind_a_step_is_what_is_drafted_after_it(seed: int) -> None:
    after, _ = texts(seed, behind=False)
    behind, trails = texts(seed, behind=True)
    assert behind == after
    assert trails > 0


def test_nothing_is_drafted_anew_that_was_drafted_behind(monkeypatch: pytest.MonkeyPatch) -> None:
    world = Drafting(3)
    for key in range(4):
        world.open(key)
    world.draft()
    world.verify(behind=True)
    world.wanted = dict.fromkeys(world.wanted, K)
    monkeypatch.setattr(GraphChains, "draft", None)
    drafts = dict(world.proposer.draft(list(world.lengths)).drafts)
    assert len(drafts) > 2
    assert sorted(drafts) == sorted(world.lengths)


def test_without_free_pages_it_is_drafted_after_the_step() -> None:
    world = Drafting(5, num_pages=32)
    for key in range(4):
        world.open(key)
    world.draft()
    pool = world.proposer._pool
    taken = [pool.allocate() for _ in range(pool.num_free)]
    world.verify(behind=True)
    assert world.trails == 0
    pool.release(taken)
    assert len(world.draft()) > 0


class Told:
    """Nobody to be told; a draft that fails is a failed test."""

    def first_draft(self, session_id: int, epoch: int) -> None: ...

    def lost(self, session_id: int, epoch: int) -> None:
        raise AssertionError(f"session {session_id} is lost")

    def failed(self) -> None: ...


class Scorer:
    """An engine whose steps are recorded, and the proposer on its thread, if it has one."""

    def __init__(self, *, drafts: bool) -> None:
        model = recordable_llama(num_pages=96)
        self.engine = Engine(
            model,
            EngineConfig(page_size=4, num_pages=96, max_num_seqs=4, max_model_len=100),
            policy=Policy(K if drafts else 0, max_wait_s=0.0),
            runner=GraphRunner(
                model,
                make_buckets(4, (1, K + 1)),
                record=rerun,
                choose_and_verify=choose_and_verify,
            ),
        )
        self.texts: dict[int, list[int]] = {}
        self.companion: InProcessProposer | None = None
        if drafts:
            self.companion = InProcessProposer(lambda: (draft_model(), "hash"), "here")
            self.companion.build()
            self.companion.tell(Told())

    def begin(self, request: Request) -> None:
        session, prompt = request.session_id, request.prompt_token_ids
        self.texts[session] = []
        self.engine.submit(request)
        if self.companion is not None:
            self.engine.set_drafting(session, "here", K, in_turns=True)
            start = SessionStart((), request.sampling, K, len(prompt) + request.stop.max_tokens)
            self.companion.open(self.engine, session, 1, start, len(prompt))

    def step(self) -> bool:
        """As the engine's thread does it; False if nothing runs any more."""
        if self.companion is not None:
            self.companion.take_turn(self.engine)
        going = self.engine.launch()
        events = self.engine.take_events()
        for commit in () if events is None else events.commits:
            self.texts[commit.session_id] += commit.token_ids
        if self.companion is not None:
            self.companion.rest(self.engine)
        self.engine.collect()
        self.engine.check_invariants()
        return going


def draft_model() -> DraftModelProposer:
    """Nearly the target."""
    model = recordable_llama(num_pages=96, noise=0.02)
    shapes = make_shapes(rows=(1, 2, 4), query_lens=(1, 2, 16), num_tokens=(1, 2, K))
    loops = GraphChains(model, Recording(shapes, rerun, TorchDraws()))
    return DraftModelProposer(model, name="llama", chain_drafter=loops, max_branches=0)


def test_a_scorer_that_drafts_behind_its_steps_says_what_the_target_says(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    behind, after = [], []
    draft_behind, draft = GraphChains.draft_behind, GraphChains.draft

    def noted(self: GraphChains, *asked: Any) -> Any:
        behind.append(len(asked[0]))
        return draft_behind(self, *asked)

    def noted_after(self: GraphChains, *asked: Any) -> Any:
        after.append(len(asked[1]))
        return draft(self, *asked)

    monkeypatch.setattr(GraphChains, "draft_behind", noted)
    monkeypatch.setattr(GraphChains, "draft", noted_after)
    rng = random.Random(2)
    requests = [
        Request(
            i,
            tuple(rng.randrange(97) for _ in range(rng.randint(2, 30))),
            SAMPLINGS[i % len(SAMPLINGS)],
            StopParams(max_tokens=rng.randint(20, 60)),
        )
        for i in range(7)
    ]
    said = []
    for drafts in (False, True):
        scorer = Scorer(drafts=drafts)
        for request in requests[:3]:
            scorer.begin(request)
        steps = 0
        while scorer.step():
            steps += 1
            if steps % 8 == 0 and steps // 8 <= 4:
                scorer.begin(requests[2 + steps // 8])
        said.append((steps, scorer.texts))
    (plain, text), (drafted, same) = said
    assert same == text
    assert drafted < 0.6 * plain
    assert sum(behind) > 3 * sum(after), "all but those beside prompts"
