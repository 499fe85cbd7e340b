"""Synthetic acceptance: an engine's rounds accept as the rates say, and captured steps likewise."""

from __future__ import annotations

import math
import random
from collections import Counter
from typing import Any

import pytest
import torch

from outrider.config import EngineConfig, acceptance_rates, check_acceptance_rates
from outrider.draft_port import DraftOffer, PostedBlock
from outrider.draft_tree import DraftTree
from outrider.engine.engine import Engine
from outrider.engine.sampling.noise import Lane, lane_keys, seed_keys
from outrider.engine.sampling.sample import SamplingBatch
from outrider.engine.sampling.synthetic import force, forced_choices, num_forced
from outrider.engine.sampling.verify import VerifyBatch, choose_and_verify, verify_rows
from outrider.errors import ConfigError, InvalidRequestError
from outrider.params import (
    Constraint,
    ConstraintKind,
    SamplingParams,
    SpeculationParams,
    StopParams,
    Verification,
    VerificationRule,
)
from outrider.policy.base import FixedPolicy
from outrider.types import Request, RequestStats
from tests.support.models.hash_model import HashModel

VOCAB, K, REQUESTS, LENGTH = 11, 3, 200, 60
RATES = (0.9, 0.55, 0.2)
PAGES: dict[str, Any] = {"page_size": 8, "num_pages": REQUESTS * 10, "max_model_len": 80}


def run(temperature: float, rates: tuple[float, ...], num_requests: int) -> list[RequestStats]:
    """Complete requests whose every round has a random draft, and return their accounts."""
    now, rng = 0.0, random.Random(3)
    config = EngineConfig(
        **PAGES,
        max_num_seqs=REQUESTS,
        max_num_batched_tokens=8192,
        num_speculative_tokens=K,
        synthetic_acceptance_rates=rates,
    )
    model = HashModel(VOCAB, **PAGES, peak=1.5)
    engine = Engine(model, config, policy=FixedPolicy(K, max_wait_s=0.01), clock=lambda: now)
    lengths = {}
    for i in range(num_requests):
        sampling = SamplingParams(temperature, seed=i)
        engine.submit(Request(i, (1, 2), sampling, StopParams(max_tokens=LENGTH)))
        engine.set_drafting(i, DraftOffer("p", K))
        lengths[i] = 2
    finished: list[RequestStats] = []
    wanting = [*lengths]
    while len(finished) < num_requests:
        for session in wanting:
            tokens = tuple(rng.randrange(VOCAB) for _ in range(K))
            draft = DraftTree(lengths[session], tokens, (-1, *range(K - 1)))
            engine.post_block(PostedBlock(session, draft, "p", 1))
        wanting = []
        events = engine.step()
        if events is None:
            now = engine.wake_at
            continue
        assert not events.failures
        for commit in events.commits:
            lengths[commit.session_id] += len(commit.token_ids)
            if commit.stats is None:
                wanting.append(commit.session_id)
            else:
                finished.append(commit.stats)
    return finished


@pytest.mark.parametrize("temperature", [0.0, 1.0])
def test_synthetic_acceptance_of_random_drafts_has_the_rates(temperature: float) -> None:
    accepted: Counter[int] = Counter()
    drafted: Counter[int] = Counter()
    for stats in run(temperature, RATES, REQUESTS):
        assert stats.verification is VerificationRule.SYNTHETIC
        assert not stats.verification.exact
        accepted.update(dict(enumerate(stats.accepted_per_pos)))
        for place in range(K):
            drafted[place] += sum(stats.k_histogram[place + 1 :])
    for place, rate in enumerate(RATES):
        deviation = math.sqrt(drafted[place] * rate * (1 - rate))
        assert abs(accepted[place] - rate * drafted[place]) < 4 * deviation
    assert drafted[0] > 3000
    mean = sum(accepted[place] / drafted[place] for place in range(K))
    assert mean == pytest.approx(sum(RATES), abs=0.06)


@pytest.mark.parametrize(
    ("length", "rates"),
    [(1.0, (0, 0, 0)), (1.25, (0.25, 0, 0)), (2.5, (1, 0.5, 0)), (3.0, (1, 1, 0)), (4.0, (1,) * 3)],
)
def test_synthetic_length_is_of_rates_that_vary_least(
    length: float, rates: tuple[float, ...]
) -> None:
    found = acceptance_rates((), length, 3)
    assert found == rates
    assert 1 + sum(found) == length
    check_acceptance_rates(found, 3)


@pytest.mark.parametrize("rates", [(1.0, 1.0, 1.0), (1.0, 0.0, 0.0), (0.0, 0.0, 0.0)])
def test_synthetic_acceptance_with_certain_rates_is_certain(rates: tuple[float, ...]) -> None:
    [stats] = run(1.0, rates, 1)
    drafted = [sum(stats.k_histogram[place + 1 :]) for place in range(K)]
    got = [*stats.accepted_per_pos, *[0] * K][:K]
    assert got == [int(rate) * count for rate, count in zip(rates, drafted, strict=True)]


def test_synthetic_acceptance_is_a_function_of_the_seed() -> None:
    assert [s.accepted_per_pos for s in run(1.0, RATES, 5)] == [
        s.accepted_per_pos for s in run(1.0, RATES, 5)
    ]


def test_lane_keys_equal_keys_of_the_lane() -> None:
    seeds = [0, 7, 2**64 - 1]
    for lane in (Lane.DRAFT, Lane.ACCEPT, Lane.RECOVER):
        expected = seed_keys(seeds, [lane] * len(seeds))
        assert torch.equal(lane_keys(seed_keys(seeds), lane), expected)


def test_captured_choices_accept_what_the_rounds_accept() -> None:
    """Drafts of every length, also of padding that equals the choices by chance."""
    rows, width = 400, K + 1
    generator = torch.Generator().manual_seed(1)
    tokens = torch.randint(0, 2, (rows, width), generator=generator)
    lens = torch.randint(0, width, (rows,), generator=generator, dtype=torch.int32)
    firsts = torch.randint(1, 1000, (rows,), generator=generator)
    params = [SamplingParams(float(i % 2), seed=i) for i in range(rows)]
    sampling = SamplingBatch.build(params, [0] * rows)
    positions = firsts[:, None] + torch.arange(width)
    starts = torch.arange(0, rows * width + 1, width, dtype=torch.int32)
    by_token = sampling.repeated(width, positions.flatten())
    batch = VerifyBatch(tokens.flatten(), starts, lens, by_token)
    logits = torch.randn(rows * width, 2, generator=generator)
    plain, forced = (torch.empty(rows, width + 1, dtype=torch.int32) for _ in range(2))
    choose_and_verify(logits, batch, plain)
    forced_choices(choose_and_verify, RATES, torch.device("cpu"))(logits, batch, forced)
    rates = torch.tensor(RATES, dtype=torch.float64)
    expected = torch.minimum(num_forced(sampling.seed, firsts + 1, rates), lens)
    assert torch.equal(forced[:, 0].long(), expected.long())
    real = torch.arange(K) < lens[:, None]
    drafts = tokens[:, 1:].where(real, -1)
    # Verification of the choices gives the same, so that whatever reads these agrees with it.
    assert torch.equal(verify_rows(drafts, forced[:, 1:].long()), expected.long())
    for row, count in enumerate(lens.tolist()):
        assert forced[row, 1 + count :].tolist() == plain[row, 1 + count :].tolist()


def test_force_keeps_choices_that_differ_from_rejected_drafts() -> None:
    drafts, choices = torch.tensor([[1, 2, 4]]), torch.tensor([[3, 3, 4]])
    assert force(drafts, choices, torch.tensor([1]), 5).tolist() == [[1, 3, 0]]


@pytest.mark.parametrize(
    ("rates", "reason"),
    [
        ((0.5, 0.2), "one rate for each of 3"),
        ((0.5, 0.6, 0.1), "must not rise"),
        ((1.5, 0.6, 0.1), "between 0 and 1"),
        ((0.5, 0.1, -0.1), "between 0 and 1"),
        ((0.5, math.nan, 0.1), "between 0 and 1"),
        ((math.nan,), "between 0 and 1"),
        ((-0.1,), "between 0 and 1"),
    ],
)
def test_synthetic_rates_that_cannot_be_are_refused(rates: tuple[float, ...], reason: str) -> None:
    with pytest.raises(ConfigError, match=reason):
        EngineConfig(num_speculative_tokens=3, synthetic_acceptance_rates=rates)


def test_synthetic_acceptance_refuses_requests_that_name_a_rule_or_constraint(
    caplog: pytest.LogCaptureFixture,
) -> None:
    config = EngineConfig(**PAGES, num_speculative_tokens=K, synthetic_acceptance_rates=RATES)
    engine = Engine(HashModel(VOCAB, **PAGES, peak=1.5), config)
    assert "SYNTHETIC ACCEPTANCE" in caplog.text
    for rule, required in ((VerificationRule.BLOCK, False), (VerificationRule.COUPLED, True)):
        speculation = SpeculationParams(verification=Verification(rule, required=required))
        with pytest.raises(InvalidRequestError, match="leave verification out"):
            engine.info.check(Request(0, (1, 2), speculation=speculation))
    for kind, source in ((ConstraintKind.REGEX, "a+"), (ConstraintKind.JSON_OBJECT, "")):
        with pytest.raises(InvalidRequestError, match="for benchmarks and takes no constr") as told:
            engine.info.check(Request(0, (1, 2), constraint=Constraint(kind, source)))
        assert told.value.param == kind.value
    engine.info.check(Request(0, (1, 2)))
