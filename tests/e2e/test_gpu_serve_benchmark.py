"""gpu_serve.py measures real processes."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest

pytestmark = pytest.mark.timeout(400)


def test_gpu_serve_over_a_delay_reports_each_way_beside_none(tmp_path: Path) -> None:
    out = tmp_path / "found"
    flags = ["--places", "ahead", "--round-trip-ms", "0", "0.5", "--temperature", "0"]
    flags += ["--concurrency", "2", "--waves", "2", "--rounds", "1", "--max-tokens", "24"]
    flags += ["--device", "cpu", "--dtype", "float32"]
    flags += ["--request-timeout", "120", "--max-prompt-tokens", "32"]
    command = [sys.executable, "-m", "benchmarks.gpu_serve", *flags, "--out", str(out)]
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
    without_vllm, direct, proxied = found["setup"]["notes"]
    assert without_vllm == "vLLM was left out."
    assert direct == f"{names[0]}, 2 at once: 4 of 4 texts equal."
    assert "bytes to the scorer" in proxied
