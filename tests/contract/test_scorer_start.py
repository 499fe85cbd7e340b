"""A scorer that cannot start says why."""

import subprocess
import sys
from pathlib import Path

import pytest

from outrider.errors import ConfigError
from scorer_service.__main__ import resolve
from scorer_service.app import Options
from scorer_service.loading import load


def test_a_start_takes_no_longer_than_it_may() -> None:
    done = subprocess.run(
        [sys.executable, "-P", "-m", "scorer_service", "--start-timeout=0.001"],
        capture_output=True,
        text=True,
        timeout=110,
    )
    assert done.returncode == 2
    assert "was not ready within" in done.stderr
    assert "Traceback" not in done.stderr


@pytest.mark.parametrize("device", ["cuda:99", "tpu", "cuda:x", "cpu:"])
def test_a_device_that_is_not_there_is_refused_by_name(device: str) -> None:
    flags = resolve(["--device", device])
    del flags["exit_with_parent"]
    with pytest.raises(ConfigError, match=f"--device {device}"):
        load(Path(), Options(**flags, ranks=None), None)
