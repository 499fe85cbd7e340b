"""Drafts equal what the draft model itself would generate, whatever happened before."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import partial
from itertools import count
from unittest.mock import patch

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from transformers import LlamaForCausalLM

from outrider.draft_tree import DraftTree
from outrider.drafting.draft_model.brancher import Brancher
from outrider.drafting.draft_model.loops import EagerForks
from outrider.drafting.draft_model.proposer import DraftModelProposer
from outrider.drafting.proposer import NO_PACE, DraftRound, Pace, ProposerLimits, SessionStart
from outrider.drafting.sessions import IDLE_S
from outrider.engine.kv_cache.block_pool import BlockPool
from outrider.engine.model.loader import ModelOptions, build_paged_model
from outrider.engine.sampling.noise import Lane
from outrider.engine.sampling.sample import SamplingBatch, process_logits, sample
from outrider.errors import ConfigError
from outrider.params import SamplingParams, VerificationRule
from tests.support.models.hash_model import HashModel
from tests.support.models.recordable import tiny_llama_config
from tests.support.simulators.methods import Clock

GREEDY = SamplingParams(temperature=0.0)
COUPLED, REJECTION = VerificationRule.COUPLED, VerificationRule.REJECTION
Logits = Callable[[Sequence[int]], torch.Tensor]  # of the token after a context: [1, vocab]


def generate(
    logits: Logits,
    context: Sequence[int],
    sampling: SamplingParams,
    n: int,
    lane: Lane = Lane.SHARED,
) -> list[int]:
    """The definition: one token after another, from the whole context each time."""
    text = list(context)
    for _ in range(n):
        batch = SamplingBatch.build([sampling], [len(text)], lanes=[lane])
        text.append(int(sample(logits(text), batch)))
    return text[len(context) :]


samplings = st.sampled_from(
    [
        GREEDY,
        SamplingParams(temperature=1.0, seed=1),
        SamplingParams(temperature=0.7, seed=2**64 - 1, top_k=5),
        SamplingParams(temperature=1.3, seed=3, top_p=0.8, min_p=0.05),
    ]
)
# Tokens 0 and 1 make shared prefixes likely; every length is.
prefixes = st.integers(1, 40).flatmap(lambda n: st.lists(st.integers(0, 1), min_size=n, max_size=n))
opens = st.tuples(
    st.just("open"),
    prefixes,
    st.tuples(samplings, st.sampled_from((COUPLED, COUPLED, REJECTION))),
    st.integers(0, 6),
)
# A path of the last tree comes true, then other tokens; some known ones are told again.
commits = st.tuples(
    st.just("commit"),
    st.integers(0, 3),
    st.tuples(st.integers(-1, 60), st.lists(st.integers(0, 31), max_size=4), st.integers(0, 4)),
    st.integers(1, 6),
)
aheads = st.tuples(st.just("ahead"), st.integers(1, 15), st.none(), st.none())
closes = st.tuples(st.just("close"), st.integers(0, 3), st.none(), st.none())
drafts = st.tuples(st.just("draft"), st.integers(1, 15), st.none(), st.none())
rounds = st.one_of(
    st.tuples(commits, drafts, aheads), st.tuples(commits, aheads, commits, drafts)
).map(list)
histories = st.tuples(
    st.lists(opens, min_size=1, max_size=4),
    st.lists(st.one_of(rounds, rounds, st.tuples(opens).map(list), st.tuples(closes).map(list))),
).map(lambda parts: [*parts[0], ("draft", 15, None, None), *(e for g in parts[1] for e in g)])


class Bench:
    """Sessions as a scorer sees them, beside the proposer."""

    def __init__(
        self, num_pages: int, max_sessions: int, prefill_budget: int, max_branches: int
    ) -> None:
        self.model = HashModel(num_pages=num_pages, max_model_len=60)
        self.proposer = DraftModelProposer(
            self.model,
            name="hash",
            limits=ProposerLimits(
                max_sessions=max_sessions, prefill_budget=prefill_budget, max_branches=max_branches
            ),
            fork_drafter=EagerForks(self.model),
            clock=partial(next, count(0.0, 1e-3)),
        )
        self.text: dict[int, list[int]] = {}
        self.sampling: dict[int, SamplingParams] = {}
        self.wanted: dict[int, int] = {}
        self.sampled: set[int] = set()  # for rejection, with noise of their own
        self.undrafted: set[int] = set()  # whose first draft may be left out if they are long
        self.last: dict[int, DraftTree] = {}  # what a scorer holds
        self.next_key = 1

    def open(
        self, prefix: list[int], sampling: SamplingParams, rule: VerificationRule, k: int
    ) -> None:
        key = self.next_key
        self.next_key += 1
        self.text[key], self.sampling[key], self.wanted[key] = list(prefix), sampling, k
        if rule is REJECTION and not sampling.greedy:
            self.sampled.add(key)
        self.undrafted.add(key)
        self.proposer.open(key, SessionStart(prefix, sampling, k, 50, rule=rule))

    def commit(self, which: int, node: int, more: list[int], overlap: int, k: int) -> None:
        key = list(self.text)[which % len(self.text)]
        text = self.text[key]
        tree = self.last.get(key)
        tokens = more
        if tree is not None and tree.token_ids and node >= 0:
            tokens = [*path_to(tree, node % len(tree.token_ids)), *more]
        if len(text) + len(tokens) > 50:
            return
        if tree is not None:
            left = tree.walk(tokens)
            self.last.pop(key) if left is None else self.last.update({key: left})
        start = max(0, len(text) - overlap)
        text += tokens
        self.wanted[key] = k
        self.proposer.commit(key, start, text[start:], k)

    def close(self, which: int) -> None:
        key = list(self.text)[which % len(self.text)]
        self.proposer.close(key)
        self.forget(key)

    def logits(self, context: Sequence[int]) -> torch.Tensor:
        return torch.as_tensor(self.model.logits_of(context)).view(1, -1)

    def forget(self, key: int) -> None:
        for mapping in (self.text, self.sampling, self.wanted, self.last):
            mapping.pop(key, None)

    def draft(self, mask: int) -> None:
        keys = [key for i, key in enumerate(self.text) if mask >> (i % 4) & 1]
        waiting = list(keys)
        rounds = 0
        while waiting:
            done = self.proposer.draft(waiting)
            self.proposer.check_invariants()
            for key in done.lost:
                self.forget(key)
            for key, tree in done.drafts:
                text = self.text[key]
                wanted = min(self.wanted[key], 50 - len(text) - 1)
                lane = Lane.DRAFT if key in self.sampled else Lane.SHARED
                expected = generate(self.logits, text, self.sampling[key], max(0, wanted), lane)
                assert tree.base_len == len(text)
                if not tree.token_ids and key in self.undrafted and len(text) > 16:
                    expected = []
                if wanted > 0:
                    self.undrafted.discard(key)
                if done.trees and tree.token_ids:  # in a batch with branches it may be shorter
                    expected = expected[: len(tree.token_ids)]
                assert list(tree.token_ids) == expected
                self.check_probs(key, tree)
                self.last[key] = tree
            for key in done.at_hand:
                wanted = min(self.wanted[key], 50 - len(self.text[key]) - 1)
                held = len(self.last[key].first_path(wanted))
                # One that runs ahead goes on from a short draft, too: the scorer takes it at once.
                assert 0 < held <= wanted
                assert held == wanted or self.proposer.traits.runs_ahead
            self.check_trees(done)
            answered = {key for key, _ in done.drafts} | {*done.lost, *done.at_hand}
            assert set(done.unfinished) == set(waiting) - answered
            waiting = done.unfinished
            rounds += 1
            assert rounds < 100, "no progress"

    def check_probs(self, key: int, tree: DraftTree) -> None:
        """What was drawn comes with what it was drawn from; point masses come with nothing."""
        if key not in self.sampled:
            assert tree.probs == ()
            return
        assert len(tree.probs) == len(tree.token_ids)
        text = list(self.text[key])
        for token, drawn_from in zip(tree.token_ids, tree.probs, strict=True):
            assert drawn_from is not None
            batch = SamplingBatch.build([self.sampling[key]], [len(text)])
            probs = process_logits(self.logits(text), batch).softmax(dim=-1)[0]
            assert (probs > 0).sum() == len(drawn_from.token_ids)
            assert probs[list(drawn_from.token_ids)].tolist() == pytest.approx(drawn_from.probs)
            text.append(token)

    def ahead(self, mask: int) -> None:
        keys = [key for i, key in enumerate(self.text) if mask >> (i % 4) & 1]
        done = self.proposer.ahead(keys, Pace())
        self.proposer.check_invariants()
        assert not done.lost + done.unfinished + done.at_hand + done.drafts
        self.check_trees(done)

    def check_trees(self, done: DraftRound) -> None:
        for key, tree in done.trees:
            assert key not in self.sampled, "branches are for coupled sessions"
            text, last = self.text[key], self.last.get(key)
            assert tree.base_len == len(text)
            if last is not None:  # else the text came to its end, where the next token is known
                draft, path = last.first_path(9), tree.first_path(9)
                both = min(len(draft), len(path))  # fewer than before if branches lost their pages
                assert path[:both] == draft[:both], "a tree goes on from the draft"
            self.last[key] = tree
            for node in range(-1, len(tree.token_ids)):
                if not tree.is_leaf(node):
                    # Whatever branch it is on, what it goes on with is what the model says.
                    context = [*text, *path_to(tree, node)]
                    assert [*tree.first_path(1, node)] == generate(
                        self.logits, context, self.sampling[key], 1
                    )


def path_to(tree: DraftTree, node: int) -> list[int]:
    path: list[int] = []
    while node >= 0:
        path.append(tree.token_ids[node])
        node = tree.parents[node]
    return path[::-1]


@settings(max_examples=300, deadline=None)
@given(
    history=histories,
    num_pages=st.sampled_from([16, 24, 64]),
    max_sessions=st.integers(1, 5),
    prefill_budget=st.sampled_from([1, 5, 17, 256]),
    max_branches=st.sampled_from([0, 1, 3, 8]),
    awaited=st.booleans(),
)
def test_draft_model_under_any_history_equals_generate(
    history: list[tuple[str, object, object, object]],
    num_pages: int,
    max_sessions: int,
    prefill_budget: int,
    max_branches: int,
    awaited: bool,
) -> None:
    """Any outcomes, batches, re-opens, shared prefixes, evictions and chunked prompts."""
    bench = Bench(num_pages, max_sessions, prefill_budget, max_branches)
    with patch.object(Brancher, "_awaited", awaited):
        play(bench, history)


def play(bench: Bench, history: list[tuple[str, object, object, object]]) -> None:
    for kind, a, b, c in history:
        match kind, a, b, c:
            case "open", list(prefix), (sampling, rule), int(k):
                bench.open(prefix, sampling, rule, k)
            case "commit", int(which), (node, more, overlap), int(k) if bench.text:
                bench.commit(which, node, more, overlap, k)
            case "ahead", int(mask), _, _:
                bench.ahead(mask)
            case "close", int(which), _, _ if bench.text:
                bench.close(which)
            case "draft", int(mask), _, _:
                bench.draft(mask)
        bench.proposer.check_invariants()
    for key in list(bench.text):
        bench.proposer.close(key)
    bench.proposer.check_invariants()
    assert bench.proposer.num_sessions == 0


@pytest.fixture(scope="module")
def llama() -> tuple[LlamaForCausalLM, DraftModelProposer]:
    torch.manual_seed(0)
    config = tiny_llama_config(max_position_embeddings=256)
    reference, model = LlamaForCausalLM(config).eval(), LlamaForCausalLM(config)
    model.load_state_dict(reference.state_dict())
    paged = build_paged_model(model, ModelOptions(page_size=8, num_pages=64, self_test=False))
    return reference, DraftModelProposer(
        paged, name="llama", limits=ProposerLimits(prefill_budget=40)
    )


@pytest.mark.parametrize("temperature", [0.0, 1.0])
def test_draft_model_of_llama_equals_transformers_generate(
    llama: tuple[LlamaForCausalLM, DraftModelProposer], temperature: float
) -> None:
    """A real model in float32: rounds of every accept length, two sessions in one batch."""
    reference, proposer = llama

    def logits(context: Sequence[int]) -> torch.Tensor:
        with torch.no_grad():
            return reference(torch.tensor([list(context)])).logits[:, -1]

    texts = {1: list(range(1, 60)), 2: [7, 8, 9]}
    params = {key: SamplingParams(temperature=temperature, seed=key) for key in texts}
    for key, text in texts.items():
        proposer.open(key, SessionStart(text, params[key], 4, 200))
    for accepted in (4, 0, 1, 4, 4, 2, 3, 4, 0):
        drafts: dict[int, DraftTree] = {}
        while len(drafts) < 2:  # the prompt comes in pieces, and has no draft of its own
            left = [key for key in texts if key not in drafts]
            drafts |= {key: tree for key, tree in proposer.draft(left).drafts if tree.token_ids}
        for key, text in texts.items():
            expected = generate(logits, text, params[key], 4)
            assert list(drafts[key].token_ids) == expected
            tokens = [
                *expected[:accepted],
                5 if accepted < 4 else generate(logits, text + expected, params[key], 1)[0],
            ]
            proposer.commit(key, len(text), tokens, 4)
            text += tokens
    if temperature == 0.0:
        output = reference.generate(
            torch.tensor([texts[1]]),
            max_new_tokens=4,
            do_sample=False,
            pad_token_id=0,
            eos_token_id=None,
        )
        [(_, tree)] = proposer.draft([1]).drafts
        assert list(tree.token_ids) == output[0, len(texts[1]) :].tolist()
    for key in texts:
        proposer.close(key)
    proposer.check_invariants()


def test_draft_model_when_session_reopens_finds_its_prefix() -> None:
    model = HashModel()
    proposer = DraftModelProposer(model, name="hash", limits=ProposerLimits(prefill_budget=20))
    prefix = [i % 32 for i in range(45)]
    proposer.open(1, SessionStart(prefix, GREEDY, 2, 60))
    assert proposer.draft([1]).unfinished == [1]
    assert proposer.draft([1]).unfinished == [1]
    assert len(proposer.draft([1]).drafts) == 1
    proposer.close(1)
    proposer.open(2, SessionStart(prefix, GREEDY, 2, 60))
    assert len(proposer.draft([2]).drafts) == 1  # within one prefill budget
    proposer.check_invariants()


def test_draft_model_in_spare_time_publishes_pages(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    shared: list[int] = []
    publish = BlockPool.publish

    def counted(pool: BlockPool, page: int, key: bytes) -> None:
        shared.append(page)
        publish(pool, page, key)

    monkeypatch.setattr(BlockPool, "publish", counted)
    model = HashModel()
    proposer = DraftModelProposer(model, name="hash")
    prefix = [i % 32 for i in range(2 * model.page_size + 1)]
    for key in (1, 2):  # the second one finds what the first one has
        proposer.open(key, SessionStart(prefix, GREEDY, 2, 60))
        assert len(shared) == 2 * (key - 1)
        assert len(proposer.draft([key]).drafts) == 1
    proposer.commit(1, len(prefix), [1] * model.page_size, 2)
    assert len(proposer.draft([1]).drafts) == 1
    assert len(shared) == 2
    proposer.ahead((), NO_PACE)
    assert len(shared) == 3
    proposer.check_invariants()


def test_draft_model_prompt_with_other_drafts_waits_one_round() -> None:
    proposer = DraftModelProposer(HashModel(32, 4, 200, 512), name="hash")
    for key in (1, 2):
        proposer.open(key, SessionStart([key] * 8, GREEDY, 4, 100))
    proposer.open(3, SessionStart([3] * 60, GREEDY, 4, 100))
    first = proposer.draft([1, 2, 3])
    assert [key for key, _ in first.drafts] == [1, 2]
    assert first.unfinished == [3]
    for key, tree in first.drafts:
        proposer.commit(key, 8, [*tree.token_ids, 7], 4)
    second = proposer.draft([3, 1, 2])
    drafts = dict(second.drafts)
    assert sorted(drafts) == [1, 2, 3], "it is not put off for ever"
    assert (len(drafts[1].token_ids), len(drafts[3].token_ids)) == (4, 0)
    proposer.commit(3, 60, [7], 4)
    [(_, tree)] = proposer.draft([3]).drafts
    assert (tree.base_len, len(tree.token_ids)) == (61, 4)


def test_draft_model_prompt_alone_is_drafted_at_once() -> None:
    proposer = DraftModelProposer(HashModel(32, 4, 200, 512), name="hash")
    for key in (1, 2):  # both at the same time
        proposer.open(key, SessionStart([key] * 60, GREEDY, 4, 100))
    assert [len(tree.token_ids) for _, tree in proposer.draft([1, 2]).drafts] == [4, 4]


def test_draft_model_session_that_fell_behind_is_drafted_at_once() -> None:
    proposer = DraftModelProposer(HashModel(32, 4, 200, 512), name="hash")
    for key in (1, 2):
        proposer.open(key, SessionStart([key] * 8, GREEDY, 4, 100))
    proposer.draft([1, 2])
    proposer.commit(1, 8, [5] * 40, 4)
    assert [len(tree.token_ids) for _, tree in proposer.draft([1]).drafts] == [4]


def test_draft_model_after_full_acceptance_feeds_last_draft_token() -> None:
    model = HashModel()
    proposer = DraftModelProposer(model, name="hash")
    proposer.open(1, SessionStart([1, 2, 3], GREEDY, 4, 60))
    [(_, tree)] = proposer.draft([1]).drafts
    before = model.forwards
    proposer.commit(1, 3, [*tree.token_ids, 9], 4)
    proposer.draft([1])
    assert model.forwards - before == 4  # one that catches up two tokens, three of one


def test_draft_model_without_pages_loses_newcomer_or_idle_session() -> None:
    model, clock = HashModel(num_pages=16), Clock()
    proposer = DraftModelProposer(
        model, name="hash", limits=ProposerLimits(prefill_budget=16), clock=clock
    )
    for session in (1, 2):
        proposer.open(session, SessionStart([session] * 24, GREEDY, 4, 60))
    while proposer.draft([1, 2]).unfinished:
        pass
    clock.now = 1.0
    proposer.draft([1])
    before = model.forwards
    proposer.open(3, SessionStart([3] * 24, GREEDY, 4, 60))
    assert proposer.draft([3]).lost == [3]
    assert model.forwards == before, "none of its prompt was processed"
    clock.now = IDLE_S
    proposer.open(4, SessionStart([3] * 24, GREEDY, 4, 60))
    done = proposer.draft([4])
    assert (done.lost, done.unfinished) == ([2], [4])
    assert [key for key, _ in proposer.draft([4]).drafts] == [4]
    assert proposer.num_sessions == 2
    proposer.check_invariants()


def branching(
    num_pages: int, *, max_branches: int, clock: Callable[[], float]
) -> DraftModelProposer:
    model = HashModel(num_pages=num_pages)
    limits, forks = ProposerLimits(max_branches=max_branches), EagerForks(model)
    return DraftModelProposer(model, name="hash", limits=limits, fork_drafter=forks, clock=clock)


def test_draft_model_without_pages_drops_branches_for_newcomer() -> None:
    proposer = branching(18, max_branches=16, clock=Clock())
    for session in (1, 2):
        proposer.open(session, SessionStart([session] * 16, GREEDY, 4, 60))
    assert not proposer.draft([1, 2]).lost
    proposer.commit(1, 16, [5], 4)
    proposer.commit(2, 16, [5], 4)
    assert not proposer.draft([1, 2]).lost
    proposer.ahead([1, 2], NO_PACE)
    assert proposer._pool.num_free < 6, "a page more is needed"
    proposer.open(3, SessionStart([3] * 17, GREEDY, 4, 60))
    done = proposer.draft([3])
    assert (done.lost, [key for key, _ in done.drafts]) == ([], [3])
    proposer.check_invariants()


@pytest.mark.parametrize(("length", "got_some"), [(16, 2), (20, 1), (24, 0)])
def test_draft_model_without_pages_for_branches_sends_no_draft_again(
    length: int, got_some: int
) -> None:
    proposer = branching(16, max_branches=1, clock=Clock())
    for session in (1, 2):
        proposer.open(session, SessionStart([session] * length, GREEDY, 4, 60))
    while proposer.draft([1, 2]).unfinished:
        pass
    for session in (1, 2):
        proposer.commit(session, length, [5], 4)
    assert len(proposer.draft([1, 2]).drafts) == 2
    assert len(proposer.ahead([1, 2], NO_PACE).trees) == got_some
    assert not proposer.ahead([1, 2], NO_PACE).trees, "or it would go on until the next commit"
    proposer.check_invariants()


@pytest.mark.parametrize(("newcomer", "length", "num_trees"), [(20, 2, 1), (36, 4, 0)])
def test_draft_model_without_pages_for_branches_shortens_no_draft(
    newcomer: int, length: int, num_trees: int
) -> None:
    proposer = branching(16, max_branches=1, clock=partial(next, count(0.0, 1e-3)))
    for session in (1, 2):
        proposer.open(session, SessionStart([session] * 8, GREEDY, 4, 60))
    assert len(proposer.draft([1, 2]).drafts) == 2
    [(_, tree), _] = proposer.ahead([1, 2], Pace(step_s=0.1)).trees
    branch = path_to(tree, len(tree.token_ids) - 1)
    proposer.commit(1, 8, branch[:1], 4)
    proposer.commit(2, 8, [31], 4)  # neither drafted nor the token of a branch
    proposer.open(3, SessionStart([3] * newcomer, GREEDY, 4, 60))
    assert not proposer.draft([3]).lost
    with patch.object(Brancher, "_awaited", False):
        done = proposer.draft([1, 2], Pace(step_s=0.001))
    assert done.at_hand == [1]
    assert [len(draft.token_ids) for _, draft in done.drafts] == [length]
    assert len(done.trees) == num_trees
    proposer.check_invariants()


def test_draft_model_newcomer_without_room_is_lost_unfed() -> None:
    model = HashModel()
    proposer = DraftModelProposer(model, name="hash", limits=ProposerLimits(max_sessions=2))
    for session in (1, 2):
        proposer.open(session, SessionStart([1], GREEDY, 4, 60))
    assert [key for key, _ in proposer.draft([1, 2]).drafts] == [1, 2]
    before = model.forwards
    proposer.open(3, SessionStart([3] * 40, GREEDY, 4, 60))
    done = proposer.draft([3])
    assert (done.lost, done.drafts) == ([3], [])
    assert model.forwards == before
    proposer.check_invariants()


def test_draft_model_after_failure_reports_lost_sessions(monkeypatch: pytest.MonkeyPatch) -> None:
    model = HashModel(32, 4, 64, 64)
    method = DraftModelProposer(model, name="hash", limits=ProposerLimits(max_sessions=1))
    method.open(1, SessionStart([1, 2, 3], GREEDY, 4, 64))
    method.open(2, SessionStart([1, 2, 3], GREEDY, 4, 64))  # there is no room

    def fail(*_: object) -> None:
        raise RuntimeError("out of memory")

    with monkeypatch.context() as patch:
        patch.setattr(model, "forward", fail)
        with pytest.raises(RuntimeError, match="out of memory"):
            method.draft([1, 2])
    assert method.draft([1]).lost == [2]


@pytest.mark.parametrize("prefix", [[1] * 65, [1, 32], []])
def test_draft_model_with_unusable_prefix_drafts_nothing(prefix: list[int]) -> None:
    """Too long, outside the vocabulary, empty: no draft, no Lost that would be opened again."""
    proposer = DraftModelProposer(HashModel(), name="hash")
    proposer.open(1, SessionStart(prefix, GREEDY, 4, 1000))
    assert proposer.draft([1]) == DraftRound(drafts=[(1, DraftTree.chain(len(prefix), ()))])
    proposer.check_invariants()


def test_draft_model_with_unknown_token_frees_pages() -> None:
    proposer = DraftModelProposer(HashModel(), name="hash")
    proposer.open(1, SessionStart([1, 2, 3], GREEDY, 4, 60))
    proposer.draft([1])
    proposer.commit(1, 3, [32], 4)
    proposer.check_invariants()
    assert proposer.draft([1]).drafts == [(1, DraftTree.chain(4, ()))]
    proposer.commit(1, 4, [1, 2], 4)
    assert proposer.draft([1]).drafts == [(1, DraftTree.chain(6, ()))]


def test_draft_model_at_model_length_drafts_within_it() -> None:
    proposer = DraftModelProposer(HashModel(max_model_len=16), name="hash")
    proposer.open(1, SessionStart([1] * 13, GREEDY, 8, 1000))
    [(_, tree)] = proposer.draft([1]).drafts
    assert len(tree.token_ids) == 2
    proposer.commit(1, 13, [1, 1, 1], 8)
    assert proposer.draft([1]).drafts[0][1].token_ids == ()


def test_draft_model_with_too_small_pool_is_refused() -> None:
    with pytest.raises(ConfigError, match="KV-cache memory"):
        DraftModelProposer(HashModel(num_pages=1, max_model_len=64), name="hash")
