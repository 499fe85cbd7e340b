"""vLLM's worker of one rank, in a process of its own, that schedules ahead on a CPU."""

from __future__ import annotations

import os
from typing import Any

import pytest

from outrider.vllm.worker import CPUWorker
from tests.support.services.vllm_ahead import CAPTURED, LATE, Done, let_events_be
from tests.support.services.vllm_loops import capture_loops, count_choosers


class CountingRank(CPUWorker):  # type: ignore[misc,valid-type]
    """Counts who chose the drafts of steps."""

    def load_model(self, *args: Any, **kwargs: Any) -> None:
        patch = pytest.MonkeyPatch()
        let_events_be(patch)
        Done.late = int(os.environ[LATE])
        count = capture_loops if os.environ.get(CAPTURED) else count_choosers
        self._choosers = count(patch)
        super().load_model(*args, **kwargs)

    def take_choosers(self) -> dict[str, int]:
        """Return how many steps each of them chose for since the last call, by name."""
        counts = dict(self._choosers)
        counts.pop("behind", None)
        self._choosers.clear()
        return counts
