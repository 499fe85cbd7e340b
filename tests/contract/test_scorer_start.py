"""A scorer that cannot be ready in time says so."""

import subprocess
import sys


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
