"""Whatever happens to a session, its proposer gets every row of hidden states, each one right."""

from __future__ import annotations

import random
from collections.abc import Sequence
from typing import Any

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

import outrider.engine.hidden_states.streams as feature_streams
import outrider.features as features_module
from outrider.draft_tree import DraftTree
from tests.support.models.features import CAPTURED, RowReader
from tests.support.models.hash_model import HashModel
from tests.support.simulators.feature_world import feature_world, run_random_requests
from tests.support.simulators.methods import VOCAB, Clock, Net


def bushy(model: HashModel, rng: random.Random, bushiness: float) -> Any:
    """Trees around the likeliest text, of which the true token is one of the siblings or none."""

    def make_draft(tokens: Sequence[int], k: int) -> DraftTree:
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

    return make_draft


@settings(max_examples=40, deadline=None, suppress_health_check=list(HealthCheck))
@given(
    seed=st.integers(0, 2**16),
    k=st.integers(1, 6),
    bushiness=st.sampled_from((0.0, 0.5)),
    budget=st.sampled_from((4, 16, 64)),
    at_once=st.sampled_from((1, 5, 512)),
    window_rows=st.sampled_from((1, 7, 10_000)),
    ahead_rows=st.sampled_from((0, 5, 10_000)),
    net=st.sampled_from(
        (
            Net(),
            Net(delay_s=0.01, jitter_s=0.02),
            Net(break_chance=0.05),
            Net(stall_chance=0.2, stall_s=0.05),
        )
    ),
)
def test_features_under_any_schedule_arrive_complete_and_correct(
    seed: int,
    k: int,
    bushiness: float,
    budget: int,
    at_once: int,
    window_rows: int,
    ahead_rows: int,
    net: Net,
) -> None:
    """With preemptions, shared prefixes, rejected drafts, broken streams and slow readers."""
    rng = random.Random(seed)
    ahead = ahead_rows * CAPTURED.row_bytes
    world = feature_world(rng, k, (0.0, 0.003, 0.02), budget, max_ahead_bytes=ahead)
    reader = RowReader(CAPTURED, bushy(world.model, rng, bushiness), vocab_size=VOCAB)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(feature_streams, "MAX_ROWS", at_once)
        patch.setattr(features_module, "MAX_ON_THE_WAY", window_rows * CAPTURED.row_bytes)
        world.add((reader, Clock()), net)
        run_random_requests(world)
    assert reader.wrong == 0
    if net == Net():  # no break, no delay: sessions are drafted for, so their rows came
        assert reader.rows_seen > 0 or max(len(c) for c in world.committed.values()) < 4
