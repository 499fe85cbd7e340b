"""Children end with a process that is killed."""

from __future__ import annotations

import os
import signal
import subprocess
import sys

from tests.support.services.up import alive
from tests.support.waiting import wait_until

PARENT = """
import multiprocessing, time
from outrider.vllm.reaper import Reaper
if __name__ == "__main__":
    child = multiprocessing.get_context("fork").Process(target=time.sleep, args=(100,))
    child.start()
    reaper = Reaper()
    print(child.pid, reaper._shell.pid, flush=True)
    if input() == "dismiss":
        reaper.dismiss()
        print("dismissed", flush=True)
        input()
"""


def start() -> tuple[subprocess.Popen[str], int, int]:
    process = subprocess.Popen(
        [sys.executable, "-c", PARENT], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
    )
    assert process.stdout is not None
    child, shell = map(int, process.stdout.readline().split())
    return process, child, shell


def test_children_of_a_killed_process_end_with_it() -> None:
    process, child, shell = start()
    with process:
        process.kill()
        wait_until(lambda: not (alive(child) or alive(shell)), 10, "the child and its shell to end")


def test_dismissed_reaper_leaves_the_children_alone() -> None:
    process, child, shell = start()
    with process:
        assert process.stdin is not None
        assert process.stdout is not None
        process.stdin.write("dismiss\n")
        process.stdin.flush()
        assert process.stdout.readline() == "dismissed\n"
        assert alive(child)
        assert not alive(shell)
        process.kill()
        os.kill(child, signal.SIGKILL)
