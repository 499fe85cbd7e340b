"""From a step's sums to what Prometheus reads."""

from __future__ import annotations

from collections import Counter
from dataclasses import replace

import pytest
from prometheus_client import REGISTRY, CollectorRegistry, Gauge

from outrider.counts import DRAFT_FATES, Admission, StepCounts
from outrider.features import (
    FeatureBatch,
    FeatureOrder,
    FeatureRows,
    FeatureSpec,
    FeatureWindow,
)
from outrider.types import StepTimings
from scorer_service.metrics import EngineMetrics, ScorerMetrics

TIMINGS = StepTimings(
    schedule_ms=1.0,
    forward_ms=20.0,
    verify_ms=2.0,
    commit_ms=3.0,
    idle_ms=5.0,
    num_rows=4,
    num_tokens=20,
)
COUNTS = StepCounts(
    rounds=Counter({(4, 4): 1, (4, 1): 2, (0, 0): 1}),
    drafted_by=Counter({"a": 8, "b": 4}),
    accepted_by=Counter({"a": 5, "b": 1}),
    output_tokens=10,
    fates=Counter({("a", "hit"): 2, ("b", "late"): 1, ("b", "waited"): 3}),
    wait_s=0.004,
    propose_s=0.5,
    network_s=0.25,
    drafts_by_context=Counter({0: 2, 3: 1}),
    accepted_by_context=Counter({0: 5, 3: 1}),
    score_s=0.088,
    plain_s=0.06,
    draft_mode="on demand",
    admissions=[Admission(0.2, 100, 64)],
    preemptions=1,
)


class Metrics:
    def __init__(self) -> None:
        self.registry = CollectorRegistry()
        self.scorer = ScorerMetrics(self.registry, "m")

    def __call__(self, name: str, **labels: str) -> float | None:
        return self.registry.get_sample_value(f"outrider:{name}", {"model_name": "m", **labels})


def test_scorer_metrics_after_a_step_count_it() -> None:
    metrics = Metrics()
    first = metrics("spec_decode_num_accepted_tokens_per_pos_total", position="0")
    assert first == 0  # an alert finds drafts of which none was ever accepted
    metrics.scorer.attached("a", "large")
    metrics.scorer.attached("b", "small")
    for _ in range(2):
        metrics.scorer.observe_step(TIMINGS, COUNTS)
    assert metrics("spec_decode_num_drafts_total") == 2 * 3
    assert metrics("spec_decode_num_draft_tokens_total") == 2 * 12
    assert metrics("spec_decode_num_accepted_tokens_total") == 2 * 6
    per_pos = "spec_decode_num_accepted_tokens_per_pos_total"
    assert [metrics(per_pos, position=str(i)) for i in range(5)] == [6, 2, 2, 2, None]
    for context, drafts, accepted in (("0", 2, 5), ("16384", 1, 1)):
        here = {"context": context}
        assert metrics("spec_decode_num_drafts_per_context_total", **here) == 2 * drafts
        assert metrics("spec_decode_num_accepted_tokens_per_context_total", **here) == 2 * accepted
    by_k = "spec_decode_num_rounds_total"
    assert [metrics(by_k, num_draft_tokens=k) for k in ("0", "1", "4")] == [2, None, 6]
    for pool, drafted, accepted in (("large", 16, 10), ("small", 8, 2)):
        assert metrics("pool_draft_tokens_total", pool=pool) == drafted
        assert metrics("pool_accepted_tokens_total", pool=pool) == accepted
    for pool, fates in (("large", {"hit": 4}), ("small", {"late": 2, "waited": 6})):
        for fate in DRAFT_FATES:
            assert metrics("pool_rounds_total", pool=pool, fate=fate) == fates.get(fate, 0)
    assert metrics("draft_blocks_total", fate="stale") == 0
    assert metrics("draft_blocks_total", fate="malformed") == 0
    modes = {"none": 0, "on demand": 2, "ahead": 0}
    assert {mode: metrics("steps_total", mode=mode) for mode in modes} == modes
    assert metrics("generation_tokens_total") == 20
    assert metrics("step_output_tokens_sum") == 20
    assert metrics("prompt_tokens_total") == metrics("prefix_cache_queries_total") == 200
    assert metrics("prefix_cache_hits_total") == 128
    assert metrics("request_queue_time_seconds_sum") == 0.4
    assert metrics("num_preemptions_total") == 2
    # A round has the host's time of its step to itself: 4 rounds, 4 ms.
    parts = {"propose": 1.0, "network": 0.5, "wait": 0.008, "score": 0.176, "commit": 0.032}
    for part, seconds in parts.items():
        assert metrics("round_seconds_total", part=part) == pytest.approx(seconds)


@pytest.mark.parametrize(("wait_s", "waited_s"), [(0.0, 0.0), (0.004, 0.004), (0.5, 0.005)])
def test_scorer_metrics_when_rows_wait_count_at_most_idle_time(
    wait_s: float, waited_s: float
) -> None:
    """Rows that waited while others' step ran held nobody up; an engine without work waits not."""
    metrics = Metrics()
    metrics.scorer.observe_step(TIMINGS, replace(COUNTS, wait_s=wait_s))
    assert metrics("decode_seconds_total") == pytest.approx(0.026 + waited_s)
    assert metrics("decode_plain_seconds_total") == pytest.approx(0.06)


def test_scorer_metrics_with_colocated_drafts_count_them_in_the_step() -> None:
    metrics = Metrics()
    metrics.scorer.observe_step(replace(TIMINGS, draft_ms=30.0), replace(COUNTS, wait_s=0.0))
    assert metrics("decode_seconds_total") == pytest.approx(0.056)
    assert metrics("step_time_seconds_sum", part="draft") == pytest.approx(0.03)
    metrics.scorer.observe_step(TIMINGS, COUNTS)  # of a scorer that does not
    assert metrics("step_time_seconds_count", part="draft") == 1


def test_scorer_metrics_of_a_step_with_prompt_leave_out_the_speedup() -> None:
    metrics = Metrics()
    metrics.scorer.observe_step(TIMINGS, replace(COUNTS, plain_s=0.0))
    assert metrics("decode_seconds_total") == metrics("decode_plain_seconds_total") == 0.0


def test_scorer_metrics_with_many_proposers_bound_their_names() -> None:
    metrics = Metrics()
    for i in range(5000):
        metrics.scorer.attached(f"proposer-{i}", f"pool-{i}")
        drafted = Counter({f"proposer-{i}": 1})
        metrics.scorer.observe_step(TIMINGS, replace(COUNTS, drafted_by=drafted))
    (family,) = (f for f in metrics.registry.collect() if f.name == "outrider:pool_draft_tokens")
    assert len(family.samples) == 257
    assert metrics("pool_draft_tokens_total", pool="other") == 5000 - 256


def test_scorer_metrics_with_hidden_states_count_them() -> None:
    metrics = Metrics()
    order = FeatureOrder(1, FeatureSpec(4, (1,), final_norm=True), FeatureWindow())
    rows = tuple(FeatureRows(i, order, 0, bytes(16 * n)) for i, n in enumerate((3, 5)))
    metrics.scorer.count_features(FeatureBatch(rows, 0.25), sent_bytes=48)
    assert metrics("feature_rows_total") == 8
    assert metrics("feature_bytes_total") == 48
    assert metrics("feature_seconds_total") == 0.25


def test_engine_metrics_pass_on_what_has_their_prefix() -> None:
    own = Gauge("theirs:running", "Of an engine.")  # in the process's registry
    try:
        own.set(3)
        registry = CollectorRegistry()
        registry.register(EngineMetrics("theirs:"))
        assert registry.get_sample_value("theirs:running") == 3
        assert [each.name for each in registry.collect()] == ["theirs:running"]
    finally:
        REGISTRY.unregister(own)
