"""What steps are said to have been, from which the policy learns."""

from __future__ import annotations

from typing import Any

import pytest

from outrider.config import EngineConfig
from outrider.engine.engine import Engine
from outrider.params import SamplingParams, SpeculationParams, StopParams
from outrider.policy.base import FixedPolicy, StepDone
from outrider.rows.tracker import DraftTracker
from outrider.types import Request
from tests.support.models.hash_model import HashModel


def test_step_that_computes_preempted_rows_again_counts_as_one_of_prompts(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    steps: list[StepDone] = []
    done = DraftTracker.step_done

    def note(tracker: DraftTracker, rows: Any, step: StepDone, **how: bool) -> None:
        steps.append(step)
        done(tracker, rows, step, **how)

    monkeypatch.setattr(DraftTracker, "step_done", note)
    config = EngineConfig(4, 20, max_num_seqs=4, max_model_len=64, enable_prefix_caching=False)
    engine = Engine(HashModel(32, 4, 20, 64), config, policy=FixedPolicy(0))
    sampling, stop = SamplingParams(temperature=0.0), StopParams(50, ignore_eos=True)
    for i in (1, 2, 3):
        engine.submit(Request(i, (i,) * 8, sampling, stop, SpeculationParams()))
    again = 0
    while engine.launch():
        assert engine._in_flight is not None
        lengths = [len(row.slice.token_ids) for row in engine._in_flight.step.rows]
        engine.collect()
        engine.finalize_step()
        again += max(lengths) > 8  # tokens of an answer, too
        if min(lengths) > 1:
            assert not steps[-1].comparable, lengths
    assert again, "no row was preempted"
