"""What the policy makes of proposers: good, useless, late, silent, clueless and lying ones."""

from __future__ import annotations

import random
import re
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any
from unittest.mock import patch

import numpy as np
import pytest

from outrider.config import EngineConfig
from outrider.params import Advice, SamplingParams, SpeculationParams, StopParams
from outrider.policy.adaptive import AdaptivePolicy
from outrider.policy.base import FixedPolicy, Policy
from outrider.policy.circuit_breaker import MISSES_ALLOWED, CircuitBreaker
from outrider.policy.measurements import Acceptance
from outrider.policy.waiting import MAX_PATIENCE_S
from outrider.rpc.feature_codec import SessionMessage
from outrider.types import Request, RequestStats, StepEvents
from scorer_service.core import POLICIES
from scorer_service.drafting import outbox
from tests.support.simulators.methods import VOCAB, Net, copying, draft_model
from tests.support.simulators.simulation import Player, World

CONFIG = EngineConfig(page_size=4, num_pages=4096, max_model_len=2048)
# Seconds of a step by its tokens: a 62 M model's on a CPU, and an 8B's on an H200.
CPU_STEP_S = {1: 0.0075, 4: 0.0078, 8: 0.0089, 16: 0.0110, 64: 0.0260, 640: 0.2}
GPU_STEP_S = {1: 0.0046, 8: 0.0048, 40: 0.0052, 160: 0.0063, 320: 0.0097, 640: 0.016}
PAGE = Path(__file__).parents[3] / "docs/another-policy.md"
PLAIN_S = CPU_STEP_S[1]  # of a token without drafts
NEAR = Net(0.0003)
NEVER = Net(1e6)  # the way to a silent proposer
GREEDY, UNDRAFTED = SamplingParams(temperature=0.0), SpeculationParams(enabled=False)


class Bench(World):
    """A 62 M model and its proposers: by default one whose drafts take 3 ms and are right."""

    def __init__(
        self, policy: Policy | None = None, net: Net = NEAR, method: Any = None, **drafting: Any
    ) -> None:
        policy, self._times = policy or AdaptivePolicy(4), drafting.pop("times", CPU_STEP_S)
        config = replace(CONFIG, num_speculative_tokens=policy.num_speculative_tokens)
        super().__init__(policy, config, lambda s: self.plain_s(s.num_tokens), random.Random(1))
        self.speculation = SpeculationParams()  # of requests
        self.ways, self.asked = set[str](), set[int]()  # how steps came to drafts, of what length
        drafting = {"eps": 0.0, "max_branches": 0} | drafting
        self.proposer = self.add(method or draft_model(**drafting), net)

    def _publish(self, events: StepEvents) -> None:
        if events.counts is not None and events.counts.draft_mode:
            self.ways.add(events.counts.draft_mode)
        self.asked |= {commit.num_draft_tokens for commit in events.commits}
        super()._publish(events)

    def plain_s(self, num_tokens: int) -> float:
        """Seconds of a step of so many tokens, as of as many rows without drafts."""
        return float(np.interp(num_tokens, list(self._times), list(self._times.values())))

    def ask(self, count: int = 1, max_tokens: int = 200) -> list[RequestStats]:
        """Run so many requests to their end."""
        first, params = len(self.requests) + 1, (StopParams(max_tokens), self.speculation)
        for i in range(first, first + count):
            self.begin(Request(i, divmod(i - 1, VOCAB)[::-1], GREEDY, *params))
        self.run()
        return [stats for i in sorted(self.last) if i >= first and (stats := self.last[i].stats)]


SLOW = {"net": Net(0.0022), "eps": 0.01, "times": GPU_STEP_S}
# The times of two H200s, with which branches are there before the verdict.
H200S = {"net": Net(0.000575), "eps": 0.028, "times": {1: 0.0049}, "max_branches": 16}
# A world and its requests; tokens a round, and most of the plain time.
WORTH: dict[str, tuple[dict[str, Any], int, float, float]] = {
    "right drafts": ({}, 1, 4.0, 0.6),
    "drafts slower than a step": (SLOW, 1, 2.8, 0.7),
    "of 32 rows": (SLOW, 32, 2.8, 0.7),
    "all four fit into the step": ({**H200S, "forward_s": 0.0009}, 1, 3.6, 0.28),
    "a fourth would come too late": ({**H200S, "forward_s": 0.0011}, 1, 3.0, 0.335),
}


@pytest.mark.parametrize(("world", "requests", "most", "of_plain"), WORTH.values(), ids=WORTH)
def test_good_drafts_are_awaited_and_used(
    world: dict[str, Any], requests: int, most: float, of_plain: float
) -> None:
    """Rows that go on without their drafts have them late: that must not look as if useless."""
    bench = Bench(**world)
    stats = bench.ask(requests)
    rounds = sum(s.rounds for s in stats)
    assert sum(s.output_tokens for s in stats) > most * rounds
    assert sum(s.misses_late for s in stats) < 0.05 * rounds
    assert bench.now < of_plain * 200 * bench.plain_s(requests)
    assert "max_branches" not in world or stats[0].hits >= 0.9 * stats[0].iter_count
    assert ("ahead" in bench.ways) == ("max_branches" in world), "what its proposer can"


def test_a_burst_of_slow_steps_does_not_end_speculation() -> None:
    bench = Bench(eps=0.01)
    usual_s = bench.step_s
    bench.step_s = lambda step: usual_s(step) * (10 if 0.4 < bench.now < 1.2 else 1)
    (stats,) = bench.ask(max_tokens=600)
    assert stats.k_histogram[0] < 0.25 * stats.rounds
    assert stats.output_tokens / stats.rounds > 2.4


def test_a_useless_proposer_costs_little_and_is_tried_again() -> None:
    bench = Bench(eps=1.0)
    (stats,) = bench.ask(max_tokens=400)
    assert 4 < stats.drafted < 0.25 * 4 * stats.rounds, "K shrinks to 0 where nothing is accepted"
    assert bench.now < 1.2 * stats.output_tokens * PLAIN_S


@pytest.mark.parametrize(("requests", "most"), [(1, 0.25), (16, 1.5)])
def test_rounds_of_few_rows_are_learned_several_at_a_time(requests: int, most: float) -> None:
    """The host takes nearly as long for one as for eight. None is left out."""
    learned = list[int]()

    class Noting(Acceptance):
        def observe(self, rows: Any) -> None:
            learned.append(sum([each.drafted > 0 for _, rounds in rows for each, _ in rounds]))
            super().observe(rows)

    policy = AdaptivePolicy(4)
    policy.measured.acceptance = Noting()
    stats = Bench(policy).ask(requests, max_tokens=400)
    assert len(learned) < most * stats[0].rounds
    assert sum(learned) == sum([s.rounds - s.k_histogram[0] for s in stats]) > 0


def test_lone_row_that_seldom_has_a_guess_is_chosen_for_every_eight_rounds() -> None:
    """A longer draft is not tried in each round because none comes."""
    policy = AdaptivePolicy(4)
    with patch.object(policy, "choose_counts", wraps=policy.choose_counts) as chosen:
        (stats,) = advised(policy, 0.0006, lambda i: i % 4 > 0).ask(max_tokens=400)
    assert 0 < stats.drafted < stats.rounds
    assert chosen.call_count < stats.rounds / 4


def advised(policy: Policy, delay_s: float, known: Callable[[int], bool]) -> Bench:
    """With a proposer that has the requests' advice, of whose tokens the `known` come true."""
    bench = Bench(policy, Net(delay_s / 2), method=copying("deterministic", 0))
    text = enumerate(bench.model.greedy_text((0, 0), 400))
    said = tuple([token if known(i) else VOCAB - 1 for i, token in text])
    advice = Advice(said, min_token_match=3, max_token_match=3)
    bench.speculation = SpeculationParams(num_speculative_tokens=4, advice=advice)
    return bench


@pytest.mark.parametrize("delay_s", [0.0004, 0.002, 0.005, 0.01])
def test_answers_without_a_guess_are_not_waited_for_long(delay_s: float) -> None:
    """However long they take, and they are no misses."""
    (stats,) = advised(FixedPolicy(4, max_wait_s=0.05), delay_s, lambda _: False).ask()
    assert (stats.misses_late, stats.fallback_rounds) == (0, stats.rounds - 1), "one had the prompt"
    assert stats.wait_ms < 1.1e3 * delay_s * stats.waits
    bench = advised(AdaptivePolicy(4), delay_s, lambda _: False)
    (stats,) = bench.ask(max_tokens=400)
    assert stats.drafted == stats.misses_wrong == 0
    assert stats.misses_late <= 1
    assert bench.now < 1.04 * stats.output_tokens * PLAIN_S
    (stats,) = bench.ask()
    assert stats.waits <= 2, "of the next request it is known"


@pytest.mark.parametrize(("delay_s", "most"), [(0.0005, 0.7), (0.003, 0.8), (0.02, 1.04)])
def test_guesses_come_back_to_be_waited_for(delay_s: float, most: float) -> None:
    """The advice has forty tokens of the text, not the next forty, and so on."""
    bench = advised(AdaptivePolicy(4), delay_s, lambda i: i // 40 % 2 > 0)
    bench.ask(max_tokens=400)
    assert bench.now < most * 400 * PLAIN_S


def test_a_silent_proposer_is_waited_for_once_set_aside_and_tried_again() -> None:
    bench = Bench(net=NEVER)
    (stats,) = bench.ask()
    assert stats.waits == 1
    assert stats.wait_ms < 1e3 * MAX_PATIENCE_S
    # A quarter of a second of rounds, then 3 misses and 16 at rest, a miss and 32, a miss and 64.
    assert 0 <= stats.misses_late - round(MAX_PATIENCE_S / PLAIN_S) <= 3 + 1 + 1 + 1
    assert stats.fallback_rounds == stats.rounds - 1, "the first round processed the prompt"


@pytest.mark.parametrize("eps", [0.0, 1.0])
@pytest.mark.parametrize("policy", [AdaptivePolicy, FixedPolicy])
def test_later_requests_wait_again_after_silence(policy: type[Policy], eps: float) -> None:
    """Also after wrong ones: what they are worth is for acceptance to tell."""
    bench = Bench(policy(4), NEVER, eps=eps)
    assert bench.ask(max_tokens=12)[0].waits >= 1, "of an unknown proposer a draft may come"
    bench.ask(max_tokens=60)
    for stats in bench.ask(4, max_tokens=12):
        assert (stats.waits, stats.wait_ms) == (0, 0.0)
    bench.proposer.arrival, bench.proposer.net = {"to": 0.0, "from": 0.0}, NEAR
    bench.ask(max_tokens=60)
    assert bench.ask(max_tokens=60)[0].waits >= 1


def test_rows_do_not_wait_for_a_row_whose_proposer_is_silent() -> None:
    """No barrier: every second row goes on while the others wait for their own deadline."""
    bench = Bench(FixedPolicy(4, max_wait_s=0.3))
    bench.add(draft_model(0.0), NEVER)
    stats = bench.ask(8, max_tokens=100)
    assert all(s.wait_ms < 200 for s in stats[::2])
    assert max(s.wait_ms for s in stats[1::2]) > 250


class Unasked(Bench):
    """Its proposer drafts although nobody asked it to."""

    def begin(self, request: Request) -> None:
        super().begin(request)
        session = self.hub._sessions[request.session_id]
        assert session.proposer is None, "the hub knows that none is wanted"
        session.num_speculative_tokens = 4
        self._tell(self.hub.registry.assign, session)

    def _send(self, player: Player, message: SessionMessage) -> None:
        for each in (*message.batch.opens, *message.batch.commits):
            each.num_draft_tokens = 4
        super()._send(player, message)


@pytest.mark.parametrize(
    ("policy", "told"),
    [
        (AdaptivePolicy(4), UNDRAFTED),
        (AdaptivePolicy(4), SpeculationParams(num_speculative_tokens=0)),
        (AdaptivePolicy(0), SpeculationParams()),
        (POLICIES["off"](4), SpeculationParams(num_speculative_tokens=2)),
    ],
)
@patch.object(outbox, "HELD_TOKENS", 1)  # the proposer hears of each commit
def test_without_speculation_nothing_is_counted(policy: Policy, told: SpeculationParams) -> None:
    bench = Unasked(policy)
    bench.speculation = told
    (stats,) = bench.ask()
    assert stats.rounds == stats.output_tokens
    assert (stats.waits, stats.drafted, stats.fallback_rounds, stats.hits) == (0, 0, 0, 0)
    assert (bench.ways, bench.asked) == ({"none"}, {0})
    undrafted = {size in bench.engine.snapshot().undrafted_sizes for size in (1, 2, 3)}
    assert undrafted == {policy.num_speculative_tokens == 0}


def test_policy_of_the_page_is_faster_than_none(capsys: pytest.CaptureFixture[str]) -> None:
    names: dict[str, Any] = {}
    for code in re.findall(r"```python\n(.*?)```", PAGE.read_text(), re.DOTALL):
        exec(re.sub(r"\(\d\.0\)", "(0.4)", code), names)  # seconds
    _adaptive, likely = capsys.readouterr().out.splitlines()
    assert float(likely.split()[0]) > 1.5 * 1638, "of eight rows without drafts"


def test_a_silent_proposers_pause_grows_and_a_useful_draft_ends_it_at_once() -> None:
    breaker = CircuitBreaker()
    opened = [breaker.rounds_left for _ in range(100) if breaker.missed()]
    assert opened == sorted(set(opened)), "ever longer"
    breaker.close()
    assert not breaker.rounds_left
    assert breaker.missed(), "one draft says little"
    breaker.close(verified=True)
    assert [breaker.missed() for _ in range(MISSES_ALLOWED)].count(True) == 1
    breaker.close(verified=True)
    for _ in range(10):
        assert not any(breaker.missed() for _ in range(MISSES_ALLOWED - 1))
        breaker.close()  # misses that are not in a row


@pytest.mark.parametrize(
    ("requests", "others", "slow_s", "tokens"),
    [(1, 0, 0.024, 400), (1, 20, 0.024, 400), (2, 20, 0.024, 400), (1, 0, 0.5, 3)],
)
def test_short_answers_have_drafts(requests: int, others: int, slow_s: float, tokens: int) -> None:
    """The first drafts took long, and requests in between want none."""
    bench = Bench(net=Net(slow_s))
    bench.ask(requests, tokens)
    bench.proposer.net, bench.speculation = Net(0.005), UNDRAFTED
    for _ in range(others):
        bench.ask(requests, 24)
    bench.speculation = SpeculationParams()
    bench.ask(requests, 24)
    drafted = [stats.drafted for _ in range(8) for stats in bench.ask(requests, 24)]
    assert sum(drafted) > 8 * 10 * requests
