"""Captured steps say what eager steps say, whatever fills them up."""

from __future__ import annotations

import random
from dataclasses import fields, replace
from itertools import chain

import numpy as np
import pytest
import torch
from hypothesis import HealthCheck, assume, given, settings
from hypothesis import strategies as st
from torch import Tensor

from outrider.draft_port import DeviceDrafts, DeviceNodes
from outrider.draft_tree import chain_parents
from outrider.engine.batch import PackedBatch, RowSlice
from outrider.engine.graphs.capture import Work
from outrider.engine.graphs.decode_buckets import Bucket, make_buckets
from outrider.engine.graphs.decode_graphs import DecodeGraphs
from outrider.engine.graphs.decode_inputs import DecodeInputs
from outrider.engine.graphs.staging import PageLayout
from outrider.engine.model.loader import ModelOptions, build_paged_model
from outrider.engine.model.paged_model import PagedModel
from outrider.engine.runner import Pending, Runner
from outrider.engine.sampling.sample import SamplingBatch
from outrider.engine.sampling.synthetic import forced_choices
from outrider.engine.sampling.verify import choose_and_verify
from outrider.engine.sequence import Sequence
from outrider.engine.step import ScheduledRow, Step, StepResult
from outrider.engine.tree_mask import MAX_TREE_NODES
from outrider.params import (
    REQUEST_RULES,
    SamplingParams,
    SpeculationParams,
    Verification,
    VerificationRule,
)
from outrider.policy.row import Drafting, Offered
from outrider.types import Request
from tests.property.test_engine_equality import MAX_LEN, VOCAB
from tests.support.models.architectures import ARCHITECTURES, random_model
from tests.support.models.by_tensors import by_tensors
from tests.support.models.hash_model import HashModel, context_hash
from tests.support.models.recordable import rerun

PAGE_SIZE, NUM_PAGES, MAX_MODEL_LEN = 4, 64, 60
MAX_PAGES = MAX_MODEL_LEN // PAGE_SIZE
LAYOUT = PageLayout(MAX_MODEL_LEN, PAGE_SIZE, NUM_PAGES, torch.device("cpu"))
K = 4
SAMPLINGS = (
    SamplingParams(temperature=0.0),
    SamplingParams(temperature=1.0, seed=5),
    SamplingParams(temperature=0.6, seed=2**64 - 1),
    SamplingParams(temperature=1.5, seed=2**40, top_k=9),
    SamplingParams(temperature=0.9, seed=3, top_p=0.7, min_p=0.02),
    SamplingParams(temperature=0.0, repetition_penalty=1.5, logit_bias=((5, 3.0),)),
    SamplingParams(temperature=0.8, seed=8, frequency_penalty=1.0),
)

RAGGED = (
    *(Bucket(K + 1, 7, trees, tokens) for tokens in (9, 14, 23) for trees in (False, True)),
    Bucket(9, 4, True, 15),
)

SPECULATIONS = (
    *(SpeculationParams(),) * 16,  # most steps are coupled throughout, and stay captured
    *(SpeculationParams(verification=Verification(rule)) for rule in REQUEST_RULES),
)


def count_launches(runner: DecodeGraphs) -> list[Step]:
    """The steps that `runner` hands to its eager runner, from now on."""
    eager: list[Step] = []
    launch = runner._runner.launch

    def counting(step: Step) -> Pending:
        eager.append(step)
        return launch(step)

    runner._runner.launch = counting  # type: ignore[method-assign]
    return eager


@pytest.fixture(scope="module")
def model() -> PagedModel:
    paged = build_paged_model(
        random_model(ARCHITECTURES["llama"], torch.float64),
        ModelOptions(page_size=PAGE_SIZE, num_pages=NUM_PAGES, max_model_len=MAX_MODEL_LEN),
    )
    paged._backend = by_tensors
    fill_pools(paged, seed=0)
    return paged


def fill_pools(model: PagedModel, seed: int) -> None:
    """As if other sequences had been everywhere, on the scratch page, too."""
    generator = torch.Generator().manual_seed(seed)
    for layer in range(3):
        pool = model.pools.layer(layer)
        for tensor in (pool.keys, pool.values):
            tensor.copy_(torch.randn(tensor.shape, generator=generator, dtype=tensor.dtype))


def make_row(
    rng: random.Random,
    num_drafts: int,
    pages: list[int],
    vocab: int,
    trees: bool = False,
    captured: bool = False,
    sampling: SamplingParams | None = None,
) -> ScheduledRow:
    """`trees`: it may hold one; `captured`: its draw is, too; `sampling`: else any."""
    start = rng.randint(0, MAX_MODEL_LEN - 1 - num_drafts)
    tokens = tuple(rng.randrange(vocab) for _ in range(1 + num_drafts))
    needed = min(-(-(start + len(tokens)) // PAGE_SIZE) + rng.randint(0, 2), MAX_PAGES)
    seq = Sequence(
        Request(
            0,
            (1,),
            sampling=sampling or rng.choice(SAMPLINGS[:5] if captured else SAMPLINGS),
            speculation=rng.choice(SPECULATIONS[:1] if captured else SPECULATIONS),
            top_logprobs=None if captured else rng.choice((None, None, 3)),
        ),
        max_len=MAX_MODEL_LEN,
        stop_ids=frozenset(),
        drafting=Drafting(Offered(K)),
        submitted_at=0.0,
    )
    seq.block_table = [pages.pop() for _ in range(min(needed, len(pages)))]
    while len(seq.block_table) * PAGE_SIZE < start + len(tokens):
        start -= 1
    plain = seq.request.verification_rule is VerificationRule.COUPLED and not seq.edits_logits
    parents: tuple[int, ...] = ()
    if trees and plain and num_drafts and rng.random() < 0.7:
        parents = tuple(rng.randint(-1, i - 1) for i in range(num_drafts))
    piece = RowSlice(tokens, start, seq.block_table, len(tokens), parents)
    return ScheduledRow(seq, piece, tokens[1:])


def make_step(rng: random.Random, num_drafts: list[int], vocab: int, trees: bool = False) -> Step:
    pages = rng.sample(range(NUM_PAGES), NUM_PAGES)
    rows, captured = [], trees and rng.random() < 0.6
    for i, drafts in enumerate(num_drafts):
        share = [pages.pop() for _ in range(len(pages) // (len(num_drafts) - i))]
        rows.append(make_row(rng, drafts, share, vocab, trees, captured))
    return Step(tuple(rows), sum(n + 1 for n in num_drafts))


def with_true_drafts(step: Step, runner: Runner, rng: random.Random) -> Step:
    """The same step with some drafts replaced by what the target chooses."""
    for _ in range(K):
        drawn = runner._draw(runner.forward(step)[0], list(step.rows)).tolist()
        rows = []
        for row in step.rows:
            tokens = list(row.slice.token_ids)
            chosen, drawn = drawn[: len(tokens)], drawn[len(tokens) :]
            for i, parent in enumerate(row.slice.parents or chain_parents(len(row.draft))):
                # Of siblings not always the first one.
                if rng.random() < (0.5 if row.slice.parents else 0.8):
                    tokens[1 + i] = chosen[1 + parent]
            piece = row.slice._replace(token_ids=tuple(tokens))
            rows.append(ScheduledRow(row.seq, piece, tuple(tokens[1:])))
        step = Step(tuple(rows), step.num_tokens)
    return step


steps = st.lists(st.integers(0, K), min_size=1, max_size=7)


@pytest.fixture(scope="module")
def graphs(model: PagedModel) -> DecodeGraphs:
    buckets = [
        *make_buckets(7, (1, 3, K + 1), (K + 1, 9)),
        *RAGGED,
    ]
    return DecodeGraphs(model, buckets, capture=rerun, choose_and_verify=choose_and_verify)


@settings(
    max_examples=90, derandomize=True, suppress_health_check=[HealthCheck.function_scoped_fixture]
)
@given(
    num_drafts=steps | st.lists(st.integers(0, 8), min_size=1, max_size=4),
    seed=st.integers(0, 2**32),
    trees=st.booleans(),
)
def test_decode_graphs_on_any_step_equal_eager_runner(
    model: PagedModel, graphs: DecodeGraphs, num_drafts: list[int], seed: int, trees: bool
) -> None:
    rng = random.Random(seed)
    eager = Runner(model)
    step = with_true_drafts(make_step(rng, num_drafts, model.vocab_size, trees), eager, rng)
    assume(max(num_drafts) <= K or any(row.slice.parents for row in step.rows))
    expected = eager.launch(step).wait()
    kept = kept_keys(model, step, expected)
    left_to_eager = count_launches(graphs)
    result = graphs.launch(step).wait()
    torch.testing.assert_close(kept_keys(model, step, result), kept)
    assert not left_to_eager
    assert list(result.accepted) == list(expected.accepted)
    for got, want, accepted in zip(
        result.choices, expected.choices, expected.accepted, strict=True
    ):
        assert list(got[: accepted + 1]) == list(want[: accepted + 1])
    assert list(map(len, result.logprobs)) == list(map(len, expected.logprobs))
    pairs = zip(chain(*result.logprobs), chain(*expected.logprobs), strict=True)
    for got_one, want_one in pairs:
        assert got_one.logprob == pytest.approx(want_one.logprob)
        assert [token for token, _ in got_one.top] == [token for token, _ in want_one.top]


def test_chain_longer_than_a_mask_has_bits_is_verified_beside_a_tree() -> None:
    paged = build_paged_model(
        random_model(ARCHITECTURES["llama"], torch.float64),
        ModelOptions(page_size=PAGE_SIZE, num_pages=NUM_PAGES, max_model_len=128),
    )
    paged._backend = by_tensors
    graphs = DecodeGraphs(
        paged, [Bucket(80, 2, trees=True)], capture=rerun, choose_and_verify=choose_and_verify
    )
    rng, size, greedy = random.Random(1), MAX_TREE_NODES + 8, SAMPLINGS[0]
    seqs = []
    for table in (range(30), range(30, NUM_PAGES)):
        seqs.append(make_row(rng, 0, [*table], 1, captured=True, sampling=greedy).seq)
        seqs[-1].block_table = [*table]
    draft: tuple[int, ...] = (0,) * size
    while True:  # each time one more token is right at least
        chain_part = RowSlice((7, *draft), 0, seqs[0].block_table, 1 + size)
        tree_part = RowSlice((7, 8, 9), 0, seqs[1].block_table, 3, (-1, -1))
        rows = (ScheduledRow(seqs[0], chain_part, draft), ScheduledRow(seqs[1], tree_part, (8, 9)))
        step = Step(rows, size + 4)
        expected = Runner(paged).launch(step).wait()
        if expected.accepted[0] == size:
            break
        draft = tuple(expected.choices[0][:size])
    result = graphs.launch(step).wait()
    assert list(result.accepted) == list(expected.accepted)
    for got, want, accepted in zip(
        result.choices, expected.choices, expected.accepted, strict=True
    ):
        assert list(got[: accepted + 1]) == list(want[: accepted + 1])


def test_decode_graphs_with_synthetic_acceptance_equal_eager_runner(model: PagedModel) -> None:
    rates = (0.8, 0.5, 0.3, 0.1)
    choose = forced_choices(choose_and_verify, rates, torch.device("cpu"))
    graphs = DecodeGraphs(
        model, make_buckets(7, (1, K + 1)), capture=rerun, choose_and_verify=choose
    )
    left_to_eager = count_launches(graphs)
    speculation = SpeculationParams(
        verification=Verification(VerificationRule.SYNTHETIC, rates=rates)
    )
    seen: set[int] = set()
    for seed in range(20):
        rng = random.Random(seed)
        rows: list[ScheduledRow] = []
        for row in make_step(rng, [4, 0, 2, 4, 3, 1], model.vocab_size).rows:
            request = replace(row.seq.request, speculation=speculation, top_logprobs=None)
            row.seq.request = request
            rows.append(row)
        step = Step(tuple(rows), sum(len(row.draft) + 1 for row in rows))
        expected = Runner(model).launch(step).wait()
        result = graphs.launch(step).wait()
        assert list(result.accepted) == list(expected.accepted)
        seen.update(result.accepted)
        for row, got, want in zip(step.rows, result.choices, expected.choices, strict=True):
            assert list(got[: len(row.draft) + 1]) == list(want[: len(row.draft) + 1])
    assert not left_to_eager
    assert seen == {0, 1, 2, 3, 4}


def kept_keys(model: PagedModel, step: Step, result: StepResult) -> Tensor:
    """What a step left behind of the texts that it confirmed: compacted, if there were trees."""
    slots = []
    for row, accepted in zip(step.rows, result.accepted, strict=True):
        for place in range(row.slice.start, row.slice.start + 1 + accepted):
            page, offset = divmod(place, PAGE_SIZE)
            slots.append(row.slice.block_table[page] * PAGE_SIZE + offset)
    return torch.cat(model.pools.layer(2).gather(torch.tensor(slots)))


def test_decode_graphs_with_padding_keep_real_logits(model: PagedModel) -> None:
    graphs = DecodeGraphs(model, [Bucket(5, 8)], capture=rerun, choose_and_verify=choose_and_verify)
    step = make_step(random.Random(4), [0, 4, 2], model.vocab_size)
    real = [0, *range(5, 10), *range(10, 13)]
    seen = []
    for fill in (0.0, 1e3, -1e6):
        for layer in range(3):
            pool = model.pools.layer(layer)
            pool.keys[:, model.scratch_page * PAGE_SIZE :] = fill
            pool.values[:, model.scratch_page * PAGE_SIZE :] = fill
        graphs.launch(step).wait()
        seen.append(graphs._logits[real].clone())
    eager, _ = Runner(model).forward(step)
    for logits in seen:
        torch.testing.assert_close(logits, eager)


def test_decode_graphs_write_only_own_and_scratch_pages(model: PagedModel) -> None:
    graphs = DecodeGraphs(model, [Bucket(5, 8)], capture=rerun, choose_and_verify=choose_and_verify)
    step = make_step(random.Random(5), [0, 4, 2], model.vocab_size)
    before = model.pools.layer(1).keys.clone()
    graphs.launch(step).wait()
    written = (before != model.pools.layer(1).keys).any(dim=-1).any(dim=0).nonzero().flatten()
    allowed = set(range(model.scratch_page * PAGE_SIZE, (model.scratch_page + 1) * PAGE_SIZE))
    for row in step.rows:
        for position in range(row.slice.start, row.slice.start + len(row.slice.token_ids)):
            page, offset = divmod(position, PAGE_SIZE)
            allowed.add(row.slice.block_table[page] * PAGE_SIZE + offset)
    assert set(written.tolist()) <= allowed


def test_decode_graphs_trial_times_cover_every_bucket(model: PagedModel) -> None:
    buckets = make_buckets(3, (1, 2))
    graphs = DecodeGraphs(model, buckets, capture=rerun, choose_and_verify=choose_and_verify)
    times = graphs.trial_times()
    assert sorted((rows, tokens) for rows, tokens, _ in times) == sorted(
        (bucket.rows, bucket.tokens) for bucket in buckets
    )
    assert all(seconds > 0 for _, _, seconds in times)


def test_decode_graphs_work_may_run_over_inputs_of_other_buckets(model: PagedModel) -> None:
    """Kernels are compiled so."""
    works: list[Work] = []

    def note(work: Work) -> Work:
        works.append(work)
        return work

    buckets = make_buckets(7, (1, K + 1), (K + 1, 9))
    DecodeGraphs(model, buckets, capture=note, choose_and_verify=choose_and_verify)
    before = [model.pools.layer(i).keys[:, : NUM_PAGES * PAGE_SIZE].clone() for i in range(3)]
    for work in works:
        work()
    for i, keys in enumerate(before):
        assert torch.equal(model.pools.layer(i).keys[:, : NUM_PAGES * PAGE_SIZE], keys)


def test_decode_graphs_when_no_bucket_fits_run_eagerly(model: PagedModel) -> None:
    graphs = DecodeGraphs(
        model, make_buckets(2, (1, 3)), capture=rerun, choose_and_verify=choose_and_verify
    )
    rng = random.Random(1)
    long, wide = (make_step(rng, drafts, model.vocab_size) for drafts in ([3], [0, 0, 0]))
    row = make_row(rng, 2, list(range(NUM_PAGES)), model.vocab_size)
    piece = RowSlice(row.slice.token_ids, row.slice.start, row.slice.block_table, num_logits=1)
    prompt = Step((ScheduledRow(row.seq, piece, ()),), 3)
    left_to_eager = count_launches(graphs)
    for step in (long, wide, prompt):
        result = graphs.launch(step).wait()
        assert result.accepted == Runner(model).launch(step).wait().accepted
    assert left_to_eager == [long, wide, prompt]


@pytest.mark.parametrize("trees", [False, True])
@pytest.mark.parametrize("num_drafts", [[4, 0, 0, 0], [1, 0, 2, 0, 1, 0, 3], [0, 4, 4, 4, 4]])
def test_decode_graphs_run_no_more_tokens_than_the_smallest_bucket_of_enough(
    graphs: DecodeGraphs, num_drafts: list[int], trees: bool
) -> None:
    rng = random.Random(len(num_drafts))
    pages = rng.sample(range(NUM_PAGES), NUM_PAGES)
    rows = [
        make_row(rng, n, [pages.pop() for _ in range(9)], 97, trees, captured=True)
        for n in num_drafts
    ]
    step = Step(tuple(rows), sum(num_drafts) + len(rows))
    bucket = graphs._fit(step)
    assert bucket is not None
    assert bucket.tokens == {4: 9, 7: 14, 5: 23}[len(num_drafts)]


def test_make_buckets_for_any_share_of_drafts_hold_every_step() -> None:
    """And a chain pays for at most twice its tokens, or twice those of a quarter of the drafts."""
    for most, k, trees in ((1, 4, False), (37, 4, True), (64, 1, False), (300, 8, True)):
        buckets = make_buckets(most, (1, k + 1), (k + 1,) if trees else ())
        held = [b for b in buckets if b.query_len > 1 and b.trees is trees]
        for rows in range(1, most + 1):
            for tokens in (rows + 1, rows * (k + 2) // 2, rows * (k + 1)):
                bucket = next(b for b in held if b.rows >= rows and b.tokens >= tokens)
                assert trees or bucket.tokens <= 64 + 2 * max(tokens, rows * (1 + k / 4))


def one_row(seq: Sequence, start: int, draft: tuple[int, ...], *parents: int) -> ScheduledRow:
    piece = RowSlice((7, *draft), start, seq.block_table, 1 + len(draft), parents)
    return ScheduledRow(seq, piece, draft)


def test_decode_graphs_with_nodes_beyond_context_run_eagerly(
    model: PagedModel, graphs: DecodeGraphs
) -> None:
    seq = make_row(random.Random(3), 0, list(range(NUM_PAGES)), 97, captured=True, trees=True).seq
    start = MAX_MODEL_LEN - 2
    seq.block_table = list(range(MAX_PAGES + 4))  # more than a captured step has places for
    tree = Step((one_row(seq, start, (1, 2, 3, 4, 5), *(-1,) * 5),), 6)
    chain_step = Step((one_row(seq, start, (1,)),), 2)
    left_to_eager = count_launches(graphs)
    for step in (tree, chain_step):
        expected = Runner(model).launch(step).wait()
        result = graphs.launch(step).wait()
        assert list(result.accepted) == list(expected.accepted)
        assert result.choices[0][0] == expected.choices[0][0]
    assert left_to_eager == [tree]


def test_decode_inputs_when_rows_move_equal_fresh_inputs() -> None:
    """The host's buffer says the same as one that never saw another step."""
    inputs = DecodeInputs([Bucket(5, 8)], LAYOUT)
    rng = random.Random(2)
    rows = list(make_step(rng, [4, 0, 2, 1, 3], 97).rows)
    spare = [63, 62, 61, 60]
    for _ in range(60):
        present = rng.sample(rows, rng.randint(1, len(rows)))
        change = rng.random()
        if change < 0.3 and spare:
            rng.choice(rows).seq.block_table.append(spare.pop())
        elif change < 0.4:
            row, old = present[0], present[0].slice
            row.seq.block_table = list(reversed(row.seq.block_table))
            piece = RowSlice(old.token_ids, old.start, row.seq.block_table, old.num_logits)
            present[0] = ScheduledRow(row.seq, piece, row.draft)
            rows[rows.index(row)] = present[0]
        elif change < 0.6:
            rng.shuffle(rows)
        fitting = [Bucket(5, n) for n in (1, 2, 4, 8) if n >= len(present)]
        bucket = rng.choice([*fitting, Bucket(5, 8, False, 20)])
        for step in (present, [cut(row, rng.randint(0, len(row.draft))) for row in present]):
            fresh = DecodeInputs([Bucket(5, 8)], LAYOUT)
            assert fill(inputs, step, bucket) == fill(fresh, step, bucket)
            for used in (inputs, fresh):
                used.send(bucket)
            for a, b in zip(tensors(inputs, bucket), tensors(fresh, bucket), strict=True):
                assert torch.equal(a, b)


@pytest.mark.parametrize("bucket", [Bucket(5, 4), Bucket(5, 4, False, 9), Bucket(5, 6, False, 14)])
def test_decode_inputs_take_device_drafts_of_any_lengths(bucket: Bucket) -> None:
    inputs = DecodeInputs([bucket], LAYOUT)
    rows = make_step(random.Random(6), [2, 0, 4], 97).rows
    late = torch.arange(100, 120, dtype=torch.int32).view(5, 4)
    places = dict(zip((3, 1, 0), (row.seq for row in rows), strict=True))
    for session, seq in places.items():
        seq.session_id = session
    fill(inputs, rows, bucket)
    inputs.send(bucket)
    lengths = {row.seq.session_id: len(row.draft) for row in rows}
    drafts = DeviceDrafts(DeviceNodes(late), {3: 4, 1: 2, 0: 0}, lengths)
    inputs.take_device_drafts(drafts, rows, bucket)
    starts, held = inputs.row_starts(bucket), inputs.batch(bucket).input_ids.tolist()
    wanted = ([116, 117], [], [100, 101, 102, 103])
    assert [
        held[at : at + len(row.slice.token_ids)] for at, row in zip(starts, rows, strict=False)
    ] == [[row.slice.token_ids[0], *draft] for row, draft in zip(rows, wanted, strict=True)]


def test_decode_inputs_when_rows_are_forgotten_keep_placed_rows() -> None:
    """Others come and go in a smaller bucket, of which its place is no part."""
    rng = random.Random(3)
    inputs = DecodeInputs([Bucket(5, 2)], LAYOUT)
    first, second = (make_step(rng, [1], 97).rows[0] for _ in range(2))
    for _ in range(3):
        fill(inputs, [first, second], Bucket(5, 2))
        for _ in range(4):
            inputs.fill(make_step(rng, [1], 97), Bucket(5, 1))
    fill(inputs, [first, second], Bucket(5, 2))


def cut(row: ScheduledRow, num_tokens: int) -> ScheduledRow:
    """Return a row with so many tokens of its draft."""
    part, kept = row.slice, 1 + num_tokens
    part = part._replace(token_ids=part.token_ids[:kept], num_logits=kept)
    return row._replace(slice=part, draft=row.draft[:num_tokens])


def fill(inputs: DecodeInputs, rows: Sequence[ScheduledRow], bucket: Bucket) -> bool:
    return inputs.fill(Step(tuple(rows), sum(len(row.draft) + 1 for row in rows)), bucket)


def tensors(inputs: DecodeInputs, bucket: Bucket) -> list[Tensor]:
    held = (inputs.batch(bucket), inputs.verify_batch(bucket))
    values = [getattr(each, field.name) for each in held for field in fields(each)]
    return [value for value in values if isinstance(value, Tensor)]


def test_make_buckets_for_any_limit_covers_all_rows() -> None:
    assert make_buckets(1, (1, 5)) == [Bucket(1, 1), Bucket(5, 1)]
    assert make_buckets(1, (1, 5), (5,)) == [Bucket(1, 1), Bucket(5, 1, trees=True), Bucket(5, 1)]
    assert [b.rows for b in make_buckets(12, (5,))] == [1, 2, 4, 8, 12]
    assert [b.rows for b in make_buckets(300, (1,))][-5:] == [96, 128, 192, 256, 300]
    assert [b.tokens for b in make_buckets(64, (5,)) if b.rows == 32] == [64, 96, 160]
    assert [b.tokens for b in make_buckets(64, (5,)) if b.rows == 64] == [128, 192, 256, 320]
    assert len(make_buckets(256, (1, 5), (5,))) == 44
    assert len(make_buckets(4, (1, 1))) == 3  # K = 0


@pytest.mark.parametrize("params", SAMPLINGS, ids=str)
def test_decode_inputs_with_edited_logits_need_eager_sampling(params: SamplingParams) -> None:
    pages = list(range(NUM_PAGES))
    row = make_row(random.Random(2), 2, pages, 50, captured=True, sampling=params)
    inputs = DecodeInputs([Bucket(3, 1)], LAYOUT)
    assert fill(inputs, [row], Bucket(3, 1)) == (params in SAMPLINGS[5:])
    drawn_by = inputs.verify_batch(Bucket(3, 1)).sampling
    inputs.send(Bucket(3, 1))
    expected = SamplingBatch.build([params], [0])
    for name in ("temperature", "top_k", "top_p", "min_p", "seed"):
        assert getattr(drawn_by, name).tolist() == 3 * getattr(expected, name).tolist()


class RecordableHashModel(HashModel):
    """Checks every slot but the scratch page's, of which nothing is promised."""

    dtype = torch.float32

    def __init__(self, page_size: int, num_pages: int) -> None:
        super().__init__(VOCAB, page_size, num_pages, MAX_LEN)
        self.scratch_page = num_pages

    def logits(self, batch: PackedBatch, out: Tensor) -> Tensor:
        self.forwards += 1
        slots, ends = batch.slot_mapping, batch.cu_seqlens_q[1:]
        rows = torch.searchsorted(ends, torch.arange(len(slots)), right=True).tolist()
        real = slots < self.num_pages * self.page_size
        written = slots[real].numpy()
        assert len(set(written.tolist())) == len(written), "two tokens in one slot"
        self._slots[written] = batch.input_ids[real].numpy()
        self._positions[written] = batch.positions[real].numpy()
        if self.fail_next:
            self.fail_next = False
            raise RuntimeError("the device fell over")
        out.fill_(float("inf"))  # padding: anything
        for i in real.nonzero().flatten().tolist():
            state = context_hash(self._context(batch, rows[i], i))
            out[i] = torch.from_numpy(self._logits(np.array([state], np.uint64)))[0]
        return out

    def move_slots(self, source: Tensor, target: Tensor) -> None:
        real = target < self.num_pages * self.page_size
        super().move_slots(source[real], target[real])


class Zeros(RecordableHashModel):
    """Chooses token 0, which is also what fills up."""

    def logits(self, batch: PackedBatch, out: Tensor) -> Tensor:  # noqa: ARG002
        return out.zero_()


def test_decode_graphs_with_padded_trees_accept_no_padding() -> None:
    model = Zeros(PAGE_SIZE, NUM_PAGES)
    graphs = DecodeGraphs(
        model, make_buckets(4, (), (6,)), capture=rerun, choose_and_verify=choose_and_verify
    )
    rows: list[ScheduledRow] = []
    for draft, parents in (((0, 5, 0), (-1, -1, 0)), ((0,), ()), ((), ()), ((5, 0), (-1, 0))):
        row = make_row(random.Random(len(rows)), 0, [len(rows), 9 + len(rows)], 2, True, True)
        row.seq.block_table = [2 * len(rows), 2 * len(rows) + 1]
        row.seq.request = replace(row.seq.request, sampling=SAMPLINGS[0])
        rows.append(one_row(row.seq, 1, draft, *parents))
    result = graphs.launch(Step(tuple(rows), 10)).wait()
    assert list(result.accepted) == [2, 1, 0, 0]
