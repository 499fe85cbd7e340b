"""What the metrics are told step by step is what requests are told at their end."""

from __future__ import annotations

import random
from dataclasses import fields

import pytest

from outrider.config import EngineConfig
from outrider.counts import StepCounts, context_class, context_class_from
from outrider.params import SamplingParams, StopParams
from outrider.policy.adaptive import AdaptivePolicy
from outrider.policy.base import FixedPolicy
from outrider.types import Request, StepEvents
from tests.support.simulators.methods import Net, draft_model
from tests.support.simulators.simulation import World

NUM_REQUESTS = 8


class CountingWorld(World):
    """Keeps the counts of every step."""

    def _publish(self, events: StepEvents) -> None:
        counts = [] if events.counts is None else [events.counts]
        self.counts = [*getattr(self, "counts", []), *counts]
        super()._publish(events)


@pytest.mark.parametrize("kind", [FixedPolicy, AdaptivePolicy])
@pytest.mark.parametrize("max_branches", [0, 8])
def test_step_counts_of_all_steps_sum_to_request_stats(
    kind: type[FixedPolicy] | type[AdaptivePolicy], max_branches: int
) -> None:
    policy = kind(4)
    config = EngineConfig(
        page_size=4,
        num_pages=34,  # too few for all: some are preempted
        max_num_seqs=6,
        max_num_batched_tokens=32,
        max_model_len=128,
        num_speculative_tokens=4,
    )
    world = CountingWorld(
        policy, config, lambda step: 0.01 + 1e-4 * step.num_tokens, random.Random(3)
    )
    net = Net(delay_s=0.001, jitter_s=0.001, stall_chance=0.05, stall_s=0.03, repeat_chance=0.1)
    world.add(draft_model(eps=0.3, max_branches=max_branches), net)
    for session in range(1, NUM_REQUESTS + 1):
        world.begin(
            Request(
                session_id=session,
                prompt_token_ids=tuple((session * 7 + i) % 32 for i in range(5 + session)),
                sampling=SamplingParams(temperature=0.0),
                stop=StopParams(max_tokens=40, stop_token_ids=frozenset({3}), min_tokens=9),
            )
        )
    world.run()

    total = StepCounts()
    for counts in [*world.counts, world.engine._tracker.account.take()]:
        for field in fields(StepCounts):
            summed = getattr(total, field.name) + getattr(counts, field.name)
            setattr(total, field.name, summed)
    stats = [commit.stats for commit in world.last.values() if commit.stats is not None]
    assert len(stats) == NUM_REQUESTS

    assert sum(s.preemptions for s in stats) == total.preemptions > 0
    assert sum(s.output_tokens for s in stats) == total.output_tokens
    assert sum(s.hits for s in stats) == total.fates["p0", "hit"] > 0
    assert sum(s.misses_late for s in stats) == total.fates["p0", "late"]
    assert sum(s.misses_wrong for s in stats) == total.fates["p0", "wrong"]
    assert total.fates.total() > total.fates["p0", "hit"]
    assert sum(s.drafted for s in stats) == sum(k * n for (k, _), n in total.rounds.items())
    assert sum(s.accepted for s in stats) == sum(a * n for (_, a), n in total.rounds.items()) > 0
    assert total.drafted_by == {"p0": sum(s.drafted for s in stats)}
    assert total.accepted_by == {"p0": sum(s.accepted for s in stats)}
    for k in range(1, 5):
        rounds = sum(n for (drafted, _), n in total.rounds.items() if drafted == k)
        assert sum(s.k_histogram[k] for s in stats if k < len(s.k_histogram)) == rounds
    # Their prompts' first tokens are rounds of requests too, but not of decoding.
    assert sum(s.rounds for s in stats) - total.rounds.total() <= NUM_REQUESTS
    for milliseconds, seconds in (
        ([s.wait_ms for s in stats], total.wait_s),
        ([s.score_ms for s in stats], total.score_s),
        ([s.propose_ms for s in stats], total.propose_s),
        ([s.network_ms for s in stats], total.network_s),
    ):
        assert sum(milliseconds) / 1e3 == pytest.approx(seconds)
    assert sum(s.prompt_tokens for s in stats) == sum(a.prompt_tokens for a in total.admissions)
    assert len(total.admissions) == NUM_REQUESTS
    # Waits after a preemption are of the request, and of no admission.
    assert sum(s.queue_ms for s in stats) / 1e3 > sum(a.queue_s for a in total.admissions)
    assert total.plain_s > 0.0


def test_context_class_of_any_length_contains_it() -> None:
    for length in (0, 1, 255, 1023, 1024, 4095, 4096, 16_384, 65_535, 65_536, 1_000_000):
        index = context_class(length)
        assert context_class_from(index) <= length < context_class_from(index + 1), length
    assert [context_class_from(index) for index in range(4)] == [0, 1024, 4096, 16_384]
