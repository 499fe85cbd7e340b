"""Child processes with bounded waits: workers that speak JSON lines, and services."""

from __future__ import annotations

import contextlib
import json
import os
import queue
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

REPO = Path(__file__).resolve().parents[2]
_STOP_S = 10.0
_TAIL_LINES = 15


class ProcessError(Exception):
    """A child ended, answered with an error, or did not answer in time."""


def python_path() -> dict[str, str]:
    """Return the environment of a process that imports the repository's modules first."""
    paths = [str(REPO), os.environ.get("PYTHONPATH", "")]
    return {"PYTHONPATH": os.pathsep.join(filter(None, paths))}


class Child:
    """A child process whose stdout is read with a deadline, and whose stderr is a file.

    The child leads a process group of its own, so `stop` also ends the processes it started.
    """

    def __init__(
        self, name: str, command: Sequence[str], log_dir: Path, *, env: Mapping[str, str]
    ) -> None:
        self.name = name
        self.log = log_dir / f"{name}.log"
        self._lines: queue.Queue[str | None] = queue.Queue(maxsize=10_000)
        with self.log.open("w") as log:
            self._process = subprocess.Popen(
                list(command),
                stdin=subprocess.PIPE,
                stdout=subprocess.PIPE,
                stderr=log,
                text=True,
                bufsize=1,
                env={**os.environ, **env},
                start_new_session=True,
            )
        self._reader = threading.Thread(target=self._read, daemon=True)
        self._reader.start()

    @property
    def pid(self) -> int:
        return self._process.pid

    @property
    def running(self) -> bool:
        return self._process.poll() is None

    def line(self, timeout_s: float) -> str:
        """Return the next line of stdout; raise `ProcessError` at its end or after `timeout_s`."""
        try:
            line = self._lines.get(timeout=timeout_s)
        except queue.Empty:
            silent = f"{self.name} was silent for {timeout_s:.0f} s{self.tail()}"
            raise ProcessError(silent) from None
        if line is None:
            self._lines.put(None)
            raise ProcessError(f"{self.name} ended{self.tail()}")
        return line

    def write(self, line: str) -> None:
        assert self._process.stdin is not None
        try:
            self._process.stdin.write(line + "\n")
            self._process.stdin.flush()
        except BrokenPipeError:
            raise ProcessError(f"{self.name} ended{self.tail()}") from None

    def ready(self, timeout_s: float) -> dict[str, str]:
        """Wait for a service's `ready {...}` line and return the addresses in the line."""
        deadline = time.monotonic() + timeout_s
        while True:
            line = self.line(max(0.1, deadline - time.monotonic()))
            if line.startswith("ready "):
                says: dict[str, str] = json.loads(line.removeprefix("ready "))
                return says

    def stop(self) -> None:
        """End the process group with SIGTERM, and with SIGKILL after 10 s."""
        with contextlib.suppress(OSError):
            if self._process.stdin is not None:
                self._process.stdin.close()
        for signum in (signal.SIGTERM, signal.SIGKILL):
            with contextlib.suppress(ProcessLookupError):
                os.killpg(self.pid, signum)
            try:
                self._process.wait(timeout=_STOP_S)
            except subprocess.TimeoutExpired:
                continue
            break
        # A child of the group's leader may outlive the leader.
        with contextlib.suppress(ProcessLookupError):
            os.killpg(self.pid, signal.SIGKILL)
        self._reader.join(timeout=_STOP_S)

    def _read(self) -> None:
        assert self._process.stdout is not None
        with self._process.stdout as lines:
            for line in lines:
                self._lines.put(line.rstrip("\n"))
        self._lines.put(None)

    def log_lines(self) -> list[str]:
        """Return what the process wrote to stderr so far, by lines."""
        return self.log.read_text(errors="replace").splitlines()

    def tail(self) -> str:
        """Return the log's first errors and its end, to be said after what went wrong."""
        lines = self.log_lines()
        first, last = lines[:-_TAIL_LINES], lines[-_TAIL_LINES:]
        errors = [line for line in first if "Error: " in line][:5]
        return "; its log:\n  " + "\n  ".join([*errors, *last]) if lines else ""


def module_child(
    name: str,
    command: Sequence[object],
    log_dir: Path,
    children: list[Child],
    env: Mapping[str, str] | None = None,
) -> Child:
    """Start a module of the repository with this Python, and add it to `children`."""
    python = [sys.executable, "-P", "-m", *map(str, command)]
    children.append(Child(name, python, log_dir, env=python_path() | dict(env or {})))
    return children[-1]


def process_tree(pid: int) -> list[int]:
    """Return the ids of a process and of all below it."""
    found = [pid]
    for task in Path(f"/proc/{pid}/task").iterdir():
        for child in (task / "children").read_text().split():
            found += process_tree(int(child))
    return found


def cpu_seconds(pids: Sequence[int]) -> float:
    """Return the user and system time that processes have used together."""
    # The clocks' ids are built as clock_getcpuclockid(3) does.
    return sum(time.clock_gettime(~pid << 3 | 2) for pid in pids)


class Worker:
    """A child that answers requests with JSON lines (see worker_loop.py)."""

    def __init__(self, child: Child, start_timeout_s: float) -> None:
        self.child = child
        self._answer(start_timeout_s)

    def ask(self, request: Mapping[str, object], timeout_s: float) -> dict[str, Any]:
        """Send a request and return the answer. Raises `ProcessError`."""
        self.child.write(json.dumps(request))
        return self._answer(timeout_s)

    def _answer(self, timeout_s: float) -> dict[str, Any]:
        answer: dict[str, Any] = json.loads(self.child.line(timeout_s))
        if "error" in answer:
            raise ProcessError(f"{self.child.name}: {answer['error']}")
        return answer


@contextlib.contextmanager
def stopping(children: list[Child]) -> Iterator[list[Child]]:
    """Stop every child in the list at the end, all at once: each may take 10 s."""
    try:
        yield children
    finally:
        with ThreadPoolExecutor() as pool:
            list(pool.map(Child.stop, children))
