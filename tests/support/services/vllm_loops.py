"""Draft loops in a vLLM on a CPU: "captured" as on a GPU, launched behind steps, and counted."""

from __future__ import annotations

import contextlib
from collections import Counter
from typing import Any

import pytest

from outrider.drafting.building import heads
from outrider.drafting.building.loops import loop_shapes, recurrent_shapes
from outrider.drafting.graphs.loops import CapturedLoops, DraftSampler, LoopCapture
from outrider.vllm.ahead.device_choice import DeviceChoice
from tests.support.models.by_tensors import by_tensors
from tests.support.models.recordable import rerun


def capture_loops(patch: pytest.MonkeyPatch) -> Counter[str]:
    """Let methods capture loops as on a GPU.

    Returns the counts of `count_choosers` and, as "behind", of loops launched behind a step.
    """
    # Imported once vLLM has looked for its kernels in all modules.
    from outrider.drafting.building import draft_model
    from outrider.drafting.draft_model.loops import DraftModelLoops

    def of_head(*_: Any) -> Any:
        shapes = recurrent_shapes(max_rows=16, max_draft_tokens=4)
        return contextlib.nullcontext(LoopCapture(shapes, rerun, DraftSampler()))

    counts = count_choosers(patch)
    launch = CapturedLoops.launch_after_verify

    def counted(*args: Any) -> Any:
        loop = launch(*args)
        counts["behind"] += loop is not None
        return loop

    class CapturedChains:
        @staticmethod
        def of(model: Any) -> DraftModelLoops:
            model._backend = by_tensors
            shapes = loop_shapes(max_sessions=16, max_draft_tokens=4, max_branches=0)
            return DraftModelLoops(model, LoopCapture(shapes, rerun, DraftSampler()))

    patch.setattr(draft_model, "LlamaChains", CapturedChains)
    patch.setattr(heads, "_cached_capture", of_head)
    patch.setattr(heads, "choose_backend", lambda *_: by_tensors)
    patch.setattr(CapturedLoops, "launch_after_verify", counted)
    return counts


def count_choosers(patch: pytest.MonkeyPatch) -> Counter[str]:
    """Count the steps for which each `Chooser` chose the drafts, by its name."""
    counts: Counter[str] = Counter()
    settle = DeviceChoice.settle

    def settled(choice: DeviceChoice) -> bool:
        by_device = settle(choice)
        counts[choice.chooser.name] += 1
        return by_device

    patch.setattr(DeviceChoice, "settle", settled)
    return counts
