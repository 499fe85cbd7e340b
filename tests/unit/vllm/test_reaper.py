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
    reaper = Reaper()
    with reaper.watching():
        child = multiprocessing.get_context("spawn").Process(target=time.sleep, args=(100,))
        child.start()
        while child.pid not in reaper._told:
            time.sleep(0.01)
        print(child.pid, reaper._shell.pid, flush=True)
        asked = input()
    getattr(reaper, asked)()
    print(asked, flush=True)
    input()
"""


def start() -> tuple[subprocess.Popen[str], int, int]:
    process = subprocess.Popen(
        [sys.executable, "-c", PARENT], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
    )
    assert process.stdout is not None
    child, shell = map(int, process.stdout.readline().split())
    return process, child, shell


def ask(process: subprocess.Popen[str], what: str) -> None:
    assert process.stdin is not None
    assert process.stdout is not None
    process.stdin.write(f"{what}\n")
    process.stdin.flush()
    assert process.stdout.readline() == f"{what}\n"


def test_children_of_a_process_that_is_killed_while_they_start_end_with_it() -> None:
    process, child, shell = start()
    with process:
        process.kill()
        wait_until(lambda: not (alive(child) or alive(shell)), 10, "the child and its shell to end")


def test_reaped_children_end_before_the_process() -> None:
    process, child, shell = start()
    with process:
        ask(process, "reap")
        assert not alive(shell)
        wait_until(lambda: not alive(child), 10, "the child to end")
        process.kill()


def test_dismissed_reaper_leaves_the_children_alone() -> None:
    process, child, shell = start()
    with process:
        ask(process, "dismiss")
        assert alive(child)
        assert not alive(shell)
        process.kill()
        os.kill(child, signal.SIGKILL)
