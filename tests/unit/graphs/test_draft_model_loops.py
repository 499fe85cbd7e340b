"""Captured draft loops say what the eager ones say, whatever fills up their rows."""

from __future__ import annotations

import random
from array import array
from collections.abc import Callable
from functools import partial
from typing import Any

import pytest
import torch
from torch import Tensor

from outrider.drafting.building.loops import loop_shapes
from outrider.drafting.draft_model.loops import DraftModelLoops
from outrider.drafting.draft_model.proposer import DraftModelProposer
from outrider.drafting.drafters import Chain, DraftInput, FedRows, Forks
from outrider.drafting.graphs import loops
from outrider.drafting.graphs.chains import draft_chains, draft_forks
from outrider.drafting.graphs.loop_inputs import LoopInputs, LoopShape, make_shapes
from outrider.drafting.graphs.loops import DraftSampler, LoopCapture
from outrider.drafting.proposer import ProposerLimits, SessionStart
from outrider.engine.batch import PackedBatch, RowSlice, pack
from outrider.engine.graphs.prefill_graphs import PrefillGraphs
from outrider.engine.graphs.prefill_inputs import make_prefill_buckets
from outrider.engine.graphs.staging import Staging
from outrider.engine.model.paged_model import PagedModel
from outrider.params import SamplingParams
from tests.support.models.by_tensors import by_tensors
from tests.support.models.recordable import (
    RecordableHashModel,
    recordable_llama,
    rerun,
    run_each,
)

SAMPLINGS = (
    SamplingParams(temperature=0.0),
    SamplingParams(temperature=1.0, seed=5),
    SamplingParams(temperature=0.7, seed=2**64 - 1),
    SamplingParams(temperature=1.2, seed=2**31, top_k=12, top_p=0.9, min_p=0.01),
)
Recordable = RecordableHashModel | PagedModel
Ready = tuple[int, SamplingParams]
"""Tokens wanted of a row, and how they are sampled."""


def drafter_of(
    model: Recordable, max_rows: int = 4, forwards: PrefillGraphs | None = None
) -> DraftModelLoops:
    shapes = [
        shape
        for fanout in (0, 3)
        for cut in (False, True)
        for shape in make_shapes(
            rows=(1, 2, max_rows),
            query_lens=(1, 3),
            num_tokens=(0, 2, 5) if fanout else (2, 5),
            fanout=fanout,
            cut=cut,
        )
    ]
    # Every loop runs over zeros once, too.
    capture = LoopCapture(shapes, rerun, DraftSampler(), precompile=run_each)
    return DraftModelLoops(model, capture, forwards)


class Rows:
    """Random rows on scattered pages, of which all but the tokens to catch up are fed."""

    def __init__(self, model: Recordable, rng: random.Random) -> None:
        self._model, self._rng = model, rng
        self._free = rng.sample(range(model.num_pages), model.num_pages)
        self.texts: list[list[int]] = []
        self.slices: list[RowSlice] = []

    def add(self, length: int, missing: int, room: int) -> None:
        """`room` tokens more than the text have pages."""
        text = [self._rng.randrange(60) for _ in range(length)]
        size = self._model.page_size
        table = array("i", [self._free.pop() for _ in range(-(-(length + room) // size))])
        start = length - missing
        if start:
            fed = pack([RowSlice(text[:start], 0, table, 1)], size, self._model.device)
            self._model.forward(fed)
        self.texts.append(text)
        self.slices.append(RowSlice(text[start:], start, table, 1))

    def inputs(self, ready: list[Ready]) -> list[DraftInput]:
        """The rows, of which the first want drafts."""
        wanted = [*ready, *[(0, SAMPLINGS[0])] * (len(self.slices) - len(ready))]
        return [DraftInput(row, *each) for row, each in zip(self.slices, wanted, strict=True)]

    def whole(self, i: int, room: int) -> RowSlice:
        """The row from its first token on, on pages of its own."""
        size = self._model.page_size
        pages = self._free[: -(-(len(self.texts[i]) + room) // size)]
        return RowSlice(self.texts[i], 0, pages, 1)


def expected(model: Recordable, rows: Rows, ready: list[Ready]) -> list[Chain]:
    return [
        draft_chains(model, [DraftInput(rows.whole(i, wanted), wanted, sampling)])[0]
        for i, (wanted, sampling) in enumerate(ready)
    ]


@pytest.mark.parametrize("make", [RecordableHashModel, recordable_llama])
def test_captured_chains_for_any_rows_equal_eager_chains(make: Callable[..., Recordable]) -> None:
    """Any number of rows, also more than a loop holds; any catch-up, also longer than captured."""
    model = make(num_pages=220)
    drafter = drafter_of(model)
    for seed in range(40):
        rng = random.Random(seed)
        rows = Rows(model, rng)
        ready = []
        num_rows = rng.randint(1, 6)
        for wanted in sorted((rng.randint(1, 6) for _ in range(num_rows)), reverse=True):
            length = rng.randint(5, 40)
            rows.add(length, rng.choice((1, 1, 2, 2, 3, 5)), wanted - 1)
            ready.append((wanted, rng.choice(SAMPLINGS)))
        assert drafter.draft(rows.inputs(ready)) == expected(model, rows, ready)


def test_captured_chains_with_prompt_rows_feed_them() -> None:
    model = RecordableHashModel()
    rows = Rows(model, random.Random(1))
    rows.add(9, 1, 3)
    rows.add(30, 22, 0)
    rows.slices[1] = rows.slices[1]._replace(num_logits=0)
    ready = [(4, SAMPLINGS[1])]
    assert drafter_of(model).draft(rows.inputs(ready)) == expected(model, rows, ready)


def test_captured_chains_after_prompts_feed_all_but_last_token_first(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    model = RecordableHashModel()
    rows = Rows(model, random.Random(2))
    rows.add(30, 30, 3)
    rows.add(9, 1, 3)
    rows.add(20, 20, 2)
    ready = [(4, SAMPLINGS[1]), (4, SAMPLINGS[0]), (3, SAMPLINGS[2])]
    drafts = expected(model, rows, ready)
    drafter = drafter_of(model)
    launched: list[tuple[int, ...]] = []
    forward = model.forward

    def counted(batch: PackedBatch) -> Tensor:
        launched.append(batch.query_lens)
        return forward(batch)

    monkeypatch.setattr(model, "forward", counted)
    assert drafter.draft(rows.inputs(ready)) == drafts
    assert launched == [(29, 19)]


def test_captured_chains_with_prefill_graphs_launch_no_forward(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    model = recordable_llama(num_pages=220)
    model._backend = by_tensors
    rows = Rows(model, random.Random(4))
    for length, missing in ((30, 30), (9, 1), (25, 25), (28, 28)):
        rows.add(length, missing, 3)
    ready = [(4, sampling) for sampling in SAMPLINGS]
    drafts = expected(model, rows, ready)
    drafter = drafter_of(
        model, forwards=PrefillGraphs(model, make_prefill_buckets(128, 4), capture=rerun)
    )
    monkeypatch.setattr(model, "forward", None)  # nothing is launched forward by forward
    assert drafter.draft(rows.inputs(ready)) == drafts
    assert drafter.feed([rows.whole(i, 0) for i in (0, 1)])
    assert not drafter.feed([row._replace(token_ids=[1] * 99) for row in rows.slices[:2]])


def test_captured_chains_at_model_length_stay_within_it() -> None:
    """Loops are longer than what is left: what they draft beyond is cut, and harms no one."""
    for make in (RecordableHashModel, recordable_llama):
        model = make(num_pages=100)
        assert model.max_model_len == 128
        rows = Rows(model, random.Random(1))
        rows.add(20, 2, 4)
        rows.add(127, 1, 1)
        ready = [(5, SAMPLINGS[1]), (1, SAMPLINGS[0])]
        drafter = drafter_of(model)
        assert drafter.draft(rows.inputs(ready)) == expected(model, rows, ready)


@pytest.mark.parametrize("make", [RecordableHashModel, recordable_llama])
def test_captured_forks_for_any_rows_equal_eager_forks(make: Callable[..., Recordable]) -> None:
    """Also the candidates after the guesses, which are read when the next loop has run."""
    model = make(num_pages=220)
    drafter = drafter_of(model)
    for seed in range(20):
        rng = random.Random(seed)
        rows = Rows(model, rng)
        k, fanout = rng.choice(((0, 3), (1, 2), (2, 3), (4, 2), (5, 3)))
        sampling = [rng.choice(SAMPLINGS) for _ in range(rng.randint(1, 6))]
        for _ in sampling:
            rows.add(rng.randint(6, 30), rng.choice((1, 1, 2, 3, 5)), k + 1)
        fed = FedRows(rows.slices, sampling)
        batch = drafter.forks(fed, k, fanout, beyond=True)
        again = drafter.forks(fed, k, fanout, beyond=True).forks
        found = [Forks.joined([batch.forks[i], batch.beyond[i]]) for i in range(len(sampling))]
        for i, params in enumerate(sampling):
            alone = FedRows([rows.whole(i, k + 1)], [params])
            eager = draft_forks(model, alone, k + 1, fanout)[0]
            assert found[i].candidates.tolist() == eager.candidates.tolist()
            assert again.candidates[i].tolist() == eager.candidates[:-1].tolist()
            torch.testing.assert_close(found[i].gaps, eager.gaps)


class LateDevice:
    """Does what is enqueued when somebody waits for it, and not before."""

    def __init__(self, patch: pytest.MonkeyPatch) -> None:
        self._work: list[Callable[[], object]] = []
        send, go_further = Staging.send, LoopInputs.go_further

        def go_further_later(inputs: LoopInputs, *args: Any) -> None:
            def go(num_pages: int = inputs._num_pages) -> None:
                inputs._num_pages = num_pages
                go_further(inputs, *args)

            self._work.append(go)

        patch.setattr(Staging, "send", lambda *args: self._work.append(partial(send, *args)))
        patch.setattr(Staging, "await_copy", lambda _: self.run())
        patch.setattr(LoopInputs, "go_further", go_further_later)
        patch.setattr(loops, "begin_fetch", self._fetch)

    def capture(self, work: Callable[[], None]) -> Callable[[], None]:
        self.run()
        work()
        return lambda: self._work.append(work)

    @torch.inference_mode()
    def run(self) -> None:
        while self._work:
            self._work.pop(0)()

    def _fetch(self, drafted: Tensor) -> Callable[[], Any]:
        on_host = torch.empty(drafted.shape, dtype=torch.int32)
        self._work.append(lambda: on_host.copy_(drafted))

        def fetch() -> Any:
            self.run()
            return on_host.numpy()

        return fetch


def test_forks_of_more_rows_than_a_loop_holds_overwrite_no_inputs_in_use(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """The next loop's inputs are written while the device may not have those of the one before."""
    model, device = RecordableHashModel(num_pages=220), LateDevice(monkeypatch)
    shapes = make_shapes(rows=(2,), query_lens=(1,), num_tokens=(2,), fanout=3)
    drafter = DraftModelLoops(model, LoopCapture(shapes, device.capture, DraftSampler()))
    rows = Rows(model, random.Random(4))
    for _ in range(5):
        rows.add(9, 9, 3)
    draft_forks(model, FedRows(rows.slices, [SAMPLINGS[1]] * 5), 0, 1)  # feeds the texts
    last = [row._replace(token_ids=row.token_ids[-1:], start=8) for row in rows.slices]
    fed = FedRows(last, [SAMPLINGS[1]] * 5)
    batch = drafter.forks(fed, 2, 3, beyond=True)
    eager = draft_forks(model, fed, 3, 3)
    found = Forks.joined((batch.forks, batch.beyond), 1)
    assert found.candidates.tolist() == eager.candidates.tolist()


def test_draft_model_proposer_with_captured_loops_drafts_the_same() -> None:
    drafts: list[list[tuple[int, ...]]] = []
    for captured in (False, True):
        model = RecordableHashModel(num_pages=100)
        drafter = drafter_of(model) if captured else None
        proposer = DraftModelProposer(
            model, name="hash", limits=ProposerLimits(prefill_budget=30), chain_drafter=drafter
        )
        rng = random.Random(3)
        said: list[tuple[int, ...]] = []
        for key, sampling in enumerate(SAMPLINGS):
            start = SessionStart([rng.randrange(60) for _ in range(5 + 20 * key)], sampling, 4, 120)
            proposer.open(key, start)
        lengths = {key: 5 + 20 * key for key in range(len(SAMPLINGS))}
        for _ in range(12):
            done = proposer.draft(list(lengths))
            proposer.check_invariants()
            for key, tree in sorted(done.drafts):
                said.append(tree.token_ids)
                accepted = rng.randint(0, len(tree.token_ids))
                tokens = [*tree.token_ids[:accepted], rng.randrange(60)]
                proposer.commit(key, lengths[key], tokens, rng.randint(1, 5))
                lengths[key] += len(tokens)
        drafts.append(said)
    assert drafts[0] == drafts[1]
    assert len(drafts[0]) > 30


@pytest.mark.parametrize(("max_sessions", "max_branches"), [(1, 0), (5, 3), (256, 8)])
def test_loop_shapes_for_any_limits_fit_all_rounds(max_sessions: int, max_branches: int) -> None:
    shapes = loop_shapes(max_sessions=max_sessions, max_draft_tokens=5, max_branches=max_branches)
    assert len(shapes) == len(set(shapes))

    def captured(rows: int, query_len: int, fanout: int) -> bool:
        return any(
            shape.rows >= rows and shape.query_len >= query_len and shape.fanout == fanout
            for shape in shapes
            if shape.num_tokens == (4 if fanout else 5) and not shape.cut
        )

    assert captured(min(128, max_sessions), 16, 0)
    assert captured(max_sessions, 2, 0)
    assert LoopShape(1, 1, 5) in shapes
    if max_branches:
        fanout = max(shape.fanout for shape in shapes)
        assert captured(min(128, max_sessions), 16, fanout)
        assert captured(max_sessions, 2, fanout)
        assert captured(min(256, max_sessions * max_branches), 1, fanout)
        branching = [shape for shape in shapes if shape.fanout and shape.query_len <= 2]
        assert {shape.further for shape in branching} < set(shapes)
        assert max_sessions < 64 or any(64 < s.rows < 128 for s in shapes if s.fanout)
