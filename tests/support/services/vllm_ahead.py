"""A vLLM on a CPU that schedules ahead, as only on GPUs: nothing waits for a device there."""

from __future__ import annotations

import contextlib
from typing import Any

import pytest

LATE = "OUTRIDER_TEST_LATE"
"""Environment of a rank: looks at an event until it tells that the device has done its work."""
CAPTURED = "OUTRIDER_TEST_CAPTURED"
"""The same: if set, methods in the worker capture loops as on a GPU."""


class Done:
    """A stream and an event of a device that has done all of its work."""

    late = 0  # looks at an event until it tells so

    def __init__(self, *_: object, **__: object) -> None:
        self.device = "cpu"

    def record(self, *_: object) -> None:
        self._looks = self.late

    def query(self) -> bool:
        self._looks -= 1
        return self._looks < 0

    def synchronize(self) -> None: ...

    def wait_stream(self, _: object) -> None: ...


def let_cpu_schedule_ahead(patch: pytest.MonkeyPatch) -> None:
    import torch
    from vllm.platforms.cpu import CpuPlatform
    from vllm.v1.worker import gpu_model_runner

    check = CpuPlatform.check_and_update_config.__func__

    def keep_the_flag(cls: Any, config: Any) -> None:
        asked = config.scheduler_config.async_scheduling
        check(cls, config)
        config.scheduler_config.async_scheduling = asked

    patch.setattr(CpuPlatform, "check_and_update_config", classmethod(keep_the_flag))
    let_events_be(patch)
    assert gpu_model_runner.torch is torch


def let_events_be(patch: pytest.MonkeyPatch) -> None:
    """Put `Done` in place of what vLLM's worker has for events of a device."""
    import torch

    cuda: Any = torch.cuda
    patch.setattr(cuda, "Event", Done)
    patch.setattr(cuda, "current_stream", Done)
    patch.setattr(cuda, "stream", lambda _: contextlib.nullcontext())
