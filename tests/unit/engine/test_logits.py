"""Biases, penalties, min_tokens and log probabilities: formulas, and each row of a draft."""

from __future__ import annotations

import math
import random

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from outrider.engine import runner
from outrider.engine.batch import RowSlice
from outrider.engine.runner import Runner
from outrider.engine.sampling import logprobs
from outrider.engine.sampling.logits import Adjuster, MinTokens, adjust, make_adjuster, make_editors
from outrider.engine.sampling.logprobs import drawn_logprobs, to_token_logprobs
from outrider.engine.sequence import Sequence
from outrider.engine.step import ScheduledRow, Step, StepResult
from outrider.params import (
    REQUEST_RULES,
    SamplingParams,
    SpeculationParams,
    StopParams,
    TokenIds,
    Verification,
)
from outrider.policy.row import Drafting, Offered
from outrider.types import Request
from tests.support.models.hash_model import HashModel, edited

VOCAB = 19
TOKENS = st.lists(st.integers(0, VOCAB - 1), max_size=12).map(tuple)
penalised = st.builds(
    SamplingParams,
    presence_penalty=st.floats(-2, 2),
    frequency_penalty=st.floats(-2, 2),
    repetition_penalty=st.floats(0.25, 4),
    logit_bias=st.dictionaries(st.integers(0, VOCAB - 1), st.floats(-100, 100)).map(
        lambda bias: tuple(bias.items())
    ),
)


def random_logits(rows: int, seed: int, scale: float = 4.0) -> Tensor:
    generator = torch.Generator().manual_seed(seed)
    return torch.randn(rows, VOCAB, generator=generator) * scale


def adjusted(logits: Tensor, adjuster: Adjuster, draft: TokenIds = ()) -> Tensor:
    result = logits.clone()
    adjust(result, [adjuster.adjustments(draft)])
    return result


def test_adjuster_equals_numbers_worked_by_hand() -> None:
    params = SamplingParams(
        repetition_penalty=2.0,
        frequency_penalty=0.5,
        presence_penalty=1.0,
        logit_bias=((1, 3.0), (4, -1.0)),
    )
    adjuster = Adjuster(params, (0, 3), (1, 1, 2))
    #                        0    1     2     3     4    5
    logits = torch.tensor([[4.0, 1.0, -2.0, -6.0, 0.5, 7.0]])
    # 0, 3: of the prompt only, repeated; 1: (1 + 3) / 2 - 2 * 0.5 - 1; 2: -2 * 2 - 0.5 - 1
    expected = [[2.0, 0.0, -5.5, -12.0, -0.5, 7.0]]
    assert adjusted(logits, adjuster).tolist() == expected


@given(params=penalised, prompt=TOKENS, output=TOKENS, draft=TOKENS, seed=st.integers(0, 99))
def test_adjuster_with_draft_follows_the_formulas(
    params: SamplingParams, prompt: TokenIds, output: TokenIds, draft: TokenIds, seed: int
) -> None:
    logits = random_logits(len(draft) + 1, seed)
    result = adjusted(logits, Adjuster(params, prompt, output), draft)
    for j, row in enumerate(logits.double().numpy()):
        context = (*prompt, *output, *draft[:j])
        expected = edited(row, params, context, len(prompt), frozenset())
        np.testing.assert_allclose(result[j].numpy(), expected, rtol=1e-5, atol=1e-4)


@given(params=penalised, prompt=TOKENS, output=TOKENS, draft=TOKENS, wrong=TOKENS)
def test_adjuster_with_draft_equals_rows_decoded_alone(
    params: SamplingParams, prompt: TokenIds, output: TokenIds, draft: TokenIds, wrong: TokenIds
) -> None:
    logits = random_logits(len(draft) + 1, seed=len(output))
    verifying, plain = Adjuster(params, prompt, output), Adjuster(params, prompt, ())
    for token in output:
        plain.commit((token,))
    verifying.adjustments(wrong)  # rejected
    together = adjusted(logits, verifying, draft)
    for j, row in enumerate(logits):
        assert torch.equal(together[j], adjusted(row[None], plain)[0])
        plain.commit(draft[j : j + 1])


@given(params=penalised, prompt=TOKENS.filter(len), output=TOKENS)
def test_adjuster_of_resumed_request_equals_uninterrupted(
    params: SamplingParams, prompt: TokenIds, output: TokenIds
) -> None:
    moved = Request(
        1, (*prompt, *output), sampling=params, num_resumed_tokens=len(output), stop=StopParams()
    )
    stayed = make_adjuster(Request(1, prompt, sampling=params))
    resumed = make_adjuster(moved)
    if stayed is None or resumed is None:
        assert stayed is resumed
        return
    stayed.commit(output)
    logits = random_logits(1, seed=3)
    assert torch.equal(adjusted(logits, stayed), adjusted(logits, resumed))


def test_editors_of_plain_request_are_none() -> None:
    plain = Request(1, (5, 6), stop=StopParams(stop_token_ids=frozenset({1})))
    assert make_adjuster(plain) is None
    assert make_editors(plain, frozenset({1})) == ()
    endless = Request(1, (5,), stop=StopParams(min_tokens=3, ignore_eos=True))
    assert make_editors(endless, frozenset()) == ()


@pytest.mark.parametrize(
    "params",
    [
        SamplingParams(logit_bias=((5, 1.0),)),
        SamplingParams(repetition_penalty=1.5),
        SamplingParams(frequency_penalty=-1.5),
        SamplingParams(presence_penalty=1.5),
    ],
)
def test_adjuster_with_a_single_parameter_heeds_it(params: SamplingParams) -> None:
    """Token 5 is of the prompt and of the output."""
    adjuster = make_adjuster(Request(1, (5, 6, 5), params, num_resumed_tokens=1))
    assert adjuster is not None
    logits = random_logits(1, seed=4)
    assert adjusted(logits, adjuster)[0, 5] != logits[0, 5]


def test_min_tokens_masks_stops_in_early_rows() -> None:
    mask = MinTokens(frozenset({2, 5, VOCAB, VOCAB + 40}), 4)
    logits = random_logits(3, seed=1)
    for committed, masked_rows in ((0, 3), (2, 2), (1, 1), (1, 0), (1, 0), (7, 0)):
        mask.commit((0,) * committed)
        result = logits.clone()
        mask.edit(result, (1, 1))
        expected = logits.clone()
        expected[:masked_rows, [2, 5]] = -torch.inf
        assert torch.equal(result, expected)


def test_min_tokens_where_only_stops_are_allowed_masks_nothing() -> None:
    """A grammar that is complete allows only the end: then that comes, however early."""
    logits = torch.full((2, VOCAB), -torch.inf)
    logits[0, [2, 5]] = 1.0
    logits[1, [2, 7]] = 1.0
    MinTokens(frozenset({2, 5}), 9).edit(logits, (2,))
    assert logits[0, [2, 5]].tolist() == [1.0, 1.0]
    assert (logits[1] > -torch.inf).nonzero().flatten().tolist() == [7]


def test_logit_bias_on_a_masked_token_keeps_it_masked() -> None:
    params = SamplingParams(logit_bias=((2, 100.0),), repetition_penalty=0.1, presence_penalty=-2)
    logits = random_logits(1, seed=2)
    MinTokens(frozenset({2}), 1).edit(logits, ())
    assert adjusted(logits, Adjuster(params, (2,), (2,)))[0, 2] == -torch.inf


RULES = [Verification(rule) for rule in REQUEST_RULES]


def random_row(rng: random.Random, session_id: int) -> ScheduledRow:
    draft = tuple(rng.randrange(VOCAB) for _ in range(rng.choice((0, 0, 1, 4))))
    prompt = tuple(rng.randrange(VOCAB) for _ in range(rng.randint(1, 9)))
    penalties = rng.choice(
        (
            {},
            {"frequency_penalty": 1.5, "logit_bias": ((3, 5.0), (4, -5.0))},
            {"repetition_penalty": 1.7, "presence_penalty": -0.5},
        )
    )
    sampling = SamplingParams(
        temperature=rng.choice((0.0, 0.7, 1.3)),
        top_k=rng.choice((0, 5)),
        top_p=rng.choice((1.0, 0.8)),
        min_p=rng.choice((0.0, 0.1)),
        seed=rng.randrange(2**64),
        **penalties,  # type: ignore[arg-type]
    )
    request = Request(
        session_id,
        prompt,
        sampling,
        StopParams(min_tokens=rng.choice((0, 3)), stop_token_ids=frozenset({1, 2})),
        SpeculationParams(verification=rng.choice(RULES)),
        top_logprobs=rng.choice((None, None, 0, 2, 20)),
        num_resumed_tokens=rng.randrange(len(prompt)),
    )
    seq = Sequence(
        request,
        max_len=60,
        stop_ids=frozenset({1, 2}),
        drafting=Drafting(Offered(4)),
        submitted_at=0.0,
    )
    seq.block_table = [session_id]
    token_ids = (*prompt, *draft)
    return ScheduledRow(seq, RowSlice(token_ids, 0, [session_id], len(draft) + 1), draft)


def run(rows: list[ScheduledRow]) -> StepResult:
    model = HashModel(VOCAB, page_size=16, num_pages=8)
    step = Step(tuple(rows), sum(len(row.slice.token_ids) for row in rows))
    return Runner(model).launch(step).wait()


@settings(max_examples=100, deadline=None)
@given(seed=st.integers(0, 2**32), at_once=st.sampled_from((1, 3 * VOCAB, 2**25)))
def test_runner_with_several_rows_equals_each_alone(seed: int, at_once: int) -> None:
    rng = random.Random(seed)
    rows = [random_row(rng, i) for i in range(rng.randint(2, 6))]
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(runner, "MAX_EDITED", at_once)
        patch.setattr(logprobs, "MAX_VALUES", at_once)
        together = run(rows)
    for i, row in enumerate(rows):
        alone = run([row])
        accepted = alone.accepted[0]
        assert together.accepted[i] == accepted
        chosen = together.choices[i][: accepted + 1]
        assert list(chosen) == list(alone.choices[0][: accepted + 1])
        returned = together.logprobs[i] if together.logprobs else ()
        assert returned == (alone.logprobs[0] if alone.logprobs else ())


def test_logprobs_of_sampled_tokens_are_of_the_raw_logits() -> None:
    logits = random_logits(5, seed=9)
    drawn = torch.tensor([3, 0, 7, 18, 7])
    rows = [(2, 2), (1, None), (2, 0)]
    values = drawn_logprobs(logits, drawn, rows).tolist()
    first, none, second = to_token_logprobs(values, rows, counts=[2, 1, 1])
    assert none == ()
    assert (len(first), len(second)) == (2, 1)
    for returned, place, top in ((first[0], 0, 2), (first[1], 1, 2), (second[0], 3, 0)):
        row = logits[place].tolist()
        total = math.log(sum(map(math.exp, row)))
        likeliest = sorted(range(VOCAB), key=lambda token: -row[token])[:top]
        assert returned.logprob == pytest.approx(row[drawn[place]] - total, abs=1e-5)
        assert [token for token, _ in returned.top] == likeliest
        assert [p for _, p in returned.top] == pytest.approx(
            [row[t] - total for t in likeliest], abs=1e-5
        )
