"""Readiness and K, driven by recorded numbers and a simulated clock."""

from __future__ import annotations

import random
from collections.abc import Iterable
from dataclasses import dataclass, field

import pytest

from outrider.config import EngineConfig
from outrider.draft_port import DraftOffer, PostedBlock
from outrider.draft_tree import DraftTree
from outrider.engine.engine import Engine
from outrider.params import SamplingParams, SpeculationParams, StopParams
from outrider.policy import mode
from outrider.policy.adaptive import AdaptivePolicy
from outrider.policy.base import Policy, StepDone
from outrider.policy.circuit_breaker import (
    FIRST_OPEN_ROUNDS,
    MOST_OPEN_ROUNDS,
    CircuitBreaker,
)
from outrider.policy.fixed import FixedPolicy
from outrider.policy.row import Drafting, Offered
from outrider.policy.waiting import MAX_PATIENCE_S
from outrider.step_times import StepTimes
from outrider.types import Commit, Request, RequestStats
from tests.support.models.hash_model import HashModel, Sequential
from tests.support.simulators.simulation import Net, World, draft_model

CONFIG = EngineConfig(page_size=4, num_pages=4096, max_model_len=2048)
# Seconds of a 62 M model's step at 1, 4, 8, 16 tokens: engine-notes' measurements, fused.
STEP_S = ((1, 0.0075), (4, 0.0078), (8, 0.0089), (16, 0.0110), (64, 0.0260), (640, 0.2))


def interpolated(steps: Iterable[tuple[int, float]]) -> StepTimes:
    times = StepTimes()
    for num_tokens, seconds in steps:
        times.observe(num_tokens, seconds)
    return times


@dataclass
class Bench:
    """An engine whose forwards take the recorded time, and a proposer with a given delay."""

    policy: Policy
    requests: int = 1
    began: float = 0.0
    delay_s: float = 0.003
    agreement: float = 1.0  # share of rounds whose block is right
    dead: set[int] = field(default_factory=set)  # sessions whose proposer is silent
    clueless: set[int] = field(default_factory=set)  # sessions whose blocks are empty
    max_tokens: int = 200
    burst: tuple[float, float] = (0.0, 0.0)  # from, until: steps take ten times as long
    steps: tuple[tuple[int, float], ...] = STEP_S
    own_device: bool = False  # of the proposer
    first_delay_s: float | None = None  # of a session's first block, with the prompt's processing
    hiccup_s: float = 0.0  # by which the second block of all is late
    stall_s: float = 0.0  # what a step and a draft at the same time cost each other
    busy: bool = False  # the proposer has one cycle at a time: what comes meanwhile waits, the
    # latest of a session only
    tax_s: float = 0.0  # what drafts made since the last step cost the next one
    speculation: SpeculationParams = field(default_factory=SpeculationParams)
    draft_us: int = 1000  # that the proposer says it drafted
    copies: int = 1  # of each block that come, one millisecond apart

    def __post_init__(self) -> None:
        self.now = self.began
        self.model = HashModel(32, 4, 4096, 2048)
        self.truth = Sequential(self.model)
        times = interpolated(self.steps)
        forward = self.model.forward

        def timed(batch):  # type: ignore[no-untyped-def]
            slow = self.burst[0] <= self.now < self.burst[1]
            self.now += times.estimate(len(batch.input_ids)) * (10.0 if slow else 1.0)
            self.now += self.tax_s * (self._rounds > self._taxed)
            self._taxed = self._rounds
            if self.stall_s and any(arrival > self.now for arrival, _, _ in self._due):
                self.now += self.stall_s
                self._due = [(due + self.stall_s, *rest) for due, *rest in self._due]
                self._drafting_until += self.stall_s
            return forward(batch)

        self.model.forward = timed  # type: ignore[method-assign]
        self.engine = Engine(self.model, CONFIG, policy=self.policy, clock=lambda: self.now)
        self.commits: list[list[Commit]] = []
        self.done: dict[int, RequestStats] = {}
        self.rows_per_step: list[int] = []
        self._due: list[tuple[float, int, DraftTree]] = []
        self._rounds = self._taxed = 0
        self._began = self._drafting_until = -1.0  # its cycle
        self._asked_for: dict[int, tuple[int, int]] = {}  # while it is busy: base, count
        for _ in range(self.requests):
            self.submit()

    def submit(self) -> None:
        i = len(self.commits)
        self.commits.append([])
        self.engine.submit(self._request(i))
        self.engine.set_drafting(i, DraftOffer("a", 4, own_device=self.own_device))
        self._answer(i, 2, 4, self.first_delay_s)

    def _request(self, i: int) -> Request:
        return Request(
            i,
            (i % 32, i // 32),
            SamplingParams(temperature=0.0),
            StopParams(max_tokens=self.max_tokens),
            self.speculation,
        )

    def _answer(self, session: int, base: int, count: int, delay_s: float | None = None) -> None:
        if session in self.dead or not count:
            return
        if self.busy and self._began < self.now < self._drafting_until:
            self._asked_for[session] = (base, count)
            return
        self._began = self.now
        self._rounds += 1
        right = self._rounds % 100 < 100 * self.agreement
        tokens = self.truth.tokens(
            self._request(session).prompt_token_ids, SamplingParams(temperature=0.0), base + 6
        )[base - 2 : base - 2 + count]
        if session in self.clueless:
            tokens = ()
        tree = DraftTree.chain(base, tokens if right else [(t + 1) % 32 for t in tokens])
        arrival = self.now + (self.delay_s if delay_s is None else delay_s)
        self._drafting_until = arrival
        arrival += self.hiccup_s * (self._rounds == self.requests + 1)
        self._due += [(arrival + 1e-3 * n, session, tree) for n in range(self.copies)]

    def run(self) -> list[RequestStats]:
        """Run until all requests have ended, and return the stats of each."""
        while len(self.done) < len(self.commits):
            self._due.sort(key=lambda item: item[0])
            while self._due and self._due[0][0] <= self.now:
                arrived_at, session, tree = self._due.pop(0)
                self.engine.post_block(PostedBlock(session, tree, "a", self.draft_us, arrived_at))
            if self._asked_for and self.now >= self._drafting_until:
                asked, self._asked_for = self._asked_for, {}
                for session, (base, count) in asked.items():
                    self._answer(session, base, count)
            events = self.engine.step()
            if events is None:
                arrival = self._due[0][0] if self._due else float("inf")
                assert min(arrival, self.engine.wake_at) < self.now + 1.0, "an unbounded wait"
                self.now = max(self.now, min(arrival, self.engine.wake_at))
                continue
            assert events.timings is not None
            self.rows_per_step.append(events.timings.num_rows)
            for commit in events.commits:
                self.commits[commit.session_id].append(commit)
                if commit.stats is not None:
                    self.done[commit.session_id] = commit.stats
                else:
                    base = commit.base_len + len(commit.token_ids)
                    self._answer(commit.session_id, base, commit.num_draft_tokens)
        return [self.done[i] for i in range(len(self.commits))]


def test_a_good_proposer_is_waited_for_and_used() -> None:
    bench = Bench(AdaptivePolicy(4))
    (stats,) = bench.run()
    assert stats.accepted / stats.drafted == 1.0
    assert stats.output_tokens / stats.rounds > 4.0
    assert stats.misses_late <= 2
    assert bench.now < 0.6 * stats.output_tokens * STEP_S[0][1]


# Seconds on an H200: an 8B target's steps, and a 1B draft on the same card, on demand.
GPU_STEP_S = ((1, 0.0046), (8, 0.0048), (40, 0.0052), (160, 0.0063), (320, 0.0097), (640, 0.016))


@pytest.mark.parametrize(
    ("requests", "delay_s", "stall_s"),
    [
        (1, 0.0069, 0.0),
        (8, 0.0075, 0.0),
        (32, 0.0080, 0.0),
        (1, 0.0069, 0.0035),
        (8, 0.0075, 0.0035),
    ],
)
def test_a_draft_slower_than_a_step_is_waited_for_where_that_pays(
    requests: int, delay_s: float, stall_s: float
) -> None:
    """Rows that go on without their drafts have them late, and on a shared device slow them down:
    neither must make it look as if waiting did not pay."""
    bench = Bench(
        AdaptivePolicy(4),
        requests=requests,
        delay_s=delay_s,
        agreement=0.97,
        steps=GPU_STEP_S,
        first_delay_s=0.03,
        stall_s=stall_s,
    )
    all_stats = bench.run()
    rounds = sum(stats.rounds for stats in all_stats)
    assert sum(stats.output_tokens for stats in all_stats) / rounds > 3.2
    plain = interpolated(GPU_STEP_S).estimate(requests) * bench.max_tokens
    assert bench.now < 0.7 * plain


class Told(AdaptivePolicy):
    """After a step it hears of another draft of its proposer, which took 20 ms alone."""

    told = False

    def step_done(self, step: StepDone) -> None:
        super().step_done(step)
        if not self.told:
            self.told = True
            row = Drafting(Offered(4, proposer=DraftOffer("a", 4)), drafter="a ")
            times = self.measured.costs.known_draft_times(row)
            times.observe(0.0, 0.020, 0.001, 4, alone=True)


def test_a_row_comes_to_wait_for_its_drafts_although_the_first_was_slow() -> None:
    """It had gone on beside them for 400 steps: only drafts with no step beside them counted."""
    bench = Bench(
        Told(4),
        delay_s=0.0041,
        agreement=0.85,
        max_tokens=600,
        steps=GPU_STEP_S,
        stall_s=0.0025,
        busy=True,
    )
    (stats,) = bench.run()
    assert bench.now < 0.55 * stats.output_tokens * GPU_STEP_S[0][1]


def test_drafts_that_slow_the_steps_beside_them_are_given_up() -> None:
    """Where a draft costs the running step more than it brings: found out by doing without."""

    def run(tax_s: float, *, speculate: bool) -> tuple[list[RequestStats], float]:
        bench = Bench(
            AdaptivePolicy(4),
            requests=4,
            agreement=0.6,
            max_tokens=1200,
            tax_s=tax_s,
            speculation=SpeculationParams(enabled=speculate),
        )
        return bench.run(), bench.now

    plain_stats, plain = run(0.0, speculate=False)
    assert all(stats.drafted == 0 for stats in plain_stats)
    stats, shared = run(0.015, speculate=True)
    assert shared < 1.15 * plain
    assert sum(s.k_histogram[0] for s in stats) > 0.7 * sum(s.rounds for s in stats)
    stats, apart = run(0.0, speculate=True)
    assert apart < 0.9 * plain, "without contention they pay"
    assert sum(s.k_histogram[0] for s in stats) < 0.2 * sum(s.rounds for s in stats)


def test_one_draft_that_took_a_second_does_not_end_speculation() -> None:
    bench = Bench(AdaptivePolicy(4), hiccup_s=1.0, max_tokens=1000)
    (stats,) = bench.run()
    assert stats.output_tokens / stats.rounds > 4.0


def test_a_burst_of_slow_steps_does_not_end_speculation() -> None:
    bench = Bench(AdaptivePolicy(4), agreement=0.8, max_tokens=600, burst=(0.4, 1.2))
    (stats,) = bench.run()
    assert stats.k_histogram[0] < 0.25 * stats.rounds
    assert stats.output_tokens / stats.rounds > 3.0


def test_a_useless_proposer_costs_little() -> None:
    bench = Bench(AdaptivePolicy(4), agreement=0.0)
    (stats,) = bench.run()
    assert stats.accepted == 0
    assert stats.drafted < 0.25 * 4 * stats.rounds, "K shrinks to 0 where nothing is accepted"
    assert stats.drafted > 4, "but it is tried again"
    assert bench.now < 1.2 * stats.output_tokens * STEP_S[0][1]


def test_an_empty_block_ends_the_wait_and_is_no_miss() -> None:
    bench = Bench(FixedPolicy(4, max_wait_s=0.05), clueless={0})
    (stats,) = bench.run()
    assert stats.misses_late == stats.misses_wrong == 0
    assert stats.fallback_rounds == stats.rounds - 1, "the first round processed the prompt"
    assert stats.wait_ms < 1.01 * stats.waits * bench.delay_s * 1e3, "no longer than it took"


@pytest.mark.parametrize("delay_s", [0.0004, 0.002, 0.005, 0.01])
def test_answers_without_a_guess_are_not_waited_for_long(delay_s: float) -> None:
    """Of a method that looks its drafts up and finds none, over a network."""
    policy = AdaptivePolicy(4)
    bench = Bench(policy, delay_s=delay_s, clueless={0}, max_tokens=400, own_device=True)
    (stats,) = bench.run()
    assert stats.drafted == stats.misses_wrong == 0
    assert stats.misses_late <= 1
    assert stats.wait_ms * 1e-3 < 0.025 * stats.output_tokens * STEP_S[0][1]
    assert bench.now < 1.04 * stats.output_tokens * STEP_S[0][1]
    later = Bench(policy, began=bench.now, delay_s=delay_s, clueless={0}, own_device=True)
    (stats,) = later.run()
    assert stats.waits <= 2, "of the next request it is known"


class KnowsHalf(Bench):
    """Has guesses for forty tokens, none for the next forty, and so on."""

    def _answer(self, session: int, base: int, count: int, delay_s: float | None = None) -> None:
        self.clueless = {session} if base // 40 % 2 else set()
        super()._answer(session, base, count, delay_s)


@pytest.mark.parametrize(("delay_s", "most"), [(0.0005, 0.7), (0.003, 0.8), (0.02, 1.04)])
def test_guesses_come_back_to_be_waited_for(delay_s: float, most: float) -> None:
    bench = KnowsHalf(AdaptivePolicy(4), delay_s=delay_s, max_tokens=400, own_device=True)
    (stats,) = bench.run()
    assert bench.now < most * stats.output_tokens * STEP_S[0][1]


@pytest.mark.parametrize("copies", [1, 3])
def test_drafting_time_that_a_proposer_tells_is_at_most_the_time_that_passed(copies: int) -> None:
    """The first copy is bounded by the commit that it answers, the others by the copy before."""
    bench = Bench(FixedPolicy(4), draft_us=2**32 - 1, copies=copies, max_tokens=60)
    (stats,) = bench.run()
    answered = len(bench.commits[0])  # and the last one is not, as Open is
    most_ms = answered * (bench.delay_s * 1e3 + copies - 1)
    assert 0.8 * most_ms < stats.propose_ms <= most_ms + 1e-6
    assert stats.network_ms == 0.0


def test_drafting_time_that_a_proposer_tells_is_believed_within_the_delay() -> None:
    bench = Bench(FixedPolicy(4), max_tokens=60)
    (stats,) = bench.run()
    answered = len(bench.commits[0])
    assert stats.propose_ms == pytest.approx(answered * 1.0)
    assert stats.network_ms == pytest.approx(answered * (bench.delay_s * 1e3 - 1.0))


def test_a_silent_proposer_is_waited_for_once_set_aside_and_tried_again() -> None:
    bench = Bench(AdaptivePolicy(4), dead={0})
    (stats,) = bench.run()
    assert stats.waits == 1
    assert stats.wait_ms < 1e3 * MAX_PATIENCE_S
    # A quarter of a second of rounds, then 3 misses and 16 at rest, a miss and 32, a miss and 64.
    early = round(MAX_PATIENCE_S / STEP_S[0][1])
    assert early <= stats.misses_late <= early + 3 + 1 + 1 + 1
    assert stats.fallback_rounds == stats.rounds - 1, "the first round processed the prompt"


@pytest.mark.parametrize("policy", [AdaptivePolicy(4), FixedPolicy(4, max_wait_s=0.05)])
def test_a_proposer_that_is_set_aside_is_not_waited_for_by_later_requests(policy: Policy) -> None:
    bench = Bench(policy, dead=set(range(100)), max_tokens=12)
    bench.run()
    assert bench.done[0].waits >= 1, "of an unknown proposer a draft may come"
    for _ in range(2):
        bench.submit()
        bench.run()
    for _ in range(4):
        bench.submit()
    for stats in bench.run()[-4:]:
        assert stats.waits == 0
        assert stats.wait_ms == 0.0


@pytest.mark.parametrize("agreement", [0.0, 1.0])
def test_a_proposer_that_was_set_aside_is_waited_for_after_its_blocks(agreement: float) -> None:
    """Also after wrong ones: what they are worth is for acceptance to tell."""
    bench = Bench(AdaptivePolicy(4), dead={0}, max_tokens=60, agreement=agreement)
    bench.run()
    bench.submit()
    assert bench.run()[1].wait_ms < 1e3 * bench.delay_s * bench.done[1].waits + 1e-6
    bench.submit()
    assert bench.run()[2].waits >= 1


def test_a_late_proposer_is_not_waited_for_in_vain() -> None:
    bench = Bench(AdaptivePolicy(4), delay_s=0.4)
    (stats,) = bench.run()
    assert stats.wait_ms < 600
    assert stats.output_tokens == 200


def test_a_useful_block_brings_a_proposer_back_at_once() -> None:
    policy = FixedPolicy(4, max_wait_s=0.01)
    bench = Bench(policy, dead={0}, max_tokens=60)
    while not any(bench.engine.step() is None for _ in range(2)):
        pass
    for _ in range(3):
        bench.now += 0.02
        events = bench.engine.step()
    assert events is not None
    assert events.set_aside == (0,)
    assert all(bench.engine.step() is not None for _ in range(FIRST_OPEN_ROUNDS - 1)), "no waiting"
    seq = bench.engine._scheduler.by_session[0]
    prompt = bench._request(0).prompt_token_ids
    truth = bench.truth.tokens(prompt, SamplingParams(temperature=0.0), 80)
    at = len(seq.token_ids)
    bench.engine.post_block(PostedBlock(0, DraftTree.chain(at, truth[at - 2 : at]), "a", 10))
    events = bench.engine.step()
    assert events is not None
    assert len(events.commits[0].token_ids) == 3
    assert bench.engine.step() is None, "it is waited for again"


@pytest.mark.parametrize(
    "speculation",
    [
        SpeculationParams(enabled=False),
        SpeculationParams(num_speculative_tokens=0),
    ],
)
def test_without_speculation_nothing_waits_or_counts(speculation: SpeculationParams) -> None:
    (stats,) = Bench(AdaptivePolicy(4), speculation=speculation).run()
    assert (stats.waits, stats.drafted, stats.fallback_rounds, stats.hits) == (0, 0, 0, 0)


def test_ready_rows_do_not_wait_for_a_row_whose_proposer_is_silent() -> None:
    """No barrier: seven rows go on while the eighth waits for its own deadline."""
    bench = Bench(FixedPolicy(4, max_wait_s=0.3), requests=8, dead={3}, max_tokens=100)
    stats = bench.run()
    others = [stats[i] for i in range(8) if i != 3]
    assert all(s.wait_ms < 200 for s in others)
    assert stats[3].wait_ms > 900


def test_rows_are_gathered_where_that_pays() -> None:
    """Two rows half a step apart settle into common steps: two steps cost twice one."""
    bench = Bench(AdaptivePolicy(4), requests=2, max_tokens=300)
    bench.run()
    together = sum(rows == 2 for rows in bench.rows_per_step)
    assert together > 0.7 * len(bench.rows_per_step)


def ahead(
    *, branches: int = 8, sessions: int = 1, step_s: float = 0.0045, delay_s: float = 0.0001
) -> World:
    """An 8B target and a 1B draft on two H200s, as anchors.md has them, at temperature 1."""
    config = EngineConfig(
        page_size=4, num_pages=20_000, max_model_len=2048, num_speculative_tokens=4
    )
    world = World(
        AdaptivePolicy(4),
        config,
        lambda num_tokens: step_s + 2e-5 * num_tokens,
        random.Random(1),
    )
    method = draft_model(0.15, max_branches=branches, num_pages=20_000, max_model_len=2048)
    world.add(method, Net(delay_s=delay_s))
    for i in range(sessions):
        sampling = SamplingParams(temperature=1.0, seed=i)
        stop = StopParams(max_tokens=150 if sessions == 1 else 60)
        world.submit(Request(i, (i % 32, i // 32, 5), sampling, stop))
    world.run()
    return world


def total(world: World, name: str) -> float:
    stats = [commit.stats for commit in world.last.values()]
    return sum(getattr(s, name) for s in stats)


def test_drafting_ahead_hides_the_draft_and_the_way() -> None:
    on_demand, hidden = ahead(branches=0), ahead()
    rounds = total(hidden, "rounds")
    assert total(hidden, "hits") > 0.85 * rounds
    assert total(hidden, "hits_after_hit") > 0.85 * total(hidden, "rounds_after_hit")
    assert hidden.now < 0.75 * on_demand.now
    assert hidden.now < 1.1 * rounds * 0.0046, "a round is a step, and little more"


def test_a_way_longer_than_the_step_still_pays() -> None:
    assert ahead(delay_s=0.0025).now < 0.8 * ahead(branches=0, delay_s=0.0025).now


def mean_rows(world: World) -> float:
    rows = world.rows_per_step[4:-12]
    return sum(rows) / len(rows)


@pytest.mark.parametrize(
    ("sessions", "step_s", "delay_s"), [(8, 0.0045, 0.0001), (24, 0.008, 0.0025)]
)
def test_a_batch_that_drafts_on_demand_stays_together(
    sessions: int, step_s: float, delay_s: float, monkeypatch: pytest.MonkeyPatch
) -> None:
    """In cohorts, one's drafts beside another's step, it would be slower, or no faster."""
    monkeypatch.setattr(mode, "MANY_ROWS", 100)  # the answers are too short for a trial
    together = ahead(branches=0, sessions=sessions, step_s=step_s, delay_s=delay_s)
    assert mean_rows(together) > 0.9 * sessions


def test_a_silent_proposers_pause_has_an_end() -> None:
    breaker = CircuitBreaker()
    opened = [breaker.rounds_left for _ in range(100) if breaker.missed()]
    assert opened[:3] == [FIRST_OPEN_ROUNDS, 2 * FIRST_OPEN_ROUNDS, 4 * FIRST_OPEN_ROUNDS]
    assert max(opened) == opened[-1] == MOST_OPEN_ROUNDS


class Early(Bench):
    """Its blocks came before the commits that they answer, and were looked at after these."""

    def _answer(self, session: int, base: int, count: int, delay_s: float | None = None) -> None:
        super()._answer(session, base, count, -0.003 if delay_s is None else delay_s)


def test_blocks_that_came_before_their_commits_took_no_time() -> None:
    bench = Early(policy := AdaptivePolicy(4), max_tokens=60)
    bench.run()
    times = policy.measured.costs.draft_times(Drafting(Offered(4), drafter="a "))
    assert times.mean_s(4) == times.most_s(4) == 0.0


@pytest.mark.parametrize("requests", [1, 2])
@pytest.mark.parametrize("others", [0, 20])
def test_short_answers_after_slow_first_drafts_are_soon_drafted_for(
    requests: int, others: int
) -> None:
    """The first request's drafts took 50 ms: nothing was drafted for ten others of 24 tokens.

    Nor are requests in between that want no drafts tries in vain.
    """
    policy, now, drafted = AdaptivePolicy(4), 0.0, []

    def run(max_tokens: int, delay_s: float, *, speculate: bool = True) -> None:
        nonlocal now
        wanted = SpeculationParams(enabled=speculate)
        bench = Bench(policy, requests, now, delay_s, max_tokens=max_tokens, speculation=wanted)
        drafted.append(sum(stats.drafted for stats in bench.run()))
        now = bench.now

    run(400, 0.05)
    for _ in range(others):
        run(24, 0.012, speculate=False)
    for _ in range(3):
        run(24, 0.012)
    assert min(drafted[-2:]) > 10 * requests
