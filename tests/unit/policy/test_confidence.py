"""What confidences of draft tokens are worth, and what false ones cost."""

from __future__ import annotations

import random
from collections.abc import Sequence as Rows

import numpy as np
import pytest

from outrider.config import EngineConfig
from outrider.draft_port import DraftOffer
from outrider.params import SamplingParams, StopParams
from outrider.policy.adaptive import AdaptivePolicy
from outrider.policy.base import DraftMode
from outrider.policy.row import Drafting, Offered
from outrider.rounds import Round
from outrider.types import Request
from tests.support.simulators.simulation import Net, World, draft_model

SURE, UNSURE = 200, 90
TRUE_SHARE = {SURE: 0.95, UNSURE: 0.3}


def row() -> Drafting:
    return Drafting(Offered(4, False, DraftOffer("a", 4)), drafter="a draft_model")


def learned(*, honest: bool) -> AdaptivePolicy:
    """A policy after drafts of one token each, and steps whose time is that of their tokens."""
    policy, rng, each = AdaptivePolicy(4), random.Random(1), row()
    for _ in range(600):
        told = rng.choice((SURE, UNSURE))
        meant = told if honest else rng.choice((SURE, UNSURE))
        accepted = rng.random() < TRUE_SHARE[meant]
        round_ = Round(1, 1, int(accepted), rejected=not accepted)
        policy.measured.acceptance.observe([(each, round_, bytes([told]))])
    for num_tokens in (1, 4, 16, 64):
        policy.measured.costs.observe_step(4, num_tokens, 0.004 + 0.001 * num_tokens)
    return policy


def test_cut_verifies_the_sure_tokens_of_all_rows() -> None:
    drafts = [bytes((SURE, SURE)), bytes((UNSURE, SURE)), bytes((SURE, UNSURE)), bytes((UNSURE,))]
    policy = learned(honest=True)
    assert policy.cut([(row(), told) for told in drafts], 0) == [2, 0, 1, 0]


def test_confidences_of_a_liar_come_to_mean_its_usual_acceptance() -> None:
    acceptance = learned(honest=False).measured.acceptance
    told = acceptance.told([(row(), bytes((SURE, UNSURE))), (row(), bytes((UNSURE, SURE)))], 2)
    usual = sum(TRUE_SHARE.values()) / 2
    np.testing.assert_allclose(told[:, 0], usual, atol=0.12)


class CutOnDemand(AdaptivePolicy):
    """Without trials of other modes."""

    may_wait = True
    mode = DraftMode.ON_DEMAND


class ByDepth(CutOnDemand):
    """Does not look at confidences."""

    def cut(
        self,
        drafts: Rows[tuple[Drafting, bytes]],
        other_tokens: int,  # noqa: ARG002
    ) -> list[int]:
        return [len(told) for _, told in drafts]


def simulated_rate(policy: AdaptivePolicy) -> float:
    """Tokens per second of 16 requests, with the step times of an embedded target on a CPU."""
    config = EngineConfig(page_size=16, num_pages=2048, max_model_len=512)
    step_s = ((1, 0.026), (5, 0.044), (16, 0.057), (32, 0.076), (128, 0.228))
    tokens, seconds = zip(*step_s, strict=True)
    world = World(policy, config, lambda n: float(np.interp(n, tokens, seconds)), random.Random(1))
    world.engine.check_invariants = lambda: None  # type: ignore[method-assign]
    world.add(draft_model(0.2), Net())
    for i in range(16):
        sampling = SamplingParams(temperature=1.0, seed=i)
        world.submit(Request(i, (7, 1, 5, i), sampling, StopParams(max_tokens=100)))
    world.run()
    return 1600 / world.now


def test_cut_by_confidence_is_faster_than_by_depth_where_tokens_take_time(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    by_depth = ByDepth(4)
    monkeypatch.setattr(by_depth.measured.acceptance, "confident", lambda _: False)
    assert simulated_rate(CutOnDemand(4)) > 1.03 * simulated_rate(by_depth)
