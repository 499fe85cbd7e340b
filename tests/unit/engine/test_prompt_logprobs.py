"""Logprobs of prompts: the model's own, however the prompt was computed."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from outrider.config import EngineConfig
from outrider.engine.batch import RowSlice, pack
from outrider.engine.engine import Engine
from outrider.engine.runner import Runner
from outrider.engine.step import Step
from outrider.errors import InvalidRequestError
from outrider.params import SamplingParams, StopParams, TokenIds
from outrider.policy.base import FixedPolicy
from outrider.types import Commit, PromptLogprobs, Request
from tests.support.models.hash_model import HashModel

PENALISED = SamplingParams(temperature=0.0, repetition_penalty=1.5, logit_bias=((3, 50.0),))
PROMPT = tuple((7 * i) % 32 for i in range(41))
TOP = 3


def engine(**changes: int) -> Engine:
    limits = {"page_size": 4, "num_pages": 64, "max_model_len": 64, "max_num_batched_tokens": 16}
    config = EngineConfig(**{**limits, **changes})  # type: ignore[arg-type]
    model = HashModel(32, config.page_size, config.num_pages, 64)
    return Engine(model, config, policy=FixedPolicy(4, max_wait_s=0.0))


def run(target: Engine, *requests: Request) -> tuple[dict[int, list[Commit]], int]:
    """Return every request's commits, and how many tokens were computed."""
    for request in requests:
        target.submit(request)
    commits: dict[int, list[Commit]] = {request.session_id: [] for request in requests}
    computed = 0
    while (events := target.step()) is not None:
        assert events.timings is not None
        computed += events.timings.num_tokens
        for commit in events.commits:
            commits[commit.session_id].append(commit)
        target.check_invariants()
    return commits, computed


def request(session: int, prompt: TokenIds = PROMPT, top: int | None = TOP) -> Request:
    stop = StopParams(max_tokens=8)
    return Request(session, prompt, PENALISED, stop, prompt_logprobs=top)


def expected(prompt: TokenIds, top: int) -> PromptLogprobs:
    model = HashModel(32, 4, 64, 64)
    row = RowSlice(prompt, 0, list(range(16)), len(prompt))
    logprobs = model.forward(pack([row], 4, model.device)).float().log_softmax(-1)[:-1]
    own = logprobs.gather(1, torch.tensor(prompt[1:])[:, None])[:, 0]
    likeliest = logprobs.topk(top, dim=1)
    return PromptLogprobs(
        own.tolist(),
        likeliest.indices.flatten().tolist(),
        likeliest.values.flatten().tolist(),
    )


def check(commits: list[Commit], prompt: TokenIds = PROMPT, top: int = TOP) -> None:
    got, want = commits[0].prompt_logprobs, expected(prompt, top)
    assert got is not None
    assert got.logprobs == pytest.approx(want.logprobs, abs=1e-6)
    assert got.top_token_ids == want.top_token_ids
    assert got.top_logprobs == pytest.approx(want.top_logprobs, abs=1e-6)
    assert all(commit.prompt_logprobs is None for commit in commits[1:])
    assert len(got.tokens()) == len(prompt) - 1
    assert all(len(token.top) == top for token in got.tokens())


def test_prompt_logprobs_of_chunks_and_cached_prompts_are_the_models_own() -> None:
    target = engine()
    plain, _ = run(target, request(1, top=None))
    assert all(commit.prompt_logprobs is None for commit in plain[1])
    asked, computed = run(target, request(2))  # its pages are in the prefix cache
    check(asked[2])
    assert computed >= len(PROMPT)  # no page was taken from it ...
    assert [c.token_ids for c in asked[2]] == [c.token_ids for c in plain[1]]
    _, computed = run(target, request(3, top=None))
    assert computed < len(PROMPT)  # ... and it is still there for others


def test_prompt_logprobs_of_rows_together_and_of_short_prompts_keep_apart() -> None:
    prompts = {1: PROMPT[:1], 2: PROMPT[:2], 3: PROMPT[3:20], 4: PROMPT}
    plain = request(5, PROMPT[5:25], None)
    commits, _ = run(engine(), plain, *(request(n, p, 0) for n, p in prompts.items()))
    for session, prompt in prompts.items():
        check(commits[session], prompt, 0)
    assert commits[5][0].prompt_logprobs is None


def test_prompt_logprobs_of_preempted_prompts_are_whole() -> None:
    target = engine(num_pages=18)
    commits, _ = run(target, request(1), request(2, PROMPT[1:25]), request(3, PROMPT[2:22]))
    for session, prompt in ((1, PROMPT), (2, PROMPT[1:25]), (3, PROMPT[2:22])):
        check(commits[session], prompt)


def test_prompt_logprobs_of_too_many_tokens_are_refused_by_name() -> None:
    with pytest.raises(InvalidRequestError) as refused:
        Request(1, (1,) * 20_000, prompt_logprobs=20)
    assert refused.value.param == "prompt_logprobs"


def test_scored_prompts_of_many_rows_share_the_limit_of_a_step(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    scored: list[int] = []

    def launch(runner: Runner, step: Step) -> Any:
        scored.append(sum(row.num_prompt_logits for row in step.rows))
        return launched(runner, step)

    launched = Runner.launch
    monkeypatch.setattr(Runner, "launch", launch)
    requests = (request(1), request(2), request(3, PROMPT[:3]), request(4, top=None))
    commits, _ = run(engine(max_prompt_logits=5), *requests)
    assert max(scored) == 5
    check(commits[1])
    check(commits[2])
    check(commits[3], PROMPT[:3])
