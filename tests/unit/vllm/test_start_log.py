"""The reason of a failed start is found in what vLLM's processes log, and all is passed on."""

from __future__ import annotations

import subprocess
import sys

import pytest

PROGRAM = """
import subprocess, sys
from outrider.vllm.start_log import StartLog
log = StartLog()
with log.reading():
    subprocess.run([sys.executable, "-c", "import sys; sys.stderr.write(sys.argv[1])", sys.argv[1]])
print(log.reason())
sys.stderr.write("after")
"""
HEAD = "(Worker_TP0 pid=7) ERROR 11-28 12:00:00 [multiproc_executor.py:953] "
LATER = "(EngineCore pid=6) ERROR 11-28 12:00:01 [core.py:1510] Exception: see stack trace\n"


@pytest.mark.parametrize(
    ("logged", "reason"),
    [
        (
            f"{HEAD}Traceback\n{HEAD}ValueError: no room for the cache\n{LATER}",
            "no room for the cache",
        ),
        (
            f"{HEAD}torch.OutOfMemoryError: CUDA out of memory.\n{LATER}",
            "OutOfMemoryError: CUDA out of memory.",
        ),
        ("loading 10 %\r\nINFO 11-28 12:00:00 [x.py:1] ValueError: only told\nunfinished", "None"),
    ],
)
def test_first_error_of_a_child_is_the_reason(logged: str, reason: str) -> None:
    done = subprocess.run(
        [sys.executable, "-c", PROGRAM, logged], capture_output=True, text=True, timeout=60
    )
    assert done.stdout == f"{reason}\n"
    assert done.stderr.replace("\r", "") == f"{logged}after".replace("\r", "")
