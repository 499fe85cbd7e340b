"""Over a float8 cache a text is the same with and without drafts, whatever happens around it."""

from __future__ import annotations

import random
from collections.abc import Mapping
from dataclasses import dataclass, field

import pytest
import torch

from outrider.config import EngineConfig
from outrider.draft_port import DraftOffer, PostedBlock
from outrider.draft_tree import DraftTree
from outrider.engine.engine import Engine
from outrider.engine.model.loader import ModelOptions, build_paged_model
from outrider.params import SamplingParams, StopParams
from outrider.policy.base import FixedPolicy
from outrider.types import Request
from tests.support.models.architectures import ARCHITECTURES, VOCAB_SIZE, random_model

PAGE_SIZE, OUTPUT, K = 4, 24, 8
SAMPLINGS = (
    SamplingParams(temperature=0.0),
    SamplingParams(temperature=1.0, seed=5),
    SamplingParams(temperature=0.7, seed=2**63, top_k=20),
)


@dataclass
class Told:
    """Holds the texts of a run, and what happened in it."""

    texts: dict[int, list[int]] = field(default_factory=dict)
    accepted: int = 0
    preempted: int = 0
    cached: int = 0


def _requests() -> dict[int, Request]:
    """Some share the beginning of their prompts, with parts of a page after it."""
    shared = [i * 13 % VOCAB_SIZE for i in range(14)]
    prompts = [shared, *([i + 7 * j for j in range(9)] for i in range(4))]
    prompts += [shared[: 5 + 4 * i] for i in range(3)]
    return {
        i: Request(
            session_id=i,
            prompt_token_ids=tuple(prompt),
            sampling=SAMPLINGS[i % len(SAMPLINGS)],
            stop=StopParams(max_tokens=OUTPUT),
        )
        for i, prompt in enumerate(prompts)
    }


def _run(
    name: str, num_pages: int, truth: Mapping[int, list[int]] | None = None, *, trees: bool = False
) -> Told:
    """Decode all requests, with drafts that follow `truth` and stray from it now and then."""
    rng = random.Random(3)
    model = build_paged_model(
        random_model(ARCHITECTURES[name], torch.float32),
        ModelOptions(page_size=PAGE_SIZE, num_pages=num_pages, kv_cache_dtype="fp8"),
    )
    config = EngineConfig(
        page_size=PAGE_SIZE,
        num_pages=num_pages,
        max_num_seqs=5,
        max_num_batched_tokens=40,
        max_model_len=64,
    )
    now = 0.0
    engine = Engine(model, config, policy=FixedPolicy(K), clock=lambda: now)
    told, requests = Told(), _requests()

    def post(session: int) -> None:
        base = len(requests[session].prompt_token_ids) + len(told.texts[session])
        path = (truth or {})[session][len(told.texts[session]) :][: rng.randint(1, K)]
        path = [t if rng.random() < 0.8 else rng.randrange(VOCAB_SIZE) for t in path]
        tokens, parents = list(path), list(range(-1, len(path) - 1))
        if trees:  # the path comes last, so that its slots are moved when it is accepted
            tokens, parents = [1, 2, *tokens], [-1, 0, *(p + 2 if p >= 0 else -1 for p in parents)]
        tree = DraftTree.validated(base, tokens, parents, vocab_size=VOCAB_SIZE, max_nodes=64)
        engine.post_block(PostedBlock(session, tree, "a", 100))

    for session, request in requests.items():
        told.texts[session] = []
        engine.submit(request)
        if truth is not None:
            engine.set_drafting(session, DraftOffer("a", K + 2))
            post(session)
    done = 0
    for _ in range(2000):
        events = engine.step()
        engine.check_invariants()
        if events is None:
            now = max(now + 0.001, min(engine.wake_at, now + 1.0))
        for commit in () if events is None else events.commits:
            told.texts[commit.session_id] += commit.token_ids
            if commit.stats is not None:
                done += 1
                told.accepted += commit.stats.accepted
                told.preempted += commit.stats.preemptions
                told.cached += commit.stats.cached_prompt_tokens
            elif truth is not None:
                post(commit.session_id)
        if done == len(requests):
            return told
    raise AssertionError("not all requests ended")


@pytest.mark.parametrize("name", ["llama", "gemma2"])  # the fused step, and transformers' modules
@pytest.mark.parametrize("trees", [False, True])
def test_texts_over_float8_cache_do_not_depend_on_drafts(name: str, trees: bool) -> None:
    alone = _run(name, 200)
    assert alone.preempted == 0
    drafted = _run(name, 20, alone.texts, trees=trees)
    assert drafted.texts == alone.texts
    assert drafted.accepted > OUTPUT
    assert drafted.preempted > 0
    assert drafted.cached > 0
