"""draft_ahead.py refuses what it cannot measure."""

from __future__ import annotations

import pytest

from benchmarks import draft_ahead
from benchmarks.lib.processes import ProcessError
from benchmarks.lib.vllm_peer import VllmPlace


def test_draft_ahead_with_flags_that_cannot_be_measured_refuses(
    capsys: pytest.CaptureFixture[str],
) -> None:
    with pytest.raises(SystemExit):
        draft_ahead.main(["--waves", "0"])
    assert "at least 1" in capsys.readouterr().err


def test_vllm_place_of_no_folder_or_python_refuses() -> None:
    with pytest.raises(ProcessError, match="neither a folder"):
        VllmPlace.find("no-such-python")
