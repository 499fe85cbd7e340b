"""Children end with a process that is killed."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
from pathlib import Path

from tests.support.services.up import alive
from tests.support.waiting import wait_until

PARENT = """
import multiprocessing, subprocess, time
from outrider.vllm.reaper import Reaper

def work(grandchild):
    grandchild.value = subprocess.Popen(["sleep", "100"]).pid
    time.sleep(100)

if __name__ == "__main__":
    reaper = Reaper()
    with reaper.watching():
        spawn = multiprocessing.get_context("spawn")
        grandchild = spawn.Value("i", 0)
        child = spawn.Process(target=work, args=(grandchild,))
        child.start()
        while child.pid not in reaper._told or not grandchild.value:
            time.sleep(0.01)
        print(child.pid, grandchild.value, reaper._shell.pid, flush=True)
        asked = input()
    getattr(reaper, asked)()
    print(asked, flush=True)
    input()
"""


def start(folder: Path) -> tuple[subprocess.Popen[str], list[int], int]:
    """Return a process, its child and grandchild, and the shell that watches over them."""
    program = folder / "parent.py"
    program.write_text(PARENT)
    process = subprocess.Popen(
        [sys.executable, program], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
    )
    assert process.stdout is not None
    *children, shell = map(int, process.stdout.readline().split())
    return process, children, shell


def ask(process: subprocess.Popen[str], what: str) -> None:
    assert process.stdin is not None
    assert process.stdout is not None
    process.stdin.write(f"{what}\n")
    process.stdin.flush()
    assert process.stdout.readline() == f"{what}\n"


def test_children_of_a_process_that_is_killed_while_they_start_end_with_it(tmp_path: Path) -> None:
    process, children, shell = start(tmp_path)
    with process:
        process.kill()
        wait_until(lambda: not any(map(alive, [*children, shell])), 10, "all of them to end")


def test_reaped_children_end_before_the_process(tmp_path: Path) -> None:
    process, children, shell = start(tmp_path)
    with process:
        ask(process, "reap")
        assert not alive(shell)
        wait_until(lambda: not any(map(alive, children)), 10, "the children to end")
        process.kill()


def test_dismissed_reaper_leaves_the_children_alone(tmp_path: Path) -> None:
    process, children, shell = start(tmp_path)
    with process:
        ask(process, "dismiss")
        assert all(map(alive, children))
        assert not alive(shell)
        process.kill()
        for child in children:
            os.kill(child, signal.SIGKILL)
