"""Coupled sampling: the law it draws from, the hash bit for bit, and what it must not depend on."""

from __future__ import annotations

import math
import re
from pathlib import Path

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from outrider.engine.sampling.noise import Lane, gumbel_noise, seed_keys, token_noise, uniforms
from outrider.engine.sampling.sample import SamplingBatch, process_logits, sample
from outrider.errors import InvalidRequestError
from outrider.params import SamplingParams

MASK = 0xFFFFFFFF
DOCUMENT = Path(__file__).parents[3] / "docs" / "sampling.md"


def mix(x: int) -> int:
    x = (x ^ (x >> 16)) * 0x21F0AAAD & MASK
    x = (x ^ (x >> 15)) * 0x735A2D97 & MASK
    return x ^ (x >> 15)


def documented_hash(seed: int, position: int, token: int, lane: int = 0) -> int:
    low, high = seed & MASK, seed >> 32
    first, second = mix(mix(low) ^ high), mix(mix(high ^ 0x9E3779B9) ^ low)
    if lane:
        salt = lane * 0x9E3779B9 & MASK
        first, second = mix(first ^ salt), mix(second ^ salt)
    return mix(((mix(token) ^ mix(first ^ position)) + mix(second ^ position)) & MASK)


def noise(seed: int, position: int, vocab_size: int) -> Tensor:
    return gumbel_noise(seed_keys([seed]), torch.tensor([position]), vocab_size)[0]


def test_gumbel_noise_of_documented_keys_equals_the_vectors() -> None:
    rows = re.findall(
        r"^\| (\d+) \| (\d+) \| (\d+) \| (0x\w+) \| (\S+) \|$", DOCUMENT.read_text(), re.MULTILINE
    )
    assert len(rows) == 5
    for seed, position, token, h, g in rows:
        assert documented_hash(int(seed), int(position), int(token)) == int(h, 16)
        drawn = noise(int(seed), int(position), int(token) + 1)[-1].item()
        assert drawn == pytest.approx(float(g), abs=1e-11)


def test_seed_keys_of_lanes_equal_the_documented_vectors() -> None:
    rows = re.findall(
        r"^\| (\d+) \| (\d+) \| (\d+) \| (\d+) \| (0x\w+) \| (\S+) \| (\S+) \|$",
        DOCUMENT.read_text(),
        re.MULTILINE,
    )
    assert len(rows) == 5
    for *numbers, h, u, g in rows:
        seed, lane, position, token = map(int, numbers)
        assert documented_hash(seed, position, token, lane) == int(h, 16)
        keys, at = seed_keys([seed], [Lane(lane)]), torch.tensor([position])
        drawn = token_noise(keys, at, torch.tensor([[token]])).item()
        assert drawn == pytest.approx(float(g), abs=1e-11)
        if token == 0:
            assert uniforms(keys, at).item() == pytest.approx(float(u), abs=1e-12)


@given(seed=st.integers(0, 2**64 - 1), position=st.integers(0, 2**31 - 1))
def test_gumbel_noise_of_any_key_equals_the_documented_function(seed: int, position: int) -> None:
    drawn = noise(seed, position, 50)
    for token in (0, 1, 49):
        u = (documented_hash(seed, position, token) + 0.5) / 2**32
        assert drawn[token].item() == pytest.approx(-math.log(-math.log(u)), rel=1e-12)


def chi_square_limit(degrees: int) -> float:
    """The 1 - 1e-4 quantile (Wilson and Hilferty's approximation)."""
    a = 2 / (9 * degrees)
    return degrees * (1 - a + 3.719 * math.sqrt(a)) ** 3


@pytest.mark.parametrize(
    "params",
    [
        SamplingParams(temperature=1.0),
        SamplingParams(temperature=0.6),
        SamplingParams(temperature=1.5, top_k=5),
        SamplingParams(temperature=1.0, top_p=0.7),
        SamplingParams(temperature=1.0, min_p=0.1),
        SamplingParams(temperature=1.3, top_k=12, top_p=0.9, min_p=0.02),
    ],
    ids=str,
)
@pytest.mark.parametrize("over", ["seeds", "positions"])
def test_sample_over_many_seeds_follows_the_softmax_of_processed_logits(
    params: SamplingParams, over: str
) -> None:
    n, vocab = 40_000, 20
    logits = torch.linspace(2.0, -2.5, vocab).roll(7)[None]
    settings_of = [
        SamplingParams(
            params.temperature,
            params.top_k,
            params.top_p,
            params.min_p,
            seed=i * 0x1_0000_0001 if over == "seeds" else 12345,
        )
        for i in range(n)
    ]
    batch = SamplingBatch.build(settings_of, [100] * n if over == "seeds" else range(n))
    drawn = sample(logits.expand(n, -1), batch)
    one = SamplingBatch.build([params], [0])
    expected = n * process_logits(logits, one).softmax(dim=-1)[0].double()
    counts = torch.bincount(drawn, minlength=vocab).double()
    possible = expected > 0
    assert counts[~possible].sum() == 0, "a cut token was drawn"
    assert expected[possible].min() > 5, "the test is too small"
    statistic = ((counts - expected)[possible] ** 2 / expected[possible]).sum().item()
    assert statistic < chi_square_limit(int(possible.sum()) - 1)


def test_sample_at_consecutive_positions_is_independent() -> None:
    n, vocab = 50_000, 4
    batch = SamplingBatch.build([SamplingParams(seed=7)] * n, range(n))
    drawn = sample(torch.zeros(n, vocab), batch)
    pairs = torch.bincount(drawn[:-1] * vocab + drawn[1:], minlength=vocab**2).double()
    expected = (n - 1) / vocab**2
    assert ((pairs - expected) ** 2 / expected).sum().item() < chi_square_limit(vocab**2 - 1)


def naive_keep(logits: list[float], params: SamplingParams) -> set[int]:
    """The cuts as docs/sampling.md words them, without ties."""
    scaled = [x / params.temperature for x in logits]
    order = sorted(range(len(scaled)), key=lambda i: -scaled[i])
    if params.top_k:
        order = order[: params.top_k]
    if params.top_p < 1.0:
        weights = [math.exp(scaled[i] - scaled[order[0]]) for i in order]
        mass, kept = 0.0, 0
        while kept < len(order) and mass < params.top_p * sum(weights):
            mass += weights[kept]
            kept += 1
        order = order[:kept]
    if params.min_p:
        floor = scaled[order[0]] + math.log(params.min_p)
        order = [i for i in order if scaled[i] >= floor]
    return set(order)


@settings(max_examples=300)
@given(
    seed=st.integers(0, 10**6),
    vocab=st.sampled_from((1, 2, 17, 300, 1000)),
    temperature=st.sampled_from((0.3, 1.0, 2.0)),
    top_k=st.sampled_from((0, 1, 3, 260, 5000)),
    top_p=st.sampled_from((0.01, 0.5, 0.95, 1.0)),
    min_p=st.sampled_from((0.0, 0.03, 1.0)),
)
def test_process_logits_with_any_params_equals_the_definition(
    seed: int, vocab: int, temperature: float, top_k: int, top_p: float, min_p: float
) -> None:
    params = SamplingParams(temperature, top_k, top_p, min_p)
    generator = torch.Generator().manual_seed(seed)
    logits = (torch.randperm(vocab, generator=generator) * (6.0 / vocab)).float()
    processed = process_logits(logits[None], SamplingBatch.build([params], [0]))[0]
    kept = set(torch.nonzero(processed > -torch.inf)[:, 0].tolist())
    expected = naive_keep((logits.double()).tolist(), params)
    # Rounding may move the boundary by one token.
    assert len(kept ^ expected) <= 1
    assert kept
    at = torch.tensor(sorted(kept))
    assert torch.equal(processed[at], logits[at] / temperature)


@pytest.mark.parametrize(
    ("params", "kept"),
    [
        (SamplingParams(top_p=0.49), 1),
        (SamplingParams(top_p=0.51), 2),
        (SamplingParams(top_p=0.79), 2),
        (SamplingParams(top_p=0.81), 4),  # the two tokens of .08 are as likely
        (SamplingParams(top_p=0.99), 5),
        (SamplingParams(top_k=2), 2),
        (SamplingParams(top_k=3), 4),
        (SamplingParams(top_k=5), 5),
        (SamplingParams(top_k=2, top_p=0.6), 1),  # .5 of .8
        (SamplingParams(top_k=2, top_p=0.63), 2),
        (SamplingParams(min_p=0.59), 2),
        (SamplingParams(min_p=0.61), 1),
    ],
    ids=str,
)
@pytest.mark.parametrize("others", [0, 1000], ids="{} tokens that hardly are".format)
def test_process_logits_of_known_logits_equals_numbers_worked_by_hand(
    params: SamplingParams, kept: int, others: int
) -> None:
    logits = torch.tensor([0.5, 0.3, 0.08, 0.08, 0.04, *[1e-9] * others]).log()
    processed = process_logits(logits[None], SamplingBatch.build([params], [0]))[0]
    assert (processed > -torch.inf).nonzero().flatten().tolist() == [*range(kept)]


def test_sample_of_several_rows_equals_each_alone() -> None:
    generator = torch.Generator().manual_seed(0)
    logits = torch.randn(64, 700, generator=generator) * 2
    choices = (
        SamplingParams(temperature=0.0),
        SamplingParams(seed=1),
        SamplingParams(seed=2, top_k=3),
        SamplingParams(seed=3, top_k=600, top_p=0.99),  # needs the whole sort
        SamplingParams(seed=4, top_p=0.5),
        SamplingParams(seed=5, min_p=0.2, temperature=0.4),
    )
    params = [choices[i % len(choices)] for i in range(64)]
    together = sample(logits, SamplingBatch.build(params, range(64)))
    alone = [
        sample(logits[i : i + 1], SamplingBatch.build([params[i]], [i])).item() for i in range(64)
    ]
    assert together.tolist() == alone


def test_sample_when_greedy_is_argmax() -> None:
    logits = torch.randn(8, 50, generator=torch.Generator().manual_seed(1))
    batch = SamplingBatch.build([SamplingParams(temperature=0.0, seed=5, top_k=2)] * 8, range(8))
    assert torch.equal(sample(logits, batch), logits.argmax(-1))


def test_sample_of_two_models_agrees_by_coupling() -> None:
    n, vocab = 20_000, 16
    generator = torch.Generator().manual_seed(2)
    target = torch.randn(1, vocab, generator=generator)
    draft = target + 0.5 * torch.randn(1, vocab, generator=generator)
    batch = SamplingBatch.build([SamplingParams(seed=3)] * n, range(n))
    agreed = sample(target.expand(n, -1), batch) == sample(draft.expand(n, -1), batch)
    target_probs, draft_probs = target.softmax(-1), draft.softmax(-1)
    distance = 0.5 * (target_probs - draft_probs).abs().sum().item()
    rate = agreed.double().mean().item()
    assert rate > (1 - distance) / (1 + distance) - 0.01  # Daliri et al.'s bound
    assert rate > (target_probs * draft_probs).sum().item() + 0.2


def test_top_k_beyond_its_range_is_refused_with_the_range() -> None:
    with pytest.raises(InvalidRequestError, match=r"between 0 \(off\) and 2147483647"):
        SamplingParams(top_k=2**31)
