"""vLLM's worker of one rank, in a process of its own, that schedules ahead on a CPU."""

from __future__ import annotations

import contextlib
import os
from collections import Counter
from typing import Any

import pytest

from outrider.vllm.ahead.device_choice import DeviceChoice
from outrider.vllm.worker import CPUWorker
from tests.support.services.vllm_ahead import CAPTURED, LATE, Done, let_events_be


class CountingRank(CPUWorker):  # type: ignore[misc,valid-type]
    """Counts who chose the drafts of steps."""

    def load_model(self, *args: Any, **kwargs: Any) -> None:
        from tests.vllm.test_in_process import captured_loops

        self._choosers: Counter[str] = Counter()
        self._kept = contextlib.ExitStack()
        patch = self._kept.enter_context(pytest.MonkeyPatch.context())
        let_events_be(patch)
        Done.late = int(os.environ[LATE])
        if os.environ.get(CAPTURED):
            self._kept.enter_context(captured_loops(patch))
        launch = DeviceChoice.launch

        def counted(choice: DeviceChoice, *args: Any, **kwargs: Any) -> Any:
            tokens = launch(choice, *args, **kwargs)
            self._choosers[choice.chooser.name] += 1
            return tokens

        patch.setattr(DeviceChoice, "launch", counted)
        super().load_model(*args, **kwargs)

    def take_choosers(self) -> dict[str, int]:
        """Return how many steps each of them chose for since the last call."""
        counts, self._choosers = self._choosers, Counter()
        return dict(counts)
