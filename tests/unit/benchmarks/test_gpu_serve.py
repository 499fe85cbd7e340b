"""gpu_serve.py refuses what it cannot measure."""

from __future__ import annotations

import pytest

from benchmarks import gpu_serve
from benchmarks.lib.processes import ProcessError
from benchmarks.lib.vllm_peer import VllmPlace


def test_gpu_serve_with_flags_that_cannot_be_measured_refuses(
    capsys: pytest.CaptureFixture[str],
) -> None:
    assert gpu_serve.main(["--waves", "0"]) == 2
    assert "at least 1" in capsys.readouterr().err


def test_vllm_place_of_no_folder_or_python_refuses() -> None:
    with pytest.raises(ProcessError, match="neither a folder"):
        VllmPlace.find("no-such-python")
