"""Captured forwards of rows of any lengths say what eager ones say, whatever fills them up."""

from __future__ import annotations

import random

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from outrider.config import EngineConfig
from outrider.draft_port import DraftOffer, PostedBlock
from outrider.draft_tree import DraftTree
from outrider.engine.batch import RowSlice, pack
from outrider.engine.engine import Engine
from outrider.engine.graphs.capture import Work
from outrider.engine.graphs.decode_buckets import make_buckets
from outrider.engine.graphs.decode_graphs import DecodeGraphs
from outrider.engine.graphs.prefill_graphs import PrefillGraphs
from outrider.engine.graphs.prefill_inputs import PrefillBucket, make_prefill_buckets
from outrider.engine.model.loader import ModelOptions, build_paged_model
from outrider.engine.model.paged_model import PagedModel
from outrider.engine.sampling.verify import choose_and_verify
from outrider.params import SamplingParams, StopParams
from outrider.policy.base import FixedPolicy
from outrider.types import Request
from tests.support.models.architectures import ARCHITECTURES, random_model
from tests.support.models.by_tensors import by_tensors
from tests.unit.graphs.test_decode_graphs import fill_pools, rerun

PAGE_SIZE, NUM_PAGES, MAX_MODEL_LEN = 4, 96, 60
BUCKETS = [PrefillBucket(n, rows) for n in (8, 24, 70) for rows in (2, 6)]
WITH_TREES = [*BUCKETS, PrefillBucket(24, 6, trees=True), PrefillBucket(70, 6, trees=True)]


def make_model(architecture: str = "llama", fused: bool = True) -> PagedModel:
    model = build_paged_model(
        random_model(ARCHITECTURES[architecture], torch.float64),
        ModelOptions(
            page_size=PAGE_SIZE, num_pages=NUM_PAGES, max_model_len=MAX_MODEL_LEN, fused=fused
        ),
    )
    model._backend = by_tensors
    return model


@pytest.fixture(scope="module")
def model() -> PagedModel:
    return make_model()


@pytest.fixture(scope="module")
def forwards(model: PagedModel) -> PrefillGraphs:
    return PrefillGraphs(model, WITH_TREES, capture=rerun)


def make_rows(rng: random.Random, lengths: list[int], trees: bool = False) -> list[RowSlice]:
    """Prompts' pieces without logits, prompts' ends, and drafts to verify, some of them `trees`."""
    pages = rng.sample(range(NUM_PAGES), NUM_PAGES)
    rows = []
    for length in lengths:
        start = rng.randint(0, min(30, MAX_MODEL_LEN - length))
        table = [pages.pop() for _ in range(-(-(start + length) // PAGE_SIZE))]
        tokens = [rng.randrange(97) for _ in range(length)]
        row = RowSlice(tokens, start, table, rng.choice((0, 1, length)))
        if trees and length <= 5:
            nodes = [rng.randint(-1, node - 1) for node in range(length - 1)]
            row = row._replace(num_logits=length, parents=nodes)
        rows.append(row)
    return rows


def own_slots(rows: list[RowSlice]) -> list[int]:
    return [
        row.block_table[place // PAGE_SIZE] * PAGE_SIZE + place % PAGE_SIZE
        for row in rows
        for place in range(row.start, row.start + len(row.token_ids))
    ]


def written(model: PagedModel, rows: list[RowSlice]) -> Tensor:
    """Keys and values of the last layer in the rows' own slots."""
    return torch.cat(model.pools.layer(2).gather(torch.tensor(own_slots(rows))))


@settings(max_examples=60, derandomize=True, deadline=None)
@given(
    lengths=st.lists(st.integers(1, 5), min_size=1, max_size=5),
    long=st.integers(1, 45),
    trees=st.booleans(),
    seed=st.integers(0, 2**32),
)
def test_prefill_graphs_on_any_rows_equal_eager_forward(
    model: PagedModel,
    forwards: PrefillGraphs,
    lengths: list[int],
    long: int,
    trees: bool,
    seed: int,
) -> None:
    rng = random.Random(seed)
    rows = make_rows(rng, rng.sample([*lengths, long], len(lengths) + 1), trees)
    fill_pools(model, seed)
    expected = model.forward(pack(rows, PAGE_SIZE, model.device))
    kept = written(model, rows)
    fill_pools(model, seed)
    logits = forwards.logits(rows)
    assert logits is not None
    torch.testing.assert_close(logits, expected)
    torch.testing.assert_close(written(model, rows), kept)
    fill_pools(model, seed)
    assert forwards.feed(rows)
    torch.testing.assert_close(written(model, rows), kept)


def test_prefill_graphs_write_only_own_and_scratch_slots(
    model: PagedModel, forwards: PrefillGraphs
) -> None:
    rows = make_rows(random.Random(7), [3, 30, 1])
    before = model.pools.layer(1).keys.clone()
    assert forwards.feed(rows)
    changed = (before != model.pools.layer(1).keys).any(dim=-1).any(dim=0).nonzero().flatten()
    own = set(own_slots(rows))
    scratch = range(model.scratch_page * PAGE_SIZE, (model.scratch_page + 1) * PAGE_SIZE)
    assert own <= set(changed.tolist()) <= own | set(scratch)


def test_prefill_graphs_when_no_bucket_fits_write_nothing(model: PagedModel) -> None:
    forwards = PrefillGraphs(model, BUCKETS, capture=rerun)
    rng = random.Random(3)
    for rows in (
        make_rows(rng, [40, 31]),  # tokens
        make_rows(rng, [1] * 7),  # rows
        [make_rows(rng, [3])[0]._replace(parents=(-1, -1), num_logits=3)],
    ):
        before = model.pools.layer(1).keys.clone()
        assert forwards.logits(rows) is None
        assert not forwards.feed(rows)
        assert torch.equal(before, model.pools.layer(1).keys)


def test_prefill_graphs_leave_trees_beyond_the_longest_context_to_eager_steps(
    forwards: PrefillGraphs,
) -> None:
    """Their depth is within it, and their last slots lie behind a bucket's page table."""
    row = RowSlice(range(16), MAX_MODEL_LEN - 3, range(19), 16, (-1,) * 15)
    assert forwards.logits([row]) is None
    assert forwards.logits([row._replace(start=MAX_MODEL_LEN - 16)]) is not None


def test_prefill_graphs_work_may_first_run_in_any_order(model: PagedModel) -> None:
    """As it does where all kernels are compiled at once."""
    works: list[Work] = []

    def note(work: Work) -> Work:
        works.append(work)
        return work

    PrefillGraphs(model, WITH_TREES, capture=note)
    for work in reversed(works):
        work()


def texts(
    model: PagedModel, runner: DecodeGraphs | None, parents: tuple[int, ...]
) -> list[list[int]]:
    """Of requests that come while others decode, with drafts that are partly right."""
    config = EngineConfig(
        page_size=PAGE_SIZE,
        num_pages=NUM_PAGES,
        max_num_seqs=4,
        max_num_batched_tokens=24,
        max_model_len=MAX_MODEL_LEN,
        num_speculative_tokens=len(parents),
    )
    policy = FixedPolicy(len(parents), max_wait_s=0.0)
    engine = Engine(model, config, policy=policy, runner=runner)
    rng = random.Random(1)
    said: list[list[int]] = [[] for _ in range(7)]
    prompts = [[rng.randrange(97) for _ in range(rng.randint(1, 40))] for _ in said]
    waiting, left = list(range(7)), set(range(7))
    while left:
        if waiting and len(left) - len(waiting) < 3:
            i = waiting.pop()
            sampling = SamplingParams(temperature=float(i % 2), seed=i)
            stop = StopParams(max_tokens=9 + i, ignore_eos=True)
            engine.submit(Request(i, tuple(prompts[i]), sampling=sampling, stop=stop))
            engine.set_drafting(i, DraftOffer("a", len(parents)))
        for i in left.difference(waiting):
            tokens = [rng.randrange(97), 5, *[rng.randrange(97) for _ in parents[2:]]]
            draft = DraftTree(len(prompts[i]) + len(said[i]), tuple(tokens), parents)
            engine.post_block(PostedBlock(i, draft, "a", 1))
        events = engine.step()
        assert events is not None
        assert not events.failures
        for commit in events.commits:
            said[commit.session_id] += commit.token_ids
            if commit.finish_reason is not None:
                left.discard(commit.session_id)
    engine.check_invariants()
    return said


@pytest.mark.parametrize("parents", [(-1, 0), (-1, 0, -1, 2)], ids=["chains", "trees"])
def test_engine_with_prefill_graphs_keeps_texts(
    model: PagedModel, monkeypatch: pytest.MonkeyPatch, parents: tuple[int, ...]
) -> None:
    forwards = PrefillGraphs(model, WITH_TREES, capture=rerun)
    longest = 1 + len(parents)
    runner = DecodeGraphs(
        model,
        make_buckets(4, (1, longest), (longest,)),
        capture=rerun,
        choose_and_verify=choose_and_verify,
        forwards=forwards,
    )
    expected = texts(model, None, parents)
    # Nothing may go the eager way: not even the longest prompts, which come in pieces.
    monkeypatch.setattr(model, "forward", None)
    assert texts(model, runner, parents) == expected


def test_prefill_graphs_when_bucket_is_slower_than_larger_drop_it(model: PagedModel) -> None:
    times = {(8, 2): 3.0, (8, 6): 1.0, (24, 2): 2.0, (24, 6): 5.0, (70, 2): 4.0, (70, 6): 4.0}
    tree_times = {24: 6.0, 70: 8.0}  # to which those of other buckets are no match
    seconds = iter(
        [
            tree_times[bucket.tokens] if bucket.trees else times[bucket.tokens, bucket.rows]
            for bucket in sorted(WITH_TREES)[::-1]
        ]
    )
    forwards = PrefillGraphs(model, WITH_TREES, capture=rerun, seconds=lambda _: next(seconds))
    left = [(bucket.tokens, bucket.rows) for bucket in forwards._buckets if not bucket.trees]
    assert left == [(8, 6), (24, 2), (70, 2), (70, 6)]
    assert [bucket.tokens for bucket in forwards._buckets if bucket.trees] == [24, 70]
    rows = make_rows(random.Random(3), [9, 1, 4])
    logits = forwards.logits(rows)  # by (70, 6), in place of (24, 6)
    assert logits is not None
    torch.testing.assert_close(logits, model.forward(pack(rows, PAGE_SIZE, torch.device("cpu"))))


def test_paged_model_when_not_fused_is_not_layered(model: PagedModel) -> None:
    assert model.layered
    assert not make_model(fused=False).layered
    assert not make_model("mixtral").layered


def test_make_prefill_buckets_for_any_limit_covers_it() -> None:
    assert make_prefill_buckets(512, 8) == [PrefillBucket(n, 8) for n in range(64, 513, 64)]
    assert make_prefill_buckets(100, 300) == [PrefillBucket(64, 64), PrefillBucket(128, 128)]
    assert make_prefill_buckets(1100, 64)[-2:] == [PrefillBucket(1024, 64), PrefillBucket(1152, 64)]
    assert max(bucket.tokens for bucket in make_prefill_buckets(8192, 8)) == 2048
    assert make_prefill_buckets(1, 1) == [PrefillBucket(64, 1)]
    with_trees = make_prefill_buckets(200, 8, trees=True)
    assert with_trees[:2] == [PrefillBucket(n, 8, trees=True) for n in (128, 256)]
    assert with_trees[2:] == make_prefill_buckets(200, 8)
