"""draft_ahead.py refuses what it cannot measure, and keeps its results when vLLM cannot run."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

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
def test_main_with_flags_that_cannot_be_measured_refuses(
    capsys: pytest.CaptureFixture[str], flags: list[str], said: str
) -> None:
    with pytest.raises(SystemExit):
        draft_ahead.main(flags)
    assert said in capsys.readouterr().err


def test_vllm_place_that_is_neither_folder_nor_python_is_refused() -> None:
    with pytest.raises(ProcessError, match="neither a folder"):
        VllmPlace.find("no-such-python")


def test_draft_ahead_when_vllm_fails_keeps_its_results(tmp_path: Path) -> None:
    out = tmp_path / "found"
    flags = ["--modes", "ahead", "--round-trip-ms", "0", "0.5", "--temperature", "0"]
    flags += ["--batch", "2", "--waves", "2", "--rounds", "1", "--max-tokens", "8"]
    # This Python has no vLLM.
    flags += ["--timeout", "120", "--max-prompt-tokens", "32", "--vllm", sys.executable]
    command = [sys.executable, "-m", "benchmarks.draft_ahead", *flags, "--out", str(out)]
    done = subprocess.run(command, capture_output=True, text=True, timeout=300, check=False)
    assert done.returncode == 0, done.stderr
    found = json.loads(out.with_suffix(".json").read_text())
    names = [f"ahead, RT {delay} ms, T = 0" for delay in ("0", "0.5")]
    by_system = {each["system"]: each for each in found["results"]}
    assert by_system.keys() == {
        f"{prefix}{name}" for name in names for prefix in ("", "none beside ")
    }
    for name in names:
        assert by_system[name]["concurrency"] == 2
        assert by_system[name]["reference"] == f"none beside {name}"
        assert by_system[name]["mean_acceptance_length"] >= 1.0
        assert "hit_rate" in by_system[name]
    direct, proxied, *failures = found["setup"]["notes"]
    assert direct == f"{names[0]}, 2 at once: 4 of 4 texts equal."
    assert "bytes to the scorer" in proxied
    failed = [note.partition(":")[0] for note in failures]
    assert failed == ["vLLM none failed", "vLLM draft_model failed"]
