"""The reason of a failed start is found in what vLLM's processes log, and all is passed on."""

from __future__ import annotations

import os
import select
import subprocess
import sys
import time
from collections.abc import Callable

import pytest

FAILED_START = """
import contextlib, subprocess, sys, tracemalloc
from outrider.vllm.start_log import StartLog
log = StartLog()
tracemalloc.start()
with contextlib.suppress(ChildProcessError), log.reading():
    subprocess.run([sys.executable, "-c", sys.argv[1], *sys.argv[2:]])
    raise ChildProcessError
print(log.reason())
"""
PROGRAM = f"{FAILED_START}\nsys.stderr.write('after')"
TELL = "import sys; sys.stderr.write(sys.argv[1])"
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
        (f"10 %\r{HEAD}ValueError: no room\r20 %\r", "no room"),
        ("loading 10 %\r\nINFO 11-28 12:00:00 [x.py:1] ValueError: only told\nunfinished", "None"),
    ],
)
def test_first_error_of_a_child_is_the_reason(logged: str, reason: str) -> None:
    done = subprocess.run(
        [sys.executable, "-c", PROGRAM, TELL, logged], capture_output=True, timeout=60
    )
    assert done.stdout.decode() == f"{reason}\n"
    assert done.stderr.decode() == f"{logged}after"


LONG = f"""
import sys
sys.stderr.write({HEAD!r} + "ValueError: no room\\n")
for number in range(28):
    sys.stderr.write(f"{{number:8191}}\\n")
"""


def _stalled() -> tuple[int, int]:
    return os.pipe()


def _stalled_non_blocking() -> tuple[int, int]:
    reader, writer = os.pipe()
    os.set_blocking(writer, False)
    return reader, writer


def _without_reader() -> tuple[int, int]:
    reader, writer = os.pipe()
    os.close(reader)
    return os.open(os.devnull, os.O_RDONLY), writer


def _full_disk() -> tuple[int, int]:
    return os.open(os.devnull, os.O_RDONLY), os.open("/dev/full", os.O_WRONLY)


@pytest.mark.parametrize("make", [_stalled, _stalled_non_blocking, _without_reader, _full_disk])
def test_children_go_on_when_their_text_cannot_be_passed_on(
    make: Callable[[], tuple[int, int]],
) -> None:
    reader, writer = make()
    try:
        done = subprocess.run(
            [sys.executable, "-c", FAILED_START, LONG],
            stdout=subprocess.PIPE,
            stderr=writer,
            text=True,
            timeout=60,
        )
    finally:
        os.close(reader)
        os.close(writer)
    assert (done.stdout, done.returncode) == ("no room\n", 0)


def test_all_reaches_a_slow_reader_of_a_non_blocking_pipe() -> None:
    reader, writer = os.pipe()
    os.set_blocking(writer, False)
    run = subprocess.Popen(
        [sys.executable, "-c", FAILED_START, LONG], stdout=subprocess.DEVNULL, stderr=writer
    )
    os.close(writer)
    told = b""
    try:
        while select.select([reader], [], [], 10)[0] and (chunk := os.read(reader, 16_384)):
            told += chunk
            time.sleep(0.02)
        assert run.wait(10) == 0
    finally:
        run.kill()
        os.close(reader)
    assert told.decode() == f"{HEAD}ValueError: no room\n" + "".join(
        f"{number:8191}\n" for number in range(28)
    )


def test_a_line_without_end_takes_little_memory() -> None:
    program = f"{FAILED_START}\nprint(tracemalloc.get_traced_memory()[1])"
    endless = "import sys\nfor _ in range(100): sys.stderr.write('.' * 80_000)"
    done = subprocess.run(
        [sys.executable, "-c", program, endless], capture_output=True, text=True, timeout=60
    )
    reason, peak_bytes = done.stdout.split()
    assert (reason, len(done.stderr)) == ("None", 8_000_000)
    assert int(peak_bytes) < 1_000_000


def test_after_a_start_that_succeeded_text_is_only_passed_on() -> None:
    program = """
import subprocess, sys
from outrider.vllm.start_log import StartLog
log = StartLog()
late = "import sys; sys.stdin.read(); sys.stderr.write(sys.argv[1])"
with log.reading():
    child = subprocess.Popen([sys.executable, "-c", late, sys.argv[1]], stdin=subprocess.PIPE)
child.communicate()
print(log.reason())
"""
    logged = f"{HEAD}ValueError: of a request\n"
    done = subprocess.run(
        [sys.executable, "-c", program, logged], capture_output=True, text=True, timeout=60
    )
    assert (done.stdout, done.stderr) == ("None\n", logged)
