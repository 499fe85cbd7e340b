"""outrider/rpc/runtime.py: the life of a service process, in a process."""

from __future__ import annotations

import gc
import json
import signal
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager

import pytest

from outrider.rpc.runtime import importing
from tests.support.services.up import alive
from tests.support.waiting import wait_until

PROGRAM = """
import asyncio, sys
from outrider.errors import ConfigError
from outrider.rpc import runtime

class Service:
    async def start(self):
        if "refuse" in sys.argv:
            raise ConfigError("the port is taken")
        if "hang" in sys.argv:
            print("loading", flush=True)
            await asyncio.sleep(60)
        return {"grpc": "here"}

    async def stop(self):
        if "drain" in sys.argv:
            print("draining", flush=True)
            await asyncio.sleep(60)
        print("stopped", flush=True)

    async def wait_failed(self):
        await asyncio.sleep(0.2 if "fail" in sys.argv else 60)

sys.exit(runtime.run("test", Service(), exit_with_parent="orphan" in sys.argv))
"""

INTERRUPTED = """
import importlib, signal, sys

class CtrlC:
    @staticmethod
    def find_spec(name, *_):
        if name == "grpc":
            signal.raise_signal(signal.SIGINT)

sys.meta_path.insert(0, CtrlC)
sys.exit(importlib.import_module(sys.argv[1]).main(sys.argv[2:]))
"""


@contextmanager
def service(*arguments: str) -> Iterator[subprocess.Popen[str]]:
    process = subprocess.Popen(
        [sys.executable, "-c", PROGRAM, *arguments],
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
    )
    try:
        yield process
    finally:
        process.kill()
        process.communicate(timeout=10)


def first_line(process: subprocess.Popen[str]) -> str:
    assert process.stdout is not None
    return process.stdout.readline()


@pytest.mark.parametrize("signum", [signal.SIGTERM, signal.SIGINT])
def test_runtime_on_signal_stops_a_ready_service(signum: int) -> None:
    with service() as process:
        word, _, payload = first_line(process).partition(" ")
        assert (word, json.loads(payload)) == ("ready", {"service": "test", "grpc": "here"})
        process.send_signal(signum)
        out, err = process.communicate(timeout=20)
        assert (process.returncode, out, err) == (0, "stopped\n", "")


@pytest.mark.parametrize("signum", [signal.SIGTERM, signal.SIGINT])
def test_runtime_on_signal_stops_a_loading_service(signum: signal.Signals) -> None:
    with service("hang") as process:
        assert first_line(process) == "loading\n"
        process.send_signal(signum)
        out, _ = process.communicate(timeout=20)
        assert (process.returncode, out) == (128 + signum, "stopped\n")


@pytest.mark.parametrize("signum", [signal.SIGTERM, signal.SIGINT])
def test_runtime_on_second_signal_ends_at_once_and_says_so(signum: signal.Signals) -> None:
    with service("drain") as process:
        assert first_line(process).startswith("ready ")
        process.send_signal(signum)
        assert first_line(process) == "draining\n"
        process.send_signal(signum)
        out, err = process.communicate(timeout=20)
        assert (process.returncode, out) == (128 + signum, "")
        assert err.startswith(f"test: a second {signum.name} ends everything at once")


@pytest.mark.parametrize(
    "argv",
    [
        ["gateway.__main__", "--scorer", "127.0.0.1:1"],
        ["proposer_service.__main__", "--scorer", "127.0.0.1:1", "--method", "ngram"],
        ["scorer_service.__main__"],
        ["outrider.cli", "serve", "embedded"],
    ],
)
def test_runtime_on_signal_during_imports_leaves_no_traceback(argv: list[str]) -> None:
    program = [sys.executable, "-c", INTERRUPTED, *argv]
    ended = subprocess.run(program, capture_output=True, text=True, timeout=60)
    assert ended.returncode == 130
    assert "Traceback" not in ended.stderr


@pytest.mark.parametrize(
    "argv",
    [
        ["gateway.__main__", "--scorer", "127.0.0.1:1"],
        ["proposer_service.__main__", "--scorer", "127.0.0.1:1", "--method", "ngram"],
        ["scorer_service.__main__"],
    ],
)
def test_runtime_as_first_process_ends_at_sigterm_during_imports(argv: list[str]) -> None:
    program = [sys.executable, "-c", INTERRUPTED.replace("SIGINT", "SIGTERM"), *argv]
    ended = subprocess.run(program, capture_output=True, text=True, timeout=60)
    # Not -15: without a handler the kernel ends any process but the first of a container.
    assert (ended.returncode, ended.stdout) == (143, "")


def test_runtime_with_start_up_error_prints_one_readable_line() -> None:
    with service("refuse") as process:
        out, err = process.communicate(timeout=20)
        assert (process.returncode, out) == (2, "stopped\n")
        assert err == "test: the port is taken\n"


def test_runtime_when_service_fails_ends_with_1() -> None:
    with service("fail") as process:
        out, _ = process.communicate(timeout=20)
        assert process.returncode == 1
        assert out.endswith("stopped\n")


@pytest.mark.skipif(not sys.platform.startswith("linux"), reason="reads /proc")
def test_runtime_when_orphaned_stops() -> None:
    parent = (
        "import subprocess, sys, time\n"
        f"child = subprocess.Popen([sys.executable, '-c', {PROGRAM!r}, 'orphan'],"
        " stdout=subprocess.PIPE, text=True)\n"
        "child.stdout.readline()\n"
        "print(child.pid, flush=True)\n"
        "time.sleep(60)\n"
    )
    process = subprocess.Popen([sys.executable, "-c", parent], stdout=subprocess.PIPE, text=True)
    with process:
        child = int(first_line(process))
        process.kill()
    wait_until(lambda: not alive(child), 10, "the orphan to end")


def test_runtime_after_imports_exempts_their_objects_from_collections() -> None:
    gc.unfreeze()
    with importing():
        assert not gc.isenabled()
    assert gc.isenabled()
    assert gc.get_freeze_count() > 1000
