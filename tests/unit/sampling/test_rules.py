"""Verification rules: the batched ones equal their definitions, and rejection keeps the law."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import pairwise

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from outrider.draft_tree import DraftProbs
from outrider.engine.batch import grouped
from outrider.engine.sampling import verification_rules as rules
from outrider.engine.sampling.noise import Lane, gumbel_noise, seed_keys, token_noise, uniforms
from outrider.engine.sampling.sample import SamplingBatch, process_logits, sample
from outrider.engine.sampling.verification_rules import RuledRow
from outrider.engine.sampling.verify import verify_rows
from outrider.params import (
    REQUEST_RULES,
    SamplingParams,
    SpeculationParams,
    Verification,
    VerificationRule,
)
from outrider.types import Request
from tests.support.models import verification as definitions
from tests.unit.sampling.test_sampling import chi_square_limit

REJECTION = Verification(VerificationRule.REJECTION)


def draws(logits: Tensor, rows: Sequence[RuledRow]) -> Tensor:
    """What the target draws where it does not look at the drafts, as the runner does it."""
    places = [(row, row.position + i) for row in rows for i in range(len(row.draft) + 1)]
    lanes = [Lane.RECOVER if row.verification.rule.samples else Lane.SHARED for row, _ in places]
    batch = SamplingBatch.build(
        [row.sampling for row, _ in places], [position for _, position in places], lanes=lanes
    )
    return sample(logits, batch)


def defined(logits: Tensor, row: RuledRow, drawn: list[int]) -> list[int]:
    """A row's choices by the definitions; logits [len(draft) + 1, vocab]."""
    count, seed = len(row.draft), row.sampling.seed
    batch = SamplingBatch.build([row.sampling] * (count + 1), range(count + 1))
    target_probs = process_logits(logits, batch).double().softmax(dim=-1).tolist()
    verification = row.verification
    if verification.rule is VerificationRule.TOP_P_WINDOW:
        settings_of = (verification.max_candidate_len, verification.verify_window)
        allowed = [logits[i, token] > -torch.inf for i, token in enumerate(row.draft)]
        choices = definitions.top_p_window(
            row.draft, target_probs[:-1], allowed, drawn[:-1], *settings_of
        )
        return [*choices, drawn[-1]]
    if verification.rule is VerificationRule.BLOCK:
        at = torch.arange(row.position, row.position + count)
        recover = gumbel_noise(seed_keys([seed] * count, [Lane.RECOVER] * count), at, VOCAB)
        fresh = seed_keys([row.sampling.of_draft(row.position).seed] * count, [Lane.ACCEPT] * count)
        drawn_from = row.draft_probs or (None,) * count
        chances = uniforms(fresh, at).tolist()
        found = definitions.block(row.draft, drawn_from, target_probs, chances, recover.tolist())
        return [*found, drawn[-1]]
    choices = []
    for i, token in enumerate(row.draft):
        at = torch.tensor([row.position + i])
        if verification.rule is VerificationRule.TYPICAL:
            limits = (verification.epsilon, verification.alpha)
            choices.append(definitions.typical(token, target_probs[i], drawn[i], *limits))
        else:
            noise = gumbel_noise(seed_keys([seed], [Lane.RECOVER]), at, logits.shape[-1])[0]
            chance = uniforms(seed_keys([seed], [Lane.ACCEPT]), at).item()
            drawn_from = row.draft_probs[i] if row.draft_probs else None
            choices.append(
                definitions.rejection(token, drawn_from, target_probs[i], chance, noise.tolist())
            )
    return [*choices, drawn[-1]]


VOCAB = 12
samplings = st.builds(
    SamplingParams,
    temperature=st.sampled_from((0.4, 1.0, 1.7)),
    top_k=st.sampled_from((0, 1, 4)),
    top_p=st.sampled_from((0.6, 0.95, 1.0)),
    min_p=st.sampled_from((0.0, 0.1)),
    seed=st.integers(0, 2**64 - 1),
)
verifications = st.builds(
    Verification,
    rule=st.sampled_from([rule for rule in REQUEST_RULES if rule.value != "coupled"]),
    epsilon=st.sampled_from((0.01, 0.09, 0.4)),
    alpha=st.sampled_from((0.1, 0.3, 1.0)),
    max_candidate_len=st.integers(1, 5),
    verify_window=st.integers(1, 3),
)


@st.composite
def drafted_rows(draw: st.DrawFn) -> RuledRow:
    draft = draw(st.lists(st.integers(0, VOCAB - 1), min_size=1, max_size=6).map(tuple))
    probs: list[DraftProbs | None] = []
    for token in draft:
        others = draw(st.sets(st.integers(0, VOCAB - 1), max_size=5)) | {token}
        weights = [draw(st.integers(1, 9)) for _ in others]
        sparse = DraftProbs(tuple(others), tuple(w / sum(weights) for w in weights))
        probs.append(draw(st.sampled_from((sparse, sparse, None))))
    return RuledRow(
        first=0,
        draft=draft,
        draft_probs=draw(st.sampled_from(((), tuple(probs)))),
        position=draw(st.integers(1, 100_000)),
        sampling=draw(samplings),
        verification=draw(verifications),
    )


@settings(max_examples=150, deadline=None, derandomize=True)
@given(
    rows=st.lists(drafted_rows(), min_size=1, max_size=5),
    seed=st.integers(0, 10**6),
    at_once=st.sampled_from((VOCAB, 4 * VOCAB, 10**6)),
)
def test_apply_rules_with_any_rules_equals_the_definitions(
    rows: list[RuledRow], seed: int, at_once: int
) -> None:
    first, placed = 0, []
    for row in rows:
        placed.append(
            RuledRow(
                first, row.draft, row.draft_probs, row.position, row.sampling, row.verification
            )
        )
        first += len(row.draft) + 1
    logits = 2 * torch.randn(first, VOCAB, generator=torch.Generator().manual_seed(seed))
    logits[:, 2:5] = -torch.inf  # masked
    drawn = draws(logits, placed)
    expected = []
    for row in placed:
        places = slice(row.first, row.first + len(row.draft) + 1)
        expected += defined(logits[places], row, drawn[places].tolist())
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(rules, "_MAX_PROBS", at_once)
        rules.apply_rules(logits, placed, drawn)
    assert drawn.tolist() == expected


def test_grouped_by_draft_length_fills_each_group() -> None:
    """A place holds a vocabulary of probabilities: memory must not grow with the batch."""
    sizes = (2, 3, 1, 7, 2, 2, 1)
    rows = [RuledRow(0, (1,) * size, (), 1, SamplingParams(), REJECTION) for size in sizes]
    for most in range(1, 20):
        groups = grouped(rows, lambda row: len(row.draft), most)
        parts = [[len(row.draft) for row in part] for part in groups]
        assert [size for part in parts for size in part] == [*sizes]
        assert all(sum(part) <= most or len(part) == 1 for part in parts)
        assert all(sum(part) + after[0] > most for part, after in pairwise(parts)), "and no fewer"


TARGET = torch.linspace(1.5, -2.0, 16).roll(5)
DRAFT = torch.linspace(1.5, -2.0, 16).flip(0).roll(3)  # likes other tokens
CUTS = {
    "all": SamplingParams(temperature=1.0),
    "cold": SamplingParams(temperature=0.6),
    "hot-top-k": SamplingParams(temperature=1.6, top_k=5),
    "top-p-min-p": SamplingParams(temperature=1.0, top_p=0.8, min_p=0.05),
}


def emitted_first(params: SamplingParams, width: int, n: int, lane: Lane = Lane.DRAFT) -> Tensor:
    """The first token that n requests emit, each drafted for by a draw from DRAFT's `width`
    likeliest tokens with the noise of `lane`; width 0: by its likeliest token, a point mass."""
    top = (DRAFT / params.temperature).topk(max(width, 1))
    probs = top.values.softmax(dim=0)
    keys = seed_keys([*range(n)], [lane] * n)
    noise = token_noise(keys, torch.full((n,), 50), top.indices.expand(n, -1))
    drafted = top.indices[(probs.double().log() + noise).argmax(dim=1)].tolist()
    drawn_from = DraftProbs(tuple(top.indices.tolist()), tuple(probs.tolist()))
    rows = [
        RuledRow(
            2 * i,
            (token,),
            (drawn_from,) if width else (),
            50,
            SamplingParams(params.temperature, params.top_k, params.top_p, params.min_p, seed=i),
            REJECTION,
        )
        for i, token in enumerate(drafted)
    ]
    logits = TARGET.expand(2 * n, -1)
    drawn = draws(logits, rows)
    rules.apply_rules(logits, rows, drawn)
    return drawn[::2]


def chi_square(tokens: Tensor, params: SamplingParams) -> tuple[float, float]:
    """Of tokens drawn after TARGET: the statistic, and its limit."""
    batch = SamplingBatch.build([params], [0])
    expected = len(tokens) * process_logits(TARGET[None], batch).double().softmax(dim=-1)[0]
    counts = torch.bincount(tokens, minlength=len(TARGET)).double()
    possible = expected > 0
    assert counts[~possible].sum() == 0, "a cut token was emitted"
    assert expected[possible].min() > 5, "the test is too small"
    statistic = ((counts - expected)[possible] ** 2 / expected[possible]).sum().item()
    return statistic, chi_square_limit(int(possible.sum()) - 1)


@pytest.mark.parametrize("width", [0, 3, 16], ids="{} tokens".format)
@pytest.mark.parametrize("params", CUTS.values(), ids=CUTS)
def test_rejection_of_sampled_drafts_keeps_the_target_distribution(
    params: SamplingParams, width: int
) -> None:
    statistic, limit = chi_square(emitted_first(params, width, 10_000), params)
    assert statistic < limit


@pytest.mark.parametrize("lane", list(Lane))
def test_rejection_with_shared_noise_is_biased(lane: Lane) -> None:
    """Why lanes are apart; and the test above can fail."""
    params = CUTS["all"]
    statistic, limit = chi_square(emitted_first(params, 16, 10_000, lane), params)
    assert (statistic > limit) == (lane in (Lane.ACCEPT, Lane.RECOVER))


def test_block_with_known_probs_equals_numbers_worked_by_hand() -> None:
    """The draft is 0.8 too sure of token 0, then 0.4 too little: together as likely as not."""
    drawn_from = [DraftProbs((0, 1), (0.8, 0.2)), DraftProbs((0, 1), (0.4, 0.6))]
    target = [[0.4, 0.6], [0.8, 0.2]]
    still = [[0.0, 0.0]] * 2

    def choices(*uniforms: float) -> list[int]:
        return definitions.block((0, 0), drawn_from, target, uniforms, still)

    # Ratios 1/2, then 1/2 * 2 = 1: all of it passes, whatever the first place would say.
    assert choices(0.99, 0.99) == [0, 0]
    # Token by token the first would pass with 1/2 alone.
    assert definitions.rejection(0, drawn_from[0], target[0], 0.99, still[0]) == 1
    drawn_from[1] = DraftProbs((0, 1), (0.9, 0.1))  # ratios 1/2 and 4/9
    assert choices(0.99, 0.43) == [0, 0]
    assert choices(0.01, 0.45)[0] == 1, "of place 1 nothing is left: 0.4 < 0.9 and 0.1 = 0.1"
    drawn_from[1] = DraftProbs((0, 1), (0.95, 0.05))  # at place 1 0.05 is left: 1/11 passes
    assert choices(0.09, 0.45) == [0, 1]
    assert choices(0.1, 0.45)[0] == 1


def test_block_of_the_same_drafts_accepts_more_than_rejection() -> None:
    n, places = 3000, 4
    probs = (DRAFT + TARGET).softmax(dim=0)
    drawn_from = DraftProbs(tuple(range(len(TARGET))), tuple(probs.tolist()))
    generator = torch.Generator().manual_seed(0)
    drafts = torch.multinomial(probs, n * places, True, generator=generator).view(n, places)
    accepted = []
    for rule in (VerificationRule.REJECTION, VerificationRule.BLOCK):
        rows = [
            RuledRow(
                i * (places + 1),
                tuple(draft),
                (drawn_from,) * places,
                50,
                SamplingParams(seed=i),
                Verification(rule),
            )
            for i, draft in enumerate(drafts.tolist())
        ]
        logits = TARGET.expand(n * (places + 1), -1)
        drawn = draws(logits, rows)
        rules.apply_rules(logits, rows, drawn)
        accepted.append(verify_rows(drafts, drawn.view(n, -1)).double().mean().item())
    assert accepted[1] > 1.03 * accepted[0]


def test_uniforms_of_lanes_are_independent() -> None:
    n, cells = 40_000, 8
    positions = torch.arange(n)
    columns = [
        (uniforms(seed_keys([9] * n, [lane] * n), positions) * cells).long() for lane in Lane
    ]
    for i, one in enumerate(columns):
        for other in columns[:i]:
            pairs = torch.bincount(one * cells + other, minlength=cells**2).double()
            expected = n / cells**2
            statistic = ((pairs - expected) ** 2 / expected).sum().item()
            assert statistic < chi_square_limit(cells**2 - 1)


def test_rejection_without_residual_draws_from_the_target() -> None:
    """The draft claims more than there is, everywhere that the target can go."""
    params = SamplingParams(seed=3, top_k=1)
    logits = torch.tensor([[0.0, 5.0, 1.0]]).repeat(2, 1)
    row = RuledRow(0, (2,), (DraftProbs((1, 2), (0.999999, 1e-6)),), 7, params, REJECTION)
    drawn = draws(logits, [row])
    rules.apply_rules(logits, [row], drawn)
    assert drawn.tolist() == [1, 1]
    assert definitions.rejection(2, row.draft_probs[0], [0.0, 0.999, 0.0], 0.5, [0.0] * 3) == 1


def test_rejection_with_tiny_residual_recovers_from_it() -> None:
    """The draft has a hundredth too much of token 0, and too little of token 3."""
    n, drawn_from = 1000, DraftProbs((0, 1, 2, 3), (0.26, 0.25, 0.25, 0.24))
    rows = [
        RuledRow(2 * i, (0,), (drawn_from,), 7, SamplingParams(seed=i), REJECTION) for i in range(n)
    ]
    logits = torch.zeros(2 * n, 4)
    drawn = draws(logits, rows)
    rules.apply_rules(logits, rows, drawn)
    counts = torch.bincount(drawn[::2], minlength=4).tolist()
    assert counts[1:3] == [0, 0]
    assert 15 < counts[3] < 70, "one in 26 is rejected"


def test_rejection_with_same_drafts_is_deterministic() -> None:
    once, again = (emitted_first(CUTS["all"], 3, 100) for _ in range(2))
    assert torch.equal(once, again)


def test_verification_rule_when_greedy_is_coupled() -> None:
    for rule in REQUEST_RULES:
        speculation = SpeculationParams(verification=Verification(rule))
        for temperature in (0.0, 0.7):
            request = Request(1, (1,), SamplingParams(temperature), speculation=speculation)
            coupled = temperature == 0.0 or rule is VerificationRule.COUPLED
            assert request.verification_rule is (VerificationRule.COUPLED if coupled else rule)


def test_typical_with_known_probs_equals_numbers_worked_by_hand() -> None:
    flat, sharp = [0.25] * 4, [0.97, 0.01, 0.01, 0.01]
    # exp(-H): 0.25, and about 0.85.
    assert definitions.typical(3, flat, 0, epsilon=0.09, alpha=0.3) == 3, "0.25 > 0.075"
    assert definitions.typical(3, flat, 0, epsilon=0.09, alpha=1.0) == 3, "0.25 > 0.09"
    assert definitions.typical(3, sharp, 0, epsilon=0.09, alpha=0.3) == 0, "0.01 < 0.09"
    assert definitions.typical(0, sharp, 2, epsilon=0.09, alpha=0.3) == 0


def test_top_p_window_with_known_probs_equals_numbers_worked_by_hand() -> None:
    best = [0.0, 0.5, 0.3, 0.2]  # candidates 1 and 2
    probs = [best] * 4

    def choices(draft: tuple[int, ...], window: int = 2) -> list[int]:
        allowed = [token != 0 for token in draft]
        return definitions.top_p_window(
            draft, probs[: len(draft)], allowed, [9] * len(draft), 2, window
        )

    assert choices((1, 2, 3, 0)) == [1, 2, 9, 9]
    assert choices((3, 1, 1, 2)) == [3, 1, 1, 2], "two likeliest ones follow"
    assert choices((0, 1, 1, 3)) == [9, 1, 1, 9], "masked"
    assert choices((3, 1, 2, 1)) == [9, 1, 2, 1], "a candidate is not enough"
    assert choices((1, 1, 3, 1)) == [1, 1, 9, 1], "the window must be whole"
    assert choices((1, 1, 3, 1), window=1) == [1, 1, 3, 1]
