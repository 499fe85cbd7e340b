"""draft_ahead.py refuses what it cannot measure."""

from __future__ import annotations

import sys

import pytest

from benchmarks import draft_ahead
from benchmarks.lib.processes import ProcessError
from benchmarks.lib.vllm_peer import VllmPlace


@pytest.mark.parametrize(
    ("flags", "said"),
    [
        (["--waves", "0"], "at least 1"),
        (["--temperature", "1", "--vllm", sys.executable], "temperature 0"),
    ],
)
def test_draft_ahead_with_flags_that_cannot_be_measured_refuses(
    capsys: pytest.CaptureFixture[str], flags: list[str], said: str
) -> None:
    with pytest.raises(SystemExit):
        draft_ahead.main(flags)
    assert said in capsys.readouterr().err


def test_draft_ahead_with_vllm_at_no_folder_or_python_refuses() -> None:
    with pytest.raises(ProcessError, match="neither a folder"):
        VllmPlace.find("no-such-python")
