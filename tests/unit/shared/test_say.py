"""A line that cannot be written is lost; the process goes on and exits as it would have."""

from __future__ import annotations

import subprocess
import sys

import pytest

SAY = """
import io, os, sys
from outrider.errors import say
"""


@pytest.mark.parametrize(
    ("code", "said"),
    [
        ("os.close(2); sys.stderr = None; say('lost')", ""),  # as Python does under `2>&-`
        ("sys.stderr.close(); say('lost')", ""),
        ("sys.stdout.reconfigure(encoding='ascii'); say('\\u00e9', sys.stdout)", ""),
        ("sys.stderr = open('/dev/full', 'w'); say('lost'); sys.stderr = None", ""),
        ("say('\\u00e9', sys.stdout)", "\u00e9\n"),
    ],
)
def test_say_writes_a_line_or_loses_it(code: str, said: str) -> None:
    command = [sys.executable, "-X", "utf8", "-c", f"{SAY}{code}\nos._exit(0)"]
    done = subprocess.run(command, stdout=subprocess.PIPE, timeout=60, check=False)
    assert (done.returncode, done.stdout.decode()) == (0, said)
