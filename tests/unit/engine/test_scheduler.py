"""Budget, admission, preemption, prefix cache and late blocks, step by step."""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import asdict
from typing import cast

import pytest
from torch import Tensor

from outrider.config import EngineConfig
from outrider.draft_port import NO_DRAFTS, DraftOffer, PostedBlock
from outrider.draft_tree import DraftTree
from outrider.engine.engine import Engine
from outrider.engine.kv_cache import block_pool
from outrider.engine.sampling.constraint import ConstraintEditor
from outrider.engine.scheduler import Scheduler
from outrider.engine.sequence import Sequence
from outrider.engine.step import Step, StepResult
from outrider.params import (
    Constraint,
    ConstraintKind,
    SamplingParams,
    StopParams,
    TokenIds,
    VerificationRule,
)
from outrider.policy.adaptive import AdaptivePolicy
from outrider.policy.base import FixedPolicy, StepDone
from outrider.policy.row import Drafting, Offered
from outrider.rounds import BlockFate, chain_round
from outrider.types import (
    Commit,
    FinishReason,
    MethodCounts,
    Request,
    StepEvents,
    TokenKind,
)
from tests.support.models.at_once import AtOnce
from tests.support.models.hash_model import HashModel, Sequential

GREEDY = SamplingParams(temperature=0.0)


def engine(clock: Callable[[], float] = time.perf_counter, **changes: int) -> Engine:
    limits = {"page_size": 4, "num_pages": 64, "max_model_len": 64, "max_num_batched_tokens": 16}
    config = EngineConfig(**{**limits, **changes})  # type: ignore[arg-type]
    model = HashModel(32, config.page_size, config.num_pages, 64)
    return Engine(model, config, policy=FixedPolicy(4, max_wait_s=0.0), clock=clock)


def submit(
    target: Engine, session_id: int, prompt_len: int, max_tokens: int = 8, start: int = 0
) -> tuple[list[int], Request]:
    """Submits a request; returns what it must answer, and itself."""
    prompt = tuple((start + i) % 32 for i in range(prompt_len))
    request = Request(session_id, prompt, GREEDY, StopParams(max_tokens=max_tokens))
    target.submit(request)
    return Sequential(HashModel(32)).tokens(prompt, GREEDY, max_tokens), request


def step(target: Engine) -> StepEvents:
    events = target.step()
    assert events is not None
    target.check_invariants()
    return events


def run(target: Engine) -> dict[int, list[Commit]]:
    commits: dict[int, list[Commit]] = {}
    for _ in range(500):
        events = target.step()
        if events is None:
            return commits
        target.check_invariants()
        for commit in events.commits:
            commits.setdefault(commit.session_id, []).append(commit)
    raise AssertionError("does not end")


def test_plain_tokens_are_reported_as_many_at_a_time_as_asked_for() -> None:
    e = engine()
    prompt, expected = (1, 2, 3), 20
    request = Request(1, prompt, GREEDY, StopParams(max_tokens=expected), stream_interval=6)
    e.submit(request)
    commits = run(e)[1]
    assert [len(commit.token_ids) for commit in commits] == [1, 6, 6, 6, 1]
    assert [commit.base_len for commit in commits] == [3, 4, 10, 16, 22]
    assert [len(commit.kinds) for commit in commits] == [1, 6, 6, 6, 1]
    tokens = [token for commit in commits for token in commit.token_ids]
    assert tokens == Sequential(HashModel(32)).tokens(prompt, GREEDY, expected)
    assert commits[-1].finish_reason is FinishReason.LENGTH


@pytest.mark.parametrize(
    ("choices", "accepted", "node"),
    [((7, 8, 9), 2, None), ((7, 5, 5), 1, None), ((5, 5, 5), 0, None), ((7, 5, 5), 0, 0)],
    ids=["all accepted", "one rejected", "none accepted", "rejected, and drawn all the same"],
)
def test_chain_goes_on_only_where_the_committed_tokens_lie_on_it(
    choices: TokenIds, accepted: int, node: int | None
) -> None:
    e, base_len = engine(), 4
    submit(e, 1, 3, max_tokens=20)
    e.set_drafting(1, DraftOffer("a", 2))
    step(e)
    e.post_block(PostedBlock(1, DraftTree.chain(base_len, (7, 8)), "a", 0, 0.0))
    scheduled = e._scheduler.schedule(0.0)
    assert scheduled is not None
    result = StepResult([choices], [accepted], 0.0)
    emitted = e._scheduler.commit(scheduled, result, 0.0, 0.0).emitted
    assert [row.output for row in emitted] == [choices[: accepted + 1]]
    assert emitted[0].round == chain_round(2, accepted)
    seq = e._scheduler.by_session[1]
    assert (None if seq.draft is None else seq.draft_node) == node
    e.check_invariants()


def test_tree_that_a_chain_replaces_in_flight_counts_as_the_tree() -> None:
    e, base_len = engine(), 4
    submit(e, 1, 3, max_tokens=20)
    e.set_drafting(1, DraftOffer("a", 2))
    step(e)
    tree, chain = DraftTree(base_len, (7, 8), (-1, -1)), DraftTree.chain(base_len, (7, 8))
    e.post_block(PostedBlock(1, tree, "a", 0, 0.0))
    scheduled = e._scheduler.schedule(0.0)
    assert scheduled is not None
    e.post_block(PostedBlock(1, chain, "a", 0, 0.0))
    result = StepResult([(8, 5, 0)], [1], 0.0)
    [row] = e._scheduler.commit(scheduled, result, 0.0, 0.0).emitted
    assert row.output == (8, 5)
    assert (row.round.depth, row.round.rejected, row.round.last) == (1, False, 1)


def test_tokens_without_drafts_of_a_colocated_proposer_are_reported_as_asked_for() -> None:
    e = engine()
    request = Request(1, (1, 2, 3), GREEDY, StopParams(max_tokens=20), stream_interval=6)
    e.submit(request)
    e.set_drafting(1, DraftOffer("a", 4, colocated=True))
    commits = [commit for _ in range(10) for commit in step(e).commits]
    assert [len(commit.token_ids) for commit in commits] == [1, 6]
    text = [*request.prompt_token_ids, *Sequential(HashModel(32)).tokens((1, 2, 3), GREEDY, 20)]
    e.post_block(PostedBlock(1, DraftTree.chain(13, tuple(text[13:15])), "a", 0))
    commits += step(e).commits
    assert commits[-1].kinds == (*[TokenKind.PLAIN] * 3, *[TokenKind.ACCEPTED] * 2, TokenKind.BONUS)
    commits += run(e)[1]
    assert [token for commit in commits for token in commit.token_ids] == text[3:]


def test_row_without_a_draft_beside_one_with_a_draft_tells_where_its_token_is() -> None:
    e = engine()
    text = [*range(3), *submit(e, 1, 3, 20)[0]]
    other = [*range(7, 10), *submit(e, 2, 3, 20, start=7)[0]]
    for session in (1, 2):
        e.set_drafting(session, DraftOffer("a", 4))
    step(e)
    step(e)
    e.post_block(PostedBlock(1, DraftTree.chain(5, tuple(text[5:7])), "a", 0))
    assert e.launch()
    e.collect()
    early = e.early_tokens
    assert early is not None
    assert [tuple(row) for row in early.rows] == [(1, 5, tuple(text[5:8])), (2, 5, (other[5],))]
    events = e.finalize_step()
    assert events is not None
    assert events.grown == ((2,), (5,), (other[5],), (4,))


def test_drafts_that_the_first_of_many_asked_for_hold_up_no_step_behind() -> None:
    """While it was alone drafts paid; its prompt has several steps, and others have come."""
    config = EngineConfig(4, 64, 40, 8, 64)
    model = HashModel(32, config.page_size, config.num_pages, 64)
    e = Engine(model, config, policy=AdaptivePolicy(4), runner=AtOnce(model))
    submit(e, 1, 20)
    e.set_drafting(1, DraftOffer("a", 4, colocated=True))
    e.launch()
    assert not e.launch_ahead(), "the next round may be drafted for"
    for session in range(2, 40):
        submit(e, session, 3)
    assert e.launch_ahead(), "with so many nobody drafts"


@pytest.mark.parametrize("num_pages", [20, 64])
def test_step_ahead_of_the_same_rows_is_the_one_that_would_be_scheduled(
    num_pages: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """With rows that end and others that come, whether there are pages for all or not."""
    short = 0
    found = Scheduler._same_ahead

    def counted(self: Scheduler, step: Step, verified: Tensor, now: float) -> Step | None:
        nonlocal short
        same = found(self, step, verified, now)
        short += same is not None
        return same

    def steps() -> list[object]:
        config = EngineConfig(4, num_pages, 4, 16, 64)
        model = HashModel(32, config.page_size, config.num_pages, 64)
        e = Engine(model, config, policy=FixedPolicy(0), runner=AtOnce(model))
        for session in range(1, 9):
            submit(e, session, 2 + session, 5 * session, start=session)
        launched: list[object] = []
        for _ in range(500):
            ahead = e.launch_ahead()
            if e.in_flight:
                e.collect()
            if not ahead and not e.launch():
                break
            e.finalize_step()
            flight = e._in_flight
            assert flight is not None
            singles, drawn = flight.step.singles, flight.step.drawn
            rows = [seq.session_id for seq in flight.step.seqs]
            tables = [table[:] for table in singles.tables]
            columns = rows, singles.starts, singles.tokens, tables, flight.step.num_tokens
            launched.append((ahead, *columns, None if drawn is None else [*drawn.sources]))
        assert not e.snapshot().running
        return launched

    monkeypatch.setattr(Scheduler, "_same_ahead", counted)
    with_same = steps()
    monkeypatch.setattr(Scheduler, "_same_ahead", lambda *_: None)
    assert steps() == with_same
    assert short > len(with_same) / 4


def test_row_that_gets_a_proposer_reports_what_it_held_and_then_each_round() -> None:
    e = engine()
    request = Request(1, (1, 2, 3), GREEDY, StopParams(max_tokens=20), stream_interval=16)
    e.submit(request)
    commits = [commit for _ in range(4) for commit in step(e).commits]
    assert [len(commit.token_ids) for commit in commits] == [1]
    e.set_drafting(1, DraftOffer("a", 4))
    text = [*request.prompt_token_ids, *Sequential(HashModel(32)).tokens((1, 2, 3), GREEDY, 20)]
    e.post_block(PostedBlock(1, DraftTree.chain(7, tuple(text[7:10])), "a", 0))
    commits += run(e)[1]
    assert [commit.base_len for commit in commits[:3]] == [3, 4, 11]
    assert commits[1].kinds == (*[TokenKind.PLAIN] * 3, *[TokenKind.ACCEPTED] * 3, TokenKind.BONUS)
    assert all(len(commit.token_ids) == 1 for commit in commits[2:])
    assert [token for commit in commits for token in commit.token_ids] == text[3:]


def size(events: StepEvents) -> tuple[int, int]:
    assert events.timings is not None
    return events.timings.num_rows, events.timings.num_tokens


def test_scheduler_with_decoding_rows_chunks_a_long_prompt() -> None:
    e = engine()
    submit(e, 1, prompt_len=3)
    assert size(step(e)) == (1, 3)
    submit(e, 2, prompt_len=40, start=5)
    steps = [step(e) for _ in range(3)]
    assert [size(events) for events in steps] == [(2, 16), (2, 16), (2, 11)]
    assert [[c.session_id for c in events.commits] for events in steps] == [[1], [1], [1, 2]]


def test_scheduler_without_budget_left_adds_no_prompt_row() -> None:
    e = engine()
    submit(e, 1, prompt_len=20)
    submit(e, 2, prompt_len=6, start=5)
    assert [size(step(e)) for _ in range(3)] == [(1, 16), (2, 4 + 6), (2, 2)]


def test_scheduler_while_a_row_waits_for_its_draft_runs_prompts(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    now = 0.0
    e = engine(lambda: now)
    monkeypatch.setattr(e._policy, "max_wait_s", 1.0)
    truth, _ = submit(e, 1, prompt_len=3)
    step(e)
    e.set_drafting(1, DraftOffer("a", 4))
    for session in (2, 3):
        submit(e, session, prompt_len=10, start=session)
    steps = [step(e) for _ in range(2)]
    assert [size(events) for events in steps] == [(2, 16), (2, 4 + 1)], "its row waits"
    assert [[c.session_id for c in events.commits] for events in steps] == [[2], [2, 3]]
    e.post_block(PostedBlock(1, DraftTree.chain(4, truth[1:3]), "a", 0))
    both = step(e)
    assert size(both) == (3, 3 + 1 + 1), "the row with its draft, and the next tokens"
    assert [c.session_id for c in both.commits] == [2, 3, 1], "single tokens come first"


def test_scheduler_with_long_drafts_leaves_budget_to_prompts() -> None:
    e = engine()
    truths = {i: submit(e, i, prompt_len=1, max_tokens=30, start=i)[0] for i in (1, 2, 3)}
    step(e)
    for i, truth in truths.items():
        e.set_drafting(i, DraftOffer("a", 8))
        e.post_block(PostedBlock(i, DraftTree.chain(1, truth), "a", 0))
    submit(e, 4, prompt_len=40, start=9)
    events = step(e)
    assert size(events) == (4, 16)
    assert [len(c.token_ids) for c in events.commits] == [4, 4, 4], "12 of 16 tokens"


class CutOnce:
    """A constraint that forbids nothing, but looks at no draft of the first step that has one: as
    where its lexer was replaced in the middle of it."""

    error = None

    def __init__(self) -> None:
        self.end: int | None = None
        self.cuts = 0

    def edit(self, _logits: Tensor, draft: TokenIds) -> None:
        self.end = 1 if draft and not self.cuts else None
        self.cuts += self.end is not None

    def commit(self, _tokens: TokenIds) -> None:
        pass

    def num_allowed(self, draft: TokenIds) -> int:
        return len(draft)

    def finish(self, reason: FinishReason | None) -> FinishReason | None:
        return reason


def test_engine_with_draft_cut_by_constraint_computes_the_rest_again() -> None:
    e, constraint = engine(), CutOnce()
    prompt = (1, 2, 3)
    truth = Sequential(HashModel(32)).tokens(prompt, GREEDY, 8)
    language = Constraint(ConstraintKind.REGEX, ".*")
    request = Request(1, prompt, GREEDY, StopParams(max_tokens=8), constraint=language)
    e.submit(request, cast(ConstraintEditor, constraint))
    step(e)
    e.set_drafting(1, DraftOffer("a", 4))
    e.post_block(PostedBlock(1, DraftTree.chain(4, truth[1:5]), "a", 0))
    [cut] = step(e).commits
    assert cut.token_ids == tuple(truth[1:2]), "of five that the draft brought"
    assert [t for c in run(e)[1] for t in c.token_ids] == truth[2:]
    assert constraint.cuts == 1


def test_scheduler_when_full_admits_first_come_first_served() -> None:
    e = engine(max_num_seqs=2)
    for i in range(4):
        submit(e, i, prompt_len=2, max_tokens=2, start=i)
    assert e.snapshot().waiting == 4
    assert [c.session_id for c in step(e).commits] == [0, 1]
    assert (e.snapshot().running, e.snapshot().waiting) == (2, 2)
    step(e)
    assert [c.session_id for c in step(e).commits] == [2, 3]


@pytest.mark.parametrize(
    ("prompts", "running"),
    [
        ((36, 36), 1),
        ((28, 32), 1),
        ((28, 31), 2),
        ((28, 31, 1), 2),
        ((8, 36, 8), 3),
        ((8, 40, 8), 2),
    ],
)
def test_scheduler_with_simultaneous_requests_admits_while_all_have_pages(
    prompts: tuple[int, ...], running: int
) -> None:
    """Each for its prompt and a token more; what is promised to one is not another's."""
    e = engine(num_pages=16, max_num_batched_tokens=8)
    for i, prompt_len in enumerate(prompts):
        submit(e, i, prompt_len=prompt_len, start=9 * i)
    step(e)
    assert (e.snapshot().running, e.snapshot().waiting) == (running, len(prompts) - running)


def test_engine_without_work_asks_for_no_wake_up() -> None:
    e = engine()
    submit(e, 1, prompt_len=4)
    run(e)
    assert e.step() is None
    assert e.wake_at == float("inf")


def test_scheduler_without_pages_preempts_the_youngest_and_keeps_its_text() -> None:
    e = engine(num_pages=16)
    truth = {i: submit(e, i, prompt_len=20, max_tokens=40, start=9 * i)[0] for i in (0, 1)}
    commits = run(e)
    for i in (0, 1):
        assert [t for c in commits[i] for t in c.token_ids] == truth[i]
    stats = [commits[i][-1].stats for i in (0, 1)]
    assert stats[0] is not None
    assert stats[1] is not None
    assert (stats[0].preemptions, stats[1].preemptions) == (0, 1)


@pytest.mark.parametrize(("prompt_len", "budget"), [(20, 16), (36, 2)])
def test_stats_of_preempted_request_count_all_its_waiting(prompt_len: int, budget: int) -> None:
    now = 0.0
    e = engine(lambda: now, num_pages=16, max_num_seqs=2, max_num_batched_tokens=budget)
    submit(e, 0, prompt_len=20, max_tokens=40)
    submit(e, 1, prompt_len=prompt_len, max_tokens=20, start=9)
    waiting: list[int] = []  # requests after each step, a second long
    first = 0  # steps until the second request's first token
    stats = {}
    while len(stats) < 2:
        now += 1.0
        commits = {commit.session_id: commit for commit in step(e).commits}
        waiting.append(e.snapshot().waiting)
        first = first or (len(waiting) if 1 in commits else 0)
        stats |= {i: c.stats for i, c in commits.items() if c.stats is not None}
    assert stats[1].preemptions == 1
    assert (first > waiting.index(1)) == (budget == 2), "preempted before its first token, or after"
    assert stats[0].queue_ms == 1e3
    assert stats[1].queue_ms == 1e3 * (1 + sum(waiting))
    assert stats[1].prefill_ms == 1e3 * (first - 1 - sum(waiting[:first]))


def test_stats_of_preempted_request_count_no_round_for_recomputation() -> None:
    e = engine(num_pages=16, max_num_batched_tokens=8)
    for i in (0, 1):
        submit(e, i, prompt_len=20, max_tokens=40, start=9 * i)
        e.set_drafting(i, DraftOffer("silent", 4))
    commits = run(e)
    for i in (0, 1):
        stats = commits[i][-1].stats
        assert stats is not None
        assert stats.preemptions == i
        assert stats.fallback_rounds == stats.rounds - 1 - i  # all but the steps of prompts


@pytest.mark.parametrize(("prompt_len", "cached"), [(14, 12), (16, 12), (17, 16), (4, 0)])
def test_prefix_cache_with_known_prefix_computes_only_the_rest(
    prompt_len: int, cached: int
) -> None:
    """But for the last token, whose forward yields the next."""
    e = engine()
    truth, _ = submit(e, 1, prompt_len)
    run(e)
    submit(e, 2, prompt_len)
    first = step(e)
    assert size(first) == (1, prompt_len - cached)
    commits = [*first.commits, *run(e)[2]]
    assert [t for c in commits for t in c.token_ids] == truth
    stats = commits[-1].stats
    assert stats is not None
    assert stats.cached_prompt_tokens == cached


def test_engine_without_prefix_cache_hashes_no_page(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(block_pool, "page_hash", None)
    e = engine(enable_prefix_caching=False)
    truth, _ = submit(e, 1, prompt_len=14)
    assert [t for c in run(e)[1] for t in c.token_ids] == truth


def test_prefix_cache_with_prompt_in_flight_shares_nothing() -> None:
    e = engine()
    submit(e, 1, prompt_len=8)
    submit(e, 2, prompt_len=8)
    assert size(step(e)) == (2, 16), "neither finds what the other has not yet computed"


def test_policy_after_time_without_work_sees_an_incomparable_step() -> None:
    """A short prompt's step looks like decoding, but nothing says since when it was to run."""

    class Witness(FixedPolicy):
        def step_done(self, step: StepDone) -> None:
            seen.append(step.comparable)

    seen: list[bool] = []
    config = EngineConfig(page_size=4, num_pages=64, max_model_len=64)
    e = Engine(HashModel(32, 4, 64, 64), config, policy=Witness(4))
    submit(e, 1, prompt_len=2, max_tokens=3)
    e.set_drafting(1, DraftOffer("a", 0))
    run(e)
    assert seen == [False, True, True]


@pytest.mark.parametrize(
    ("runs_ahead", "num_tokens", "wrong"),
    [(False, 2, False), (True, 2, False), (True, 3, True), (True, 6, True)],
)
def test_sequence_commit_is_a_wrong_miss_only_if_its_outcome_was_drafted(
    runs_ahead: bool, num_tokens: int, wrong: bool
) -> None:
    """A block of K tokens is this round's draft; who runs ahead guesses what follows besides."""
    drafting = Drafting(Offered(4), runs_ahead=runs_ahead, num_draft_tokens=2)
    seq = Sequence(
        Request(1, (1, 2)), max_len=60, stop_ids=frozenset(), drafting=drafting, submitted_at=0.0
    )
    assert seq.take_block(DraftTree.chain(2, range(10, 10 + num_tokens))) is BlockFate.USEFUL
    assert seq.commit((10, 11, 9), drafted=2) == wrong
    assert seq.draft is None


def test_engine_at_context_length_ends_the_request() -> None:
    e = engine()
    truth, _ = submit(e, 1, prompt_len=60, max_tokens=30)
    commits = run(e)[1]
    assert [t for c in commits for t in c.token_ids] == truth[:4]
    assert commits[-1].finish_reason is FinishReason.LENGTH


def test_scheduler_with_draft_for_the_last_token_leaves_it_out() -> None:
    """The last token needs no draft: verifying it would need a place for KV that never is read."""
    e = engine()
    truth, _ = submit(e, 1, prompt_len=4, max_tokens=4)
    step(e)
    e.set_drafting(1, DraftOffer("a", 8))
    e.post_block(PostedBlock(1, DraftTree.chain(4, truth), "a", 0))
    (commit,) = step(e).commits
    assert commit.token_ids == tuple(truth[1:])
    assert commit.kinds == (TokenKind.ACCEPTED, TokenKind.ACCEPTED, TokenKind.BONUS)
    assert commit.finish_reason is FinishReason.LENGTH


def test_post_block_with_any_base_len_returns_its_fate() -> None:
    e = engine()
    truth, _ = submit(e, 1, prompt_len=4, max_tokens=20)
    e.set_drafting(1, DraftOffer("a", 4))
    step(e)
    wrong = (truth[0] + 1) % 32

    def post(base: int, tokens: list[int], who: str = "a") -> BlockFate | None:
        return e.post_block(PostedBlock(1, DraftTree.chain(base, tokens), who, 10))

    assert post(4, [truth[0]]) is BlockFate.LATE, "true, but nothing is left of it"
    assert post(4, [wrong, 5]) is BlockFate.WRONG
    assert post(3, [3]) is BlockFate.LATE, "the prompt and a token more went on behind its end"
    assert post(3, [1]) is BlockFate.WRONG
    assert post(3, []) is BlockFate.LATE, "it says nothing that is not true"
    assert post(6, [1, 2]) is BlockFate.INVALID, "on tokens that were never committed"
    assert post(4, truth[:3], who="b") is None, "not this session's proposer"
    assert post(4, truth[:3]) is BlockFate.USEFUL
    assert post(5, truth[1:5]) is BlockFate.USEFUL, "a newer base replaces an older"
    assert post(4, [truth[0], 9]) is BlockFate.USEFUL, "but not the other way round"
    assert step(e).commits[0].token_ids == tuple(truth[1:6])
    assert e.post_block(PostedBlock(77, DraftTree.chain(1, (1,)), "a", 10)) is None


def test_engine_with_long_draft_block_verifies_it_over_several_rounds() -> None:
    e = engine()
    truth, _ = submit(e, 1, prompt_len=4, max_tokens=20)
    e.set_drafting(1, DraftOffer("a", 3))
    e.post_block(PostedBlock(1, DraftTree.chain(4, truth[:9]), "a", 10))
    rounds = [step(e).commits[0] for _ in range(3)]
    assert [len(c.token_ids) for c in rounds] == [4, 4, 2]
    assert [c.num_draft_tokens for c in rounds] == [3, 3, 3]
    stats = run(e)[1][-1].stats
    assert stats is not None
    assert (stats.hits, stats.drafted, stats.accepted) == (3, 7, 7)
    assert stats.k_histogram[3] == 2


def test_stats_without_proposer_count_only_tokens_and_rounds() -> None:
    now = 0.0
    e = engine(lambda: now)
    submit(e, 1, prompt_len=4, max_tokens=3)
    stats = run(e)[1][-1].stats
    assert stats is not None
    assert {name: value for name, value in asdict(stats).items() if value} == {
        "prompt_tokens": 4,
        "output_tokens": 3,
        "iter_count": 3,
        "rounds": 3,
        "k_histogram": (3,),
        "fallback_rounds": 2,
        "verification": VerificationRule.COUPLED,
    }


def test_stats_of_row_with_proposer_for_a_while_count_its_rounds_alone() -> None:
    """Rounds that nobody drafts for are fallbacks, before and after."""
    now = 0.0
    e = engine(lambda: now)
    truth, _ = submit(e, 1, prompt_len=4, max_tokens=14)
    commits = [*step(e).commits, *step(e).commits]
    e.set_drafting(1, DraftOffer("a", 4))
    commits += step(e).commits  # without a draft
    for _ in range(2):
        done = sum(len(commit.token_ids) for commit in commits)
        e.post_block(PostedBlock(1, DraftTree.chain(4 + done, truth[done : done + 3]), "a", 10))
        commits += step(e).commits
    e.set_drafting(1, NO_DRAFTS)
    commits += run(e)[1]
    assert [token for commit in commits for token in commit.token_ids] == truth
    stats = commits[-1].stats
    assert stats is not None
    assert (stats.rounds, stats.iter_count, stats.fallback_rounds) == (8, 8, 5)
    assert (stats.drafted, stats.accepted, stats.hits) == (6, 6, 2)
    assert (stats.misses_late, stats.misses_wrong, stats.waits) == (1, 0, 0)
    assert (stats.rounds_after_hit, stats.rounds_after_miss) == (1, 1)


def test_stats_with_several_methods_count_rounds_by_method() -> None:
    e = engine()
    truth, _ = submit(e, 1, prompt_len=4, max_tokens=20)
    e.set_drafting(1, DraftOffer("a", 4))
    step(e)
    length = 4 + 1
    for method, accepted, num_tokens in (("ngram", 1, 3), ("suffix", 2, 2), ("ngram", 0, 2)):
        done = length - 4
        wrong = [(token + 1) % 32 for token in truth[done + accepted : done + num_tokens]]
        draft = truth[done : done + accepted] + wrong
        e.post_block(PostedBlock(1, DraftTree.chain(length, draft), "a", 10, method=method))
        (commit,) = step(e).commits
        last = TokenKind.BONUS if accepted == num_tokens else TokenKind.RECOVERED
        assert commit.kinds == (TokenKind.ACCEPTED,) * accepted + (last,)
        length += accepted + 1
    stats = run(e)[1][-1].stats
    assert stats is not None
    assert stats.by_method == (MethodCounts("ngram", 5, 1), MethodCounts("suffix", 2, 2))
    assert (stats.drafted, stats.accepted, stats.proposer_ids) == (7, 3, ("a",))
    assert (stats.drafts_per_context, stats.accepted_per_context) == ((3,), (3,))


@pytest.mark.parametrize(("runs_ahead", "hits_after_hit"), [(False, 0), (True, 2)])
def test_stats_of_leftover_draft_count_hits_only_when_drafting_ahead(
    runs_ahead: bool, hits_after_hit: int
) -> None:
    e = engine()
    truth, _ = submit(e, 1, prompt_len=4, max_tokens=20)
    step(e)
    e.set_drafting(1, DraftOffer("a", 3, runs_ahead=runs_ahead))
    e.post_block(PostedBlock(1, DraftTree.chain(5, truth[1:12]), "a", 10))
    assert [len(step(e).commits[0].token_ids) for _ in range(3)] == [4, 4, 4]
    e.set_drafting(1, NO_DRAFTS)
    stats = run(e)[1][-1].stats
    assert stats is not None
    assert (stats.hits_after_hit, stats.hits_after_miss) == (hits_after_hit, 0)


def bushy(truth: list[int]) -> DraftTree:
    """The first three tokens of `truth` are nodes 1, 4 and 5; the preferred path is wrong."""
    a, b, c = truth[:3]
    wrong = next(token for token in range(32) if token not in truth[:4])
    return DraftTree(4, (wrong, a, wrong, wrong, b, c), (-1, -1, 0, 1, 1, 4))


def test_engine_with_draft_tree_verifies_all_of_it() -> None:
    e = engine()
    truth, _ = submit(e, 1, prompt_len=4, max_tokens=20)
    e.set_drafting(1, DraftOffer("a", 8))
    e.post_block(PostedBlock(1, bushy(truth), "a", 10))
    events = step(e)
    commit = events.commits[0]
    assert size(events) == (1, 4 + 6)
    assert commit.token_ids == tuple(truth[:4])
    assert commit.kinds == (TokenKind.ACCEPTED,) * 3 + (TokenKind.BONUS,)
    assert [t for c in run(e)[1] for t in c.token_ids] == truth[4:], "its keys have moved"


def test_stats_with_draft_tree_count_accepted_tokens_by_depth() -> None:
    e = engine()
    truth, _ = submit(e, 1, prompt_len=4, max_tokens=20)
    e.set_drafting(1, DraftOffer("a", 8))
    tree = bushy(truth)
    e.post_block(
        PostedBlock(
            1, DraftTree(4, (*tree.token_ids[:5], tree.token_ids[0]), tree.parents), "a", 10
        )
    )
    commit = step(e).commits[0]
    assert commit.kinds == (TokenKind.ACCEPTED,) * 2 + (TokenKind.RECOVERED,)
    stats = run(e)[1][-1].stats
    assert stats is not None
    assert (stats.drafted, stats.accepted, stats.accepted_per_pos) == (6, 2, (1, 1))
    assert stats.k_histogram[6] == 1


def test_scheduler_with_large_draft_tree_prunes_it_to_k_and_max_tokens() -> None:
    for k, max_tokens, tokens, said in ((5, 20, 5, 3), (2, 20, 2, 2), (8, 3, 5, 3), (8, 1, 0, 1)):
        e = engine()
        truth, _ = submit(e, 1, prompt_len=4, max_tokens=20)
        e.abort(1)
        submit(e, 2, prompt_len=4, max_tokens=max_tokens)
        e.set_drafting(2, DraftOffer("a", k))
        e.post_block(PostedBlock(2, bushy(truth), "a", 10))
        events = step(e)
        assert size(events) == (1, 4 + tokens)
        assert events.commits[0].token_ids == tuple(truth[:said])


def test_scheduler_with_tree_drafted_ahead_verifies_its_preferred_path() -> None:
    e = engine()
    truth, _ = submit(e, 1, prompt_len=4, max_tokens=20)
    e.set_drafting(1, DraftOffer("a", 8, runs_ahead=True))
    e.post_block(PostedBlock(1, bushy(truth), "a", 10))
    events = step(e)
    assert size(events) == (1, 4 + 2)
    assert events.commits[0].token_ids == (truth[0],)
    assert step(e).commits[0].token_ids == (truth[1],), "its side branch, and not all of that"
    assert step(e).commits[0].token_ids == tuple(truth[2:4])


def test_scheduler_with_penalised_row_verifies_one_path() -> None:
    e = engine()
    prompt = (0, 1, 2, 3)
    sampling = SamplingParams(temperature=0.0, frequency_penalty=0.5)
    truth = Sequential(HashModel(32)).tokens(prompt, sampling, 8)
    e.submit(Request(1, prompt, sampling, StopParams(max_tokens=8)))
    e.set_drafting(1, DraftOffer("a", 8))
    e.post_block(PostedBlock(1, bushy(truth), "a", 10))
    events = step(e)
    assert size(events) == (1, 4 + 2)
    assert [t for c in (*events.commits, *run(e)[1]) for t in c.token_ids] == truth


def test_scheduler_without_pages_for_draft_tree_leaves_it_out() -> None:
    e = engine(num_pages=16)
    truth, _ = submit(e, 1, prompt_len=4, max_tokens=60)
    e.set_drafting(1, DraftOffer("a", 60))
    for _ in range(54):
        step(e)
    length = 4 + 54
    tree = DraftTree(length, (truth[54], 31, 30, 29, 28, 27, truth[55]), (-1,) * 6 + (0,))
    e.post_block(PostedBlock(1, tree, "a", 10))
    assert size(step(e)) == (1, 1), "58 tokens fill 15 pages of 16, and the tree needs 2"
    assert [t for c in run(e)[1] for t in c.token_ids] == truth[55:]


def test_engine_with_stop_token_in_a_draft_ends_the_text_before_it() -> None:
    e = engine()
    truth, _ = submit(e, 0, prompt_len=4, max_tokens=20)
    e.abort(0)
    prompt = tuple(range(4))
    at = next(i for i in range(2, 6) if truth[i] not in truth[:i])
    stop = StopParams(max_tokens=20, stop_token_ids=frozenset({truth[at]}))
    e.submit(Request(1, prompt, GREEDY, stop))
    e.set_drafting(1, DraftOffer("a", 8))
    e.post_block(PostedBlock(1, DraftTree.chain(4, truth[:4]), "a", 10))
    commits = run(e)[1]
    assert [t for c in commits for t in c.token_ids] == truth[:at]
    stats = commits[-1].stats
    assert stats is not None
    assert commits[-1].finish_reason is FinishReason.STOP
    assert stats.output_tokens == at
    assert stats.accepted <= at, "trimmed first, counted then"


def test_engine_with_resumed_request_continues_as_if_never_moved() -> None:
    """Penalties count what the first engine wrote; max_tokens and min_tokens go on from there."""
    sampling = SamplingParams(
        temperature=0.9, seed=3, presence_penalty=1.2, frequency_penalty=0.8, repetition_penalty=1.3
    )
    prompt = (4, 8, 15, 16)
    stops = frozenset(range(16))

    def decode(done: tuple[int, ...]) -> tuple[int, ...]:
        left = 24 - len(done)
        stop = StopParams(max_tokens=left, min_tokens=left, stop_token_ids=stops)
        target = engine()
        target.submit(Request(1, prompt + done, sampling, stop, num_resumed_tokens=len(done)))
        return tuple(token for commit in run(target)[1] for token in commit.token_ids)

    whole = decode(())
    assert len(whole) == 24
    assert stops.isdisjoint(whole)
    for done in range(1, 24):
        assert decode(whole[:done]) == whole[done:]
