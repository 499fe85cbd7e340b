"""The engine of load tests that only streams."""

from __future__ import annotations

import queue

import pytest

from benchmarks.lib.streaming_scorer import StreamingEngine
from outrider.errors import CapacityError
from outrider.params import StopParams
from outrider.types import FinishReason, Request, StepEvents


def test_streaming_engine_commits_a_token_a_step_to_each_request() -> None:
    steps: queue.Queue[StepEvents] = queue.Queue()
    engine = StreamingEngine(0.001, 2, 100, steps.put)
    try:
        for session, length in ((1, 3), (2, 1)):
            engine.submit(Request(session, (5, 6), stop=StopParams(max_tokens=length)))
        commits = []
        while sum(commit.finish_reason is not None for commit in commits) < 2:
            commits += steps.get(timeout=10).commits
        first = [commit for commit in commits if commit.session_id == 1]
        assert [commit.base_len for commit in first] == [2, 3, 4]
        assert first[-1].finish_reason is FinishReason.LENGTH
        assert first[-1].stats is not None
        assert first[-1].stats.output_tokens == first[-1].stats.rounds == 3
        for session in (3, 4):
            engine.submit(Request(session, (5,), stop=StopParams(max_tokens=1000)))
        with pytest.raises(CapacityError):
            engine.submit(Request(5, (5,)))
    finally:
        engine.stop(10)
