"""Whatever happens to a session, its proposer gets every row of hidden states, each one right."""

from __future__ import annotations

import random
from collections.abc import Sequence
from typing import Any

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

import outrider.engine.feature_streams as feature_streams
import outrider.features as features_module
from outrider.config import EngineConfig
from outrider.draft_tree import DraftTree
from outrider.engine.feature_streams import FeatureStreams
from outrider.engine.policy import Policy
from outrider.params import SamplingParams, StopParams
from outrider.types import Request
from tests.support.features import CAPTURED, FeatureHash, RowReader
from tests.support.hash_model import HashModel, Sequential
from tests.support.simulation import VOCAB, Clock, Net, World

MAX_LEN, PAGE_SIZE, NUM_PAGES = 48, 4, 26
TRUTH = Sequential(HashModel(VOCAB, max_model_len=MAX_LEN))


class FeatureModel(FeatureHash, HashModel):
    """The target."""


def bushy(model: HashModel, rng: random.Random, bushiness: float) -> Any:
    """Trees around the likeliest text, of which the true token is one of the siblings or none."""

    def guess(tokens: Sequence[int], k: int) -> DraftTree:
        ids: list[int] = []
        parents: list[int] = []
        text, parent = list(tokens), -1
        while len(ids) < k:
            nexts = [int(model.logits_of(text).argmax())]
            if rng.random() < 0.2:
                nexts = [rng.randrange(VOCAB)]
            while rng.random() < bushiness and len(nexts) < VOCAB // 2:
                other = rng.randrange(VOCAB)
                if other not in nexts:
                    nexts.insert(rng.randrange(len(nexts) + 1), other)
            nexts = nexts[: k - len(ids)]
            ids += nexts
            parents += [parent] * len(nexts)
            chosen = rng.randrange(len(nexts))
            parent = len(ids) - len(nexts) + chosen
            text.append(nexts[chosen])
        return DraftTree(len(tokens), tuple(ids), tuple(parents))

    return guess


@settings(max_examples=40, deadline=None, suppress_health_check=list(HealthCheck))
@given(
    seed=st.integers(0, 2**16),
    k=st.integers(1, 6),
    bushiness=st.sampled_from((0.0, 0.5)),
    budget=st.sampled_from((4, 16, 64)),
    at_once=st.sampled_from((1, 5, 512)),
    window_rows=st.sampled_from((1, 7, 10_000)),
    net=st.sampled_from(
        (
            Net(),
            Net(delay_s=0.01, jitter_s=0.02),
            Net(break_chance=0.05),
            Net(stall_chance=0.2, stall_s=0.05),
        )
    ),
)
def test_every_row_comes_and_is_right(
    seed: int,
    k: int,
    bushiness: float,
    budget: int,
    at_once: int,
    window_rows: int,
    net: Net,
) -> None:
    """With preemptions, shared prefixes, rejected drafts, broken streams and slow readers."""
    rng = random.Random(seed)
    config = EngineConfig(
        page_size=PAGE_SIZE,
        num_pages=NUM_PAGES,
        max_num_seqs=3,
        max_num_batched_tokens=budget,
        max_model_len=MAX_LEN,
        num_speculative_tokens=k,
    )
    model = FeatureModel(VOCAB, PAGE_SIZE, NUM_PAGES, MAX_LEN)
    streams = FeatureStreams(model.capture())
    policy = Policy(k, max_wait_s=rng.choice((0.0, 0.003, 0.02)))
    world = World(policy, config, lambda n: 0.001 * (1 + n / 64), rng, model, streams)
    reader = RowReader(CAPTURED, bushy(model, rng, bushiness), vocab_size=VOCAB)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(feature_streams, "MAX_ROWS", at_once)
        patch.setattr(features_module, "MAX_ON_THE_WAY", window_rows * CAPTURED.row_bytes)
        world.add((reader, Clock()), net)
        prefix = tuple(rng.randrange(VOCAB) for _ in range(rng.randrange(20)))
        for session in range(5):
            prompt = (*prefix, *(rng.randrange(VOCAB) for _ in range(rng.randint(1, 8))))
            sampling = SamplingParams(temperature=rng.choice((0.0, 1.0)), seed=session)
            room = StopParams(max_tokens=rng.randint(1, MAX_LEN - len(prompt)))
            world.submit(Request(session, prompt, sampling=sampling, stop=room))
        world.run()
    for session, request in world.requests.items():
        tokens, _ = TRUTH.output(request, MAX_LEN, frozenset())
        assert world.committed[session][len(request.prompt_token_ids) :] == tokens
    assert reader.wrong == 0
    if net == Net():  # no break, no delay: sessions are drafted for, so their rows came
        assert reader.rows_seen > 0 or max(len(c) for c in world.committed.values()) < 4
