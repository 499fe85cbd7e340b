"""Speculation changes speed, never text: over real processes and real gRPC."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

import pytest

from outrider.v1 import common_pb2
from tests.support.services.options import GenerateOptions
from tests.support.services.up import (
    Completion,
    Up,
    addresses,
    complete,
    complete_all,
    drafting,
    service,
    until_idle,
)

pytestmark = pytest.mark.timeout(400)

PROMPT = "def fibonacci(n):\n    return n if n < 2 else fibonacci(n - 1) + fibonacci("
REPETITIVE = "hello world STOP hello world STOP hello world STOP hello"
SAMPLINGS = {
    "greedy": {"temperature": 0.0},
    "seed-1": {"temperature": 1.0, "seed": 1},
    "top-p": {"temperature": 0.8, "top_p": 0.9, "seed": 2**63 + 5},
    "top-k-min-p": {"temperature": 1.3, "top_k": 20, "min_p": 0.02, "seed": 3},
}


@pytest.fixture(scope="module")
def stack(draft_model_stack: Up) -> Iterator[Up]:
    """The stack with a second proposer, which looks up in prompts."""
    with drafting(draft_model_stack.scorer, "ngram"):
        yield draft_model_stack


def _request(
    prompt: str, sampling: str, method: str = "draft_model", **changes: object
) -> GenerateOptions:
    options = GenerateOptions(
        prompt=prompt,
        max_tokens=40,
        ignore_eos=True,
        aux_info=True,
        methods=(method,),
        **SAMPLINGS[sampling],
    )
    return replace(options, **changes)


def check_account(done: Completion, k: int) -> None:
    """aux_info says what the stream showed."""
    aux, kinds = done.aux, done.kinds
    assert aux.output_len == len(done.token_ids) == len(kinds) == done.usage.completion_tokens
    assert aux.accepted == sum(aux.accepted_per_pos) <= aux.drafted
    assert aux.accepted >= kinds.count(common_pb2.TOKEN_KIND_ACCEPTED)
    assert sum(aux.k_histogram) == aux.rounds
    assert aux.drafted == sum(k * rounds for k, rounds in enumerate(aux.k_histogram))
    assert len(aux.k_histogram) <= k + 1
    assert list(aux.accepted_per_pos) == sorted(aux.accepted_per_pos, reverse=True)
    assert aux.avg_tokens_per_iter == pytest.approx(aux.output_len / aux.iter_count, rel=1e-6)
    assert aux.cost_time > 0
    assert aux.verification == "coupled"


@pytest.mark.parametrize("sampling", SAMPLINGS)
@pytest.mark.parametrize("method", ["draft_model", "ngram"])
async def test_speculation_with_any_number_of_draft_tokens_keeps_the_text(
    stack: Up, method: str, sampling: str
) -> None:
    for prompt in (PROMPT, REPETITIVE):
        plain = await complete(
            stack.grpc, _request(prompt, sampling, method, speculation=False), timeout_s=120
        )
        assert len(plain.token_ids) == 40
        assert set(plain.kinds) == {common_pb2.TOKEN_KIND_PLAIN}
        assert plain.aux.drafted == 0
        numbers = (0, 1, 4, 8)
        drafted = (_request(prompt, sampling, method, num_speculative_tokens=k) for k in numbers)
        for k, done in zip(numbers, await complete_all(stack.grpc, *drafted), strict=True):
            assert (done.text, done.token_ids) == (plain.text, plain.token_ids), f"K = {k}"
            check_account(done, k)
            if method == "draft_model":  # prompt lookup may find nothing
                assert (done.aux.drafted > 0) == (k > 0)


async def test_speculation_over_a_long_text_has_tokens_of_every_kind(stack: Up) -> None:
    """Else the test above would compare nothing with nothing."""
    done = await complete(stack.grpc, _request(PROMPT, "greedy", max_tokens=120))
    assert {
        common_pb2.TOKEN_KIND_ACCEPTED,
        common_pb2.TOKEN_KIND_RECOVERED,
        common_pb2.TOKEN_KIND_BONUS,
    } <= set(done.kinds)
    assert list(done.aux.proposer_ids) == ["proposer-draft_model"]
    assert done.aux.rounds < 120


async def test_ngram_with_repetitive_prompt_drafts(stack: Up) -> None:
    request = _request(REPETITIVE * 4, "greedy", "ngram", max_tokens=120)
    done = await complete(stack.grpc, request)
    assert done.aux.drafted > 0
    assert list(done.aux.proposer_ids) == ["proposer-ngram"]


async def test_batch_of_sixteen_requests_equals_each_alone(draft_model_stack: Up) -> None:
    requests = [
        _request(
            prompt[: len(prompt) - 3 * i],
            sampling,
            max_tokens=20 + 3 * i,
            num_speculative_tokens=i,
            speculation=i % 4 != 3,
        )
        for i, (prompt, sampling) in enumerate(
            (prompt, sampling) for prompt in (PROMPT, REPETITIVE) for sampling in SAMPLINGS
        )
    ]
    requests += [replace(r, prompt=" " + r.prompt) for r in requests]
    alone = [await complete(draft_model_stack.grpc, r, timeout_s=120) for r in requests]
    together = await complete_all(draft_model_stack.grpc, *requests)
    assert len(requests) == 16
    for one, other in zip(alone, together, strict=True):
        assert (one.text, one.token_ids) == (other.text, other.token_ids)
    info = await until_idle(draft_model_stack.scorer)
    assert info.free_pages == info.total_pages


async def test_request_without_seed_uses_the_flag(
    draft_model_stack: Up, pair: tuple[Path, Path]
) -> None:
    unseeded = _request(PROMPT, "seed-1", seed=None)
    seeded = _request(PROMPT, "seed-1", seed=11)
    texts = [(await complete(draft_model_stack.grpc, r)).text for r in (unseeded, seeded)]
    assert texts[0] == texts[1]
    with service("gateway", "--scorer", draft_model_stack.scorer, "--model", pair[0]) as gateway:
        address = addresses(gateway)["grpc"]
        drawn = {(await complete(address, unseeded)).text for _ in range(3)}
    assert len(drawn) > 1  # no flag: a new seed each time
