"""What the benchmark of hidden features reports must follow from what was measured."""

from __future__ import annotations

import json
from dataclasses import asdict

import pytest

from benchmarks.lib.feature_rows import (
    IN_SCORER,
    NONE,
    Row,
    Sample,
    Samples,
    Sent,
    Spread,
    document,
    rows_of,
)
from benchmarks.lib.records import Completion, Run

WAY = "colocated"
TEXT = tuple(range(9))


def sample(
    wall_s: float,
    *,
    gap_s: float,
    propose_ms: float = 0.0,
    network_ms: float = 0.0,
    text: tuple[int, ...] = TEXT,
    rows: int = 0,
) -> Sample:
    """One request of 10 prompt tokens: 5 rounds, 4 of them with a draft, 2 of these hits."""
    stats = {"rounds": 5.0, "undrafted_rounds": 1.0, "accepted": 6.0, "hits": 2.0, "wait_ms": 4.0}
    stats |= {"propose_ms": propose_ms, "network_ms": network_ms, "score_ms": 50.0}
    completion = Completion(text, wall_s, stats=stats, round_gaps_s=(gap_s, gap_s, 1.0))
    sent = Sent(rows * 100.0, rows, seconds=rows * 1e-3, steps=6.0)
    return Sample(Run((completion,), wall_s), sent, prompt_tokens=10)


PLAIN = [sample(2.0, gap_s=0.01), sample(8.0, gap_s=0.04, text=(*TEXT[:-1], 0))]
SAMPLES = {
    # The machine slowed down fourfold in the second repetition.
    IN_SCORER: Samples(
        [
            sample(1.0, gap_s=0.02, propose_ms=8.0, network_ms=0.0, rows=18),
            sample(4.0, gap_s=0.08, propose_ms=32.0, network_ms=0.0, rows=18),
        ],
        PLAIN,
    ),
    WAY: Samples(
        [
            sample(1.0, gap_s=0.03, propose_ms=8.0, network_ms=4.0, rows=18),
            sample(4.0, gap_s=0.12, propose_ms=32.0, network_ms=16.0, rows=18),
        ],
        PLAIN,
    ),
}


def row(way: str) -> Row:
    return next(each for each in rows_of(3, 1, SAMPLES) if each.way == way)


def test_rows_of_repetitions_have_ratios_within_each() -> None:
    found = row(WAY)
    assert found.drafting_ratio == Spread(1.5, 1.5, 1.5)
    assert found.round_ratio is not None
    assert found.round_ratio.highest == pytest.approx(1.5)
    assert found.speed_up == Spread(2.0, 2.0, 2.0)


def test_rows_of_samples_have_times_per_round_with_a_draft() -> None:
    found = row(WAY)
    assert found.draft_ms == Spread(5.0, 2.0, 8.0)
    assert found.way_ms == Spread(2.5, 1.0, 4.0)
    assert found.wait_ms == Spread(1.0, 1.0, 1.0)
    assert found.score_ms == Spread(10.0, 10.0, 10.0)
    assert found.round_ms == Spread(75.0, 30.0, 120.0)  # the one gap of a second is no median
    assert found.tokens_per_s == Spread(5.625, 2.25, 9.0)
    assert found.acceptance_length == 2.5
    assert found.hit_rate == 0.5


def test_rows_of_prompt_features_count_them_separately() -> None:
    found = row(WAY)
    assert found.bytes_per_token == 100.0
    assert found.prompt_bytes == 1000.0
    assert found.bytes_per_round == 200.0  # 8 rows in 4 rounds
    assert found.sending_us == pytest.approx(3000.0)


def test_rows_of_no_speculation_has_no_drafts() -> None:
    found = row(NONE)
    assert found.speed_up == Spread(1.0, 1.0, 1.0)
    assert found.draft_ms is found.round_ratio is found.hit_rate is found.sending_us is None


def test_rows_of_texts_compare_them_with_no_speculation() -> None:
    assert row(WAY).equal == 0.5
    assert row(NONE).equal == 1.0


def test_document_of_any_rows_has_two_tables_for_each_k_and_load() -> None:
    rows = [row for k in (3, 5) for at_once in (1, 8) for row in rows_of(k, at_once, SAMPLES)]
    lines = document(rows, "command", {"cpu": "this", "method": "eagle3"})
    assert [line for line in lines if line.startswith("## ")] == [
        *("## K = 3, 1 at once", "## K = 3, 8 at once"),
        *("## K = 5, 1 at once", "## K = 5, 8 at once"),
    ]
    assert sum(line.startswith(f"| {WAY}") for line in lines) == 8
    assert "1.50 (1.50-1.50)" in "\n".join(lines)
    json.dumps([asdict(each) for each in rows])


def test_rows_of_without_drafts_in_the_scorer_have_no_ratios_to_them() -> None:
    way, none = rows_of(3, 1, {WAY: SAMPLES[WAY]})
    assert (way.round_ratio, way.drafting_ratio) == (None, None)
    assert way.speed_up == Spread(2.0, 2.0, 2.0)
    assert none.way == NONE
