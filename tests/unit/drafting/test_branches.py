"""Branches say what drafting their texts from scratch says, and own what they write."""

from __future__ import annotations

import random
from array import array
from collections.abc import Callable
from dataclasses import dataclass

import pytest
import torch
from transformers import LlamaForCausalLM

from outrider.draft_tree import DraftTree
from outrider.drafting.ahead.branches import (
    Branch,
    DraftedBranch,
    Trunk,
    adopt,
    draft_branches,
    drop,
)
from outrider.drafting.confidence import confidences_of
from outrider.drafting.draft_model.loops import BranchingModel, DraftModelLoops, EagerForks
from outrider.drafting.drafters import DraftInput, FedRows, ForkDrafter
from outrider.drafting.graphs.chains import draft_chains
from outrider.drafting.graphs.loop_inputs import make_shapes
from outrider.drafting.graphs.loops import DraftSampler, LoopCapture
from outrider.drafting.likeliest import cut_to_likeliest, top_candidates
from outrider.drafting.proposer import NO_PACE, Pace, SessionStart
from outrider.engine.batch import RowSlice
from outrider.engine.kv_cache.block_pool import BlockPool
from outrider.engine.model.loader import ModelOptions, build_paged_model
from outrider.engine.model.paged_model import PagedModel
from outrider.engine.sampling.noise import gumbel_noise
from outrider.engine.sampling.sample import SamplingBatch, process_logits, sample
from outrider.params import SamplingParams
from tests.support.models.hash_model import HashModel
from tests.support.models.recordable import (
    RecordableHashModel,
    recordable_llama,
    rerun,
    tiny_llama_config,
)
from tests.support.simulators.methods import draft_model

SAMPLINGS = (
    SamplingParams(temperature=0.0),
    SamplingParams(temperature=1.0, seed=11),
    SamplingParams(temperature=0.8, seed=2**63 + 5, top_k=20, top_p=0.9),
)
NUM_PAGES = 96


def hash_model() -> BranchingModel:
    return HashModel(vocab_size=64, page_size=4, num_pages=NUM_PAGES, max_model_len=128)


def llama() -> BranchingModel:
    torch.manual_seed(0)
    config = tiny_llama_config(max_position_embeddings=256)
    model = LlamaForCausalLM(config).double()
    return build_paged_model(model, ModelOptions(page_size=4, num_pages=NUM_PAGES, self_test=False))


@dataclass
class Session:
    tokens: list[int]
    table: array[int]
    sampling: SamplingParams
    chain: list[int]
    candidates: list[list[int]]  # [K + 1][F]


class Bench:
    """Sessions over one pool; what is expected is drafted with the same model, from scratch."""

    def __init__(
        self,
        model: BranchingModel,
        k: int,
        fanout: int,
        rng: random.Random,
        drafter: ForkDrafter | None = None,
    ) -> None:
        self.model, self.k, self.fanout, self.rng = model, k, fanout, rng
        self.drafter = drafter or EagerForks(model)
        self.pool = BlockPool(model.num_pages)
        taken = [self.pool.allocate() for _ in range(NUM_PAGES)]
        rng.shuffle(taken)
        self.pool.release(taken)  # scattered from here on
        self.sessions: list[Session] = []

    def pages(self, num_tokens: int) -> array[int]:
        return array("i", [self.pool.allocate() for _ in range(-(-num_tokens // 4))])

    def from_scratch(self, text: list[int], sampling: SamplingParams) -> list[int]:
        table = self.pages(len(text) + self.k)
        row = RowSlice(text, 0, table, 1)
        ((chain, _),) = draft_chains(self.model, [DraftInput(row, self.k, sampling)])
        self.pool.release(table)
        return chain

    def open(self, num_tokens: int, sampling: SamplingParams) -> None:
        text = [self.rng.randrange(60) for _ in range(num_tokens)]
        table = self.pages(num_tokens + self.k)
        rows = [RowSlice(text, 0, table, 1)]
        forks = self.drafter.forks(FedRows(rows, [sampling]), self.k, self.fanout).forks
        chain = forks.chains[0].tolist()
        assert chain == self.from_scratch(text, sampling)
        self.sessions.append(Session(text, table, sampling, chain, forks.candidates[0].tolist()))

    def branches(self) -> list[Branch]:
        made = [
            Branch(i, accepted, token)
            for i, session in enumerate(self.sessions)
            for accepted in range(self.k + 1)
            for token in session.candidates[accepted][accepted < self.k :]
        ]
        self.rng.shuffle(made)
        return made

    def draft(self, branches: list[Branch]) -> list[DraftedBranch]:
        trunks = [Trunk(len(s.tokens), s.table, s.sampling) for s in self.sessions]
        drafted, _ = draft_branches(
            self.drafter, self.pool, trunks, branches, num_tokens=self.k, fanout=self.fanout
        )
        return drafted

    def text(self, branch: Branch) -> list[int]:
        session = self.sessions[branch.trunk]
        return [*session.tokens, *session.chain[: branch.accepted], branch.token]

    def check(self, alive: list[DraftedBranch]) -> None:
        owned = [session.table for session in self.sessions] + [each.pages for each in alive]
        self.pool.check_invariants(owned)


@pytest.mark.parametrize("make", [hash_model, llama])
@pytest.mark.parametrize("k", [1, 3, 6])
def test_branches_after_any_round_equal_drafts_from_scratch(make: object, k: int) -> None:
    model: BranchingModel = make()  # type: ignore[operator]
    check_rounds(Bench(model, k, 2, random.Random(k)))


@pytest.mark.parametrize("make", [RecordableHashModel, recordable_llama])
@pytest.mark.parametrize("captured_k", [3, 5])  # a loop of more tokens knows what is beyond
def test_branches_in_captured_loops_equal_drafts_from_scratch(
    make: Callable[..., RecordableHashModel | PagedModel], captured_k: int
) -> None:
    model = make(num_pages=NUM_PAGES)
    shapes = make_shapes(
        rows=(4, 16), query_lens=(1, 20), num_tokens=(captured_k,), fanout=2, cut=True
    )
    drafter = DraftModelLoops(model, LoopCapture(shapes, rerun, DraftSampler()))
    check_rounds(Bench(model, 3, 2, random.Random(1), drafter))


def check_rounds(bench: Bench) -> None:
    rng = bench.rng
    for length, sampling in zip((9, 4, 15), SAMPLINGS, strict=True):
        bench.open(length, sampling)
    for _ in range(4):
        wanted = bench.branches()[:14]
        drafted = bench.draft(wanted)
        assert [each.branch for each in drafted] == sorted(wanted, key=lambda each: each.trunk)
        bench.check(drafted)
        for each in drafted:
            text = bench.text(each.branch)
            session = bench.sessions[each.branch.trunk]
            batch, grown = each.batch, each.batch.grown(each.row)
            guess, told_before, _ = batch.row(each.row)
            *tokens, end = guess
            assert tokens == bench.from_scratch(text, session.sampling)
            assert batch.forks.candidates[each.row, :, 0].tolist() == guess
            assert end == bench.from_scratch(text + tokens, session.sampling)[0]
            follow = bench.from_scratch([*text, *guess], session.sampling)
            assert grown.tokens == [*guess, follow[0]]
            assert grown.forks.candidates[:, 0].tolist() == grown.tokens
            told = confidences_of(grown.forks.gaps[:, 1])
            assert grown.confidences == told
            assert told_before == told[:-1]
        for i, session in enumerate(bench.sessions):
            mine = [each for each in drafted if each.branch.trunk == i]
            if mine:
                true = rng.choice(mine)
                session.tokens = bench.text(true.branch)
                session.chain = true.batch.row(true.row).tokens[:-1]
                session.candidates = true.batch.forks.candidates[true.row].tolist()
                adopt(bench.pool, session.table, true)
                mine.remove(true)
            drop(bench.pool, mine)
        bench.check([])


def test_draft_branches_without_pages_leaves_branches_out() -> None:
    bench = Bench(hash_model(), 3, 3, random.Random(1))
    bench.open(9, SAMPLINGS[0])
    spare = bench.pages(4 * (bench.pool.num_free - 3))
    wanted = bench.branches()
    drafted = bench.draft(wanted)
    assert 1 <= len(drafted) <= 3
    assert [each.branch for each in drafted] == wanted[: len(drafted)]
    drop(bench.pool, drafted)
    bench.pool.release(spare)
    bench.check([])


def test_draft_branches_when_model_fails_keeps_no_page() -> None:
    model = hash_model()
    bench = Bench(model, 3, 2, random.Random(1))
    bench.open(9, SAMPLINGS[0])
    model.fail_next = True  # type: ignore[attr-defined]
    with pytest.raises(RuntimeError, match="fell over"):
        bench.draft(bench.branches())
    bench.check([])


def test_top_candidates_of_sampled_rows_begin_with_the_sampled_token() -> None:
    logits = torch.randn(3, 64, generator=torch.Generator().manual_seed(3))
    logits[0, 5] = logits[0, 9] = logits[0].max() + 1  # the first of equals is drawn
    batch = SamplingBatch.build(SAMPLINGS, [4, 9, 70])
    tokens, gaps = top_candidates(logits, batch, 4)
    assert tokens[:, 0].tolist() == sample(logits, batch).tolist()
    assert tokens[0, :2].tolist() == [5, 9]
    assert gaps[0, :2].tolist() == [0.0, 0.0]
    noisy = (logits[1] + gumbel_noise(batch.seed[1:2], batch.position[1:2], 64)[0]).sort(
        descending=True
    )
    assert tokens[1].tolist() == noisy.indices[:4].tolist()
    torch.testing.assert_close(gaps[1], (noisy.values[0] - noisy.values[:4]).float())
    assert gaps.diff(dim=1).min() >= 0


def test_cut_to_likeliest_when_decided_equals_full_cut() -> None:
    logits = 4 * torch.randn(6, 1000, generator=torch.Generator().manual_seed(4))
    logits[5] *= 0.01  # nearly uniform: 256 tokens do not reach the top_p
    params = [
        SamplingParams(temperature=0.0),
        SamplingParams(temperature=0.7, top_k=5),
        SamplingParams(temperature=1.3, top_p=0.8),
        SamplingParams(temperature=1.0, min_p=0.1),
        SamplingParams(temperature=0.9, top_k=50, top_p=0.9, min_p=0.02),
        SamplingParams(temperature=1.0, top_p=0.9),
    ]
    batch = SamplingBatch.build(params, range(6))
    cut = cut_to_likeliest(logits, batch).isinf()
    exact = process_logits(logits, batch).isinf()
    assert cut[:5].equal(exact[:5])
    assert exact[1:].any(dim=1).all()
    assert not cut[5].any()


def test_draft_model_waits_for_candidates_in_spare_time() -> None:
    proposer, clock = draft_model()
    sampling = SamplingParams(temperature=0.0)
    proposer.open(1, SessionStart((5, 6, 7), sampling, num_draft_tokens=4, max_len=100))
    proposer.draft([1])
    [(_, tree)] = proposer.ahead([1], Pace(step_s=0.01)).trees
    launched = clock.now
    assert not proposer.ahead([1], NO_PACE).trees
    assert (waited := clock.now) > launched, "the device was busy with the candidates"
    proposer.commit(1, 3, tree.first_path(5), 4)
    assert clock.now == waited, "the commit need not wait for them"


def test_trees_hold_guesses_with_their_branches() -> None:
    proposer, _ = draft_model()
    sampling = SamplingParams(temperature=1.0)
    for key in (1, 2):
        start = SessionStart((5, 6, key), sampling, num_draft_tokens=4, max_len=100)
        proposer.open(key, start)
    proposer.draft([1, 2])
    trees = dict(proposer.ahead([1, 2], Pace(step_s=0.01)).trees)
    for key, state in proposer._sessions.items():
        guess, branches = state.ahead.guess, []
        assert len(state.ahead.branches) > 1
        told = state.ahead.confidences
        for (accepted, token), (*_, batch, row) in state.ahead.branches.items():
            tokens, confidences, _ = batch.row(row)
            if (accepted, token) == (len(guess) - 1, guess[-1]):
                branches.append((len(guess), tokens))
            else:
                branches.append((accepted, [token, *tokens]))
                told += b"\0"
            told += confidences
        assert trees[key] == DraftTree.branched(3, guess, branches, told)
