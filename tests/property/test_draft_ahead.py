"""Whatever a proposer that runs ahead does, and its network, the text is the target's own."""

from __future__ import annotations

import random
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from outrider.config import EngineConfig
from outrider.drafting.draft_model.proposer import DraftModelProposer
from outrider.drafting.hybrid import HybridProposer
from outrider.engine.sequence import Sequence as Row
from outrider.params import Advice, SamplingParams, SpeculationParams, StopParams
from outrider.policy.adaptive import AdaptivePolicy
from outrider.policy.base import FixedPolicy, Ready, StepDone
from outrider.types import Request
from tests.support.models.hash_model import HashModel, Sequential
from tests.support.simulators.methods import COPYING, VOCAB, Net, copying, draft_model
from tests.support.simulators.simulation import World

pytestmark = pytest.mark.timeout(900)

PAGE_SIZE, NUM_PAGES, MAX_LEN = 4, 40, 64
TRUTH = Sequential(HashModel(VOCAB, num_pages=1))
SAMPLINGS = (
    SamplingParams(temperature=0.0),
    SamplingParams(temperature=1.0, seed=7),
    SamplingParams(temperature=0.7, seed=2**63 + 1, top_k=8, top_p=0.95),
    SamplingParams(temperature=0.0, repetition_penalty=1.5, logit_bias=((3, 3.0), (7, -2.0))),
    SamplingParams(
        temperature=0.9, seed=5, min_p=0.02, presence_penalty=1.2, frequency_penalty=-0.3
    ),
)

nets = st.builds(
    Net,
    delay_s=st.sampled_from((0.0, 0.0001, 0.001, 0.005)),
    jitter_s=st.sampled_from((0.0, 0.002)),
    stall_chance=st.sampled_from((0.0, 0.05)),
    stall_s=st.sampled_from((0.01, 0.5)),
    break_chance=st.sampled_from((0.0, 0.03)),
    repeat_chance=st.sampled_from((0.0, 0.2)),
    reorder_chance=st.sampled_from((0.0, 0.2)),
)


schedules = {
    "seed": st.integers(0, 2**32),
    "net": nets,
    "k": st.integers(1, 5),
    "policy": st.sampled_from(("fixed", "adaptive", "changing")),
    "step_s": st.sampled_from((0.001, 0.004)),
    "forward_s": st.sampled_from((0.0001, 0.0006, 0.003)),
    "eps": st.sampled_from((0.0, 0.2, 0.5)),
    "max_branches": st.sampled_from((0, 1, 8)),
    "num_pages": st.sampled_from((16, 28, 200)),
    "beside": st.sampled_from(("", *COPYING, "in one process")),
}
quietly: dict[str, Any] = {
    "deadline": None,
    "derandomize": True,
    "suppress_health_check": list(HealthCheck),
}


class Changing(FixedPolicy):
    """Wants drafts for a few steps, then none for a few, and so on.

    Rows go in two halves.
    """

    steps = 0

    def step_done(self, step: StepDone) -> None:
        self.steps += 1
        super().step_done(step)

    @property
    def drafting(self) -> bool:
        return self.steps // 3 % 2 == 0

    def choose_rows(
        self, ready: list[Row], waiting: Sequence[Row], num_prefilling: int, now: float
    ) -> Ready:
        half = (len(ready) + len(waiting) + 1) // 2
        return super().choose_rows(ready[:half], waiting, num_prefilling, now)


def draw_request(session: int, rng: random.Random) -> Request:
    """Any parameters; the advice is the text to come, or nearly."""
    max_tokens = rng.randint(2, 24)
    request = Request(
        session,
        tuple(rng.randrange(VOCAB) for _ in range(rng.randint(1, 12))),
        rng.choice(SAMPLINGS),
        StopParams(
            max_tokens=max_tokens,
            stop_token_ids=frozenset(rng.sample(range(VOCAB), rng.randint(0, 1))),
            min_tokens=rng.choice((0, 0, rng.randint(0, max_tokens))),
        ),
        top_logprobs=rng.choice((None, None, 2)),
    )
    text, _ = TRUTH.output(request, MAX_LEN, frozenset())
    advice = Advice(
        tuple(t if rng.random() < 0.9 else rng.randrange(VOCAB) for t in text),
        edit=rng.random() < 0.5,
        references=(tuple(text[2:]),),
    )
    return replace(request, speculation=SpeculationParams(advice=advice))


@dataclass(frozen=True, slots=True)
class Schedule:
    """A random world: its scorer, its draft model and the network between them."""

    seed: int
    net: Net
    k: int
    policy: str
    step_s: float
    forward_s: float
    eps: float
    max_branches: int
    num_pages: int
    beside: str


def check(schedule: Schedule) -> None:
    net, k, max_branches, beside = (
        schedule.net,
        schedule.k,
        schedule.max_branches,
        schedule.beside,
    )
    rng = random.Random(schedule.seed)
    config = EngineConfig(
        page_size=PAGE_SIZE,
        num_pages=NUM_PAGES,
        max_num_seqs=3,
        max_num_batched_tokens=rng.choice((4, 16, 64)),
        max_model_len=MAX_LEN,
        num_speculative_tokens=k,
    )
    max_wait_s = rng.choice((0.0, 0.003, 0.02))
    policies = {
        "fixed": FixedPolicy(k, max_wait_s=max_wait_s),
        "adaptive": AdaptivePolicy(k),
        "changing": Changing(k, max_wait_s=max_wait_s),
    }
    policy = policies[schedule.policy]
    world = World(policy, config, lambda step: schedule.step_s * (1 + step.num_tokens / 64), rng)
    sizes = schedule.num_pages, MAX_LEN
    model = draft_model(schedule.eps, schedule.forward_s, *sizes, max_branches=max_branches)
    if beside == "in one process":
        methods = [copying(name, max_branches)[0] for name in COPYING]
        world.add((HybridProposer([*methods, model[0]]), model[1]), net)
    else:
        world.add(model, net)
    if beside in COPYING:
        world.add(copying(beside, max_branches), net)
    for session in range(1, 4):
        request = draw_request(session, rng)
        if beside in COPYING and session % 2:  # else all would go to the draft model
            speculation = replace(request.speculation, methods=(beside,))
            request = replace(request, speculation=speculation)
        world.begin(request)
        world.run(until=rng.choice((0.0, 0.01, 0.04)))
    world.run()
    for session, request in world.requests.items():
        tokens, reason = TRUTH.output(request, MAX_LEN, frozenset())
        assert world.committed[session][len(request.prompt_token_ids) :] == tokens, request
        last = world.last[session]
        assert last.finish_reason is reason
        stats = last.stats
        assert stats is not None
        assert stats.hits_after_hit <= stats.rounds_after_hit
        assert stats.hits_after_miss <= stats.rounds_after_miss
        assert stats.hits + stats.misses_late + stats.misses_wrong <= stats.iter_count
    assert isinstance(model[0], DraftModelProposer)
    model[0].check_invariants()
    snapshot = world.engine.snapshot()
    assert (snapshot.running, snapshot.free_pages) == (0, NUM_PAGES)


@settings(max_examples=150, **quietly)
@given(**schedules)
def test_draft_ahead_under_any_schedule_keeps_the_targets_text(**schedule: Any) -> None:
    check(Schedule(**schedule))


@pytest.mark.slow
@pytest.mark.timeout(3600)
@settings(max_examples=5000, **quietly)
@given(**schedules)
def test_draft_ahead_under_thousands_of_schedules_keeps_the_targets_text(**schedule: Any) -> None:
    check(Schedule(**schedule))
