"""What a method does before the first session is attached to it."""

from __future__ import annotations

from pathlib import Path

import pytest

from outrider.drafting.ahead.budget import Budget, Plans, choose_budget
from outrider.drafting.building.config import DraftModelConfig
from outrider.drafting.building.methods import build_proposer
from outrider.drafting.draft_model import brancher
from tests.support.checkpoints.tiny_pair import save_pair


def test_warm_up_of_draft_model_chooses_branches_by_measured_times(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Else the first real branches compile that choice, for seconds."""
    _, draft = save_pair(tmp_path, eps=0.1)
    measured: list[bool] = []

    def choose(plans: Plans, forward_s, *args: object, **options: object) -> Budget:  # type: ignore[no-untyped-def]
        def seen(rows):  # type: ignore[no-untyped-def]
            seconds = forward_s(rows)
            measured.append(bool(seconds.any()))
            return seconds

        return choose_budget(plans, seen, *args, **options)  # type: ignore[arg-type]

    monkeypatch.setattr(brancher, "choose_budget", choose)
    build_proposer((DraftModelConfig(model=str(draft), device="cpu"),), 4, lambda _: None)
    assert any(measured)
