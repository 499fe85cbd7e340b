"""The supervisor over small scripts in place of services: start, failure, restart, stop."""

from __future__ import annotations

import asyncio
import contextlib
import errno
import gc
import io
import os
import signal
import socket
import sys
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import grpc
import pytest

from gateway.config import GatewayConfig
from gateway.workers.supervisor import Workers
from outrider.cli import stack as stack_module
from outrider.cli.ports import check_port
from outrider.cli.process import relay, run_until_signal
from outrider.cli.stack import Stack
from outrider.errors import ConfigError, InternalError, UnavailableError
from outrider.process.child_process import ServiceProcess, ServiceSpec
from outrider.v1 import proposer_pb2, proposer_pb2_grpc
from tests.support.ports import reserved_port
from tests.support.waiting import until

READY = """
import json, sys, time
print("loading", file=sys.stderr)
print("ready " + json.dumps({"http": "http://h:1", "grpc": "h:2", "metrics": "http://h:3"}))
"""
SERVE = READY + "time.sleep(600)\n"  # longer than a test may take
STUBBORN = "import signal\nsignal.signal(signal.SIGTERM, signal.SIG_IGN)\n" + SERVE
FAIL = "import sys\nsys.exit('scorer: there is no model folder /nowhere')\n"


BOUND_S = 30.0  # of what takes a moment on an idle machine


class Lines(list[tuple[str, str]]):
    """What a relay was given."""

    def __call__(self, name: str, line: str) -> None:
        self.append((name, line))


class FullDisk(io.StringIO):
    """A stream to a file for whose text there is no room."""

    def write(self, _: str, /) -> int:
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))


def spec(code: str, name: str = "scorer") -> ServiceSpec:
    return ServiceSpec(name, (sys.executable, "-c", code), optional=name == "proposer")


class Services(dict[str, str]):
    """Service name -> script; a test changes the scripts before it starts a stack."""

    def stack(self, relay: Lines) -> Stack:
        return Stack([spec(script, name) for name, script in self.items()], relay)


def alive(pid: int) -> bool:
    try:
        os.kill(pid, 0)
    except ProcessLookupError:
        return False
    return True


@pytest.mark.parametrize("of_gateway", [False, True])
async def test_service_whose_words_cannot_be_written_is_not_held_up(
    of_gateway: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Where a disk is full or a reader has ended, nobody would empty the pipe of its stderr."""
    workers = Workers(GatewayConfig(scorers=("127.0.0.1:1",)), ())
    workers._started = True
    many = "import sys\nfor _ in range(100_000): print('a line', file=sys.stderr)\n"
    process = ServiceProcess(spec(many), workers._relay if of_gateway else relay)
    monkeypatch.setattr(sys, "stderr", FullDisk())
    with pytest.raises(ConfigError, match="exit code 0"):
        await process.start(BOUND_S)


async def test_service_when_ready_relays_its_lines() -> None:
    lines = Lines()
    process = ServiceProcess(spec(SERVE), lines)
    try:
        ready = await process.start(BOUND_S)
        assert ready == {"http": "http://h:1", "grpc": "h:2", "metrics": "http://h:3"}
        assert ("scorer", "loading") in lines
    finally:
        process.kill()
        assert await process.wait() == -signal.SIGKILL


async def test_service_that_ends_at_start_says_why() -> None:
    process = ServiceProcess(spec(FAIL), Lines())
    with pytest.raises(ConfigError, match=r"exit code 1\): there is no model folder"):
        await process.start(BOUND_S)


async def test_service_that_is_never_ready_times_out() -> None:
    process = ServiceProcess(spec("import time\ntime.sleep(60)\n"), Lines())
    try:
        with pytest.raises(UnavailableError, match="not ready within"):
            await process.start(0.3)
    finally:
        process.kill()
        await process.wait()


async def test_end_of_a_service_is_seen_while_its_own_child_holds_its_pipes(
    recwarn: pytest.WarningsRecorder,
) -> None:
    """As vLLM's processes do after a scorer's end."""
    child = "import subprocess\nother = subprocess.Popen(['sleep', '60'])\n"
    ready = child + READY.replace('"h:2"', "str(other.pid)") + "sys.exit(3)\n"
    process = ServiceProcess(spec(ready), Lines())
    other = int((await process.start(10.0))["grpc"])
    try:
        assert await asyncio.wait_for(process.wait(), 5.0) == 3
        assert alive(other)
    finally:
        os.kill(other, signal.SIGKILL)
    del process
    gc.collect()
    assert not list(recwarn), "all transports were closed"


async def test_service_with_broken_ready_line_fails_at_once() -> None:
    process = ServiceProcess(spec("print('ready soon')\nimport time\ntime.sleep(60)\n"), Lines())
    try:
        with pytest.raises(InternalError, match="ready soon"):
            await process.start(BOUND_S)
    finally:
        process.kill()
        await process.wait()


async def test_service_with_endless_line_relays_pieces() -> None:
    lines = Lines()
    code = "import sys\nsys.stderr.write('x' * 100_000)\nsys.stderr.flush()\n" + READY
    process = ServiceProcess(spec(code), lines)
    await process.start(BOUND_S)
    await process.wait()
    assert sum(line.count("x") for _, line in lines) == 100_000
    assert max(len(line) for _, line in lines) < 32_768


@pytest.fixture
def services() -> Services:
    return Services(dict.fromkeys(("scorer", "proposer", "gateway"), SERVE))


async def test_stack_when_started_serves_and_stops(services: Services) -> None:
    async with services.stack(Lines()) as stack:
        pids = stack.pids
        assert set(pids) == set(services)
        assert all(map(alive, pids.values()))
        assert stack.ready["gateway"] == {
            "http": "http://h:1",
            "grpc": "h:2",
            "metrics": "http://h:3",
        }
    assert not any(map(alive, pids.values()))


async def test_stack_gives_a_service_its_own_variables() -> None:
    code = "import os, sys\nprint(os.environ['DEVICE'], file=sys.stderr)\n" + SERVE
    varied = ServiceSpec("scorer", (sys.executable, "-c", code), (("DEVICE", "1"),))
    lines = Lines()
    async with Stack([varied], lines):
        await until(lambda: ("scorer", "1") in lines, timeout_s=BOUND_S)


class Alone(proposer_pb2_grpc.ProposerServiceServicer):
    """A proposer whose scorer does not take it."""

    def __init__(self, *, refused: bool) -> None:
        self._refused = refused

    async def GetProposerInfo(  # noqa: N802
        self, _request: object, _context: object
    ) -> proposer_pb2.GetProposerInfoResponse:
        link = proposer_pb2.ScorerLink(
            target="s:1", last_error="another vocabulary", refused=self._refused
        )
        return proposer_pb2.GetProposerInfoResponse(scorers=[link])


@asynccontextmanager
async def alone(*, refused: bool) -> AsyncIterator[str]:
    """The script of a proposer service that is not attached."""
    server = grpc.aio.server()
    proposer_pb2_grpc.add_ProposerServiceServicer_to_server(Alone(refused=refused), server)
    port = server.add_insecure_port("127.0.0.1:0")
    await server.start()
    try:
        yield SERVE.replace("h:2", f"127.0.0.1:{port}")
    finally:
        await server.stop(None)


async def test_stack_with_late_proposer_says_why(
    services: Services, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(stack_module, "_ATTACH_DEADLINE_S", 0.0)
    lines = Lines()
    async with alone(refused=False) as services["proposer"], services.stack(lines) as stack:
        await stack.wait_for_proposer()
    said = "no speculation, the proposer is not attached: another vocabulary"
    assert ("outrider", said) in lines


async def test_stack_with_refused_proposer_ends(services: Services) -> None:
    async with alone(refused=True) as services["proposer"], services.stack(Lines()) as stack:
        pids = stack.pids
        with pytest.raises(ConfigError, match=r"another vocabulary\. Name another --draft-model"):
            await stack.wait_for_proposer()
    assert len(pids) == 3
    assert not any(map(alive, pids.values()))


@pytest.mark.parametrize("name", ["scorer", "proposer", "gateway"])
async def test_stack_with_failing_start_stops_the_others(services: Services, name: str) -> None:
    services[name] = FAIL
    stack = services.stack(Lines())
    with pytest.raises(ConfigError, match=f"the {name} could not start"):
        async with stack:
            raise AssertionError("the stack must not start")
    assert stack.pids == {}


async def test_stop_of_children_that_ignore_sigterm_kills_in_time(
    services: Services, monkeypatch: pytest.MonkeyPatch
) -> None:
    services.update(dict.fromkeys(services, STUBBORN))
    bounds: list[float] = []
    wait = asyncio.wait

    async def noting(ends: Any, *, timeout: float) -> Any:  # noqa: ASYNC109
        if len(ends) == len(services):  # not one service's pipes
            bounds.append(timeout)
        return await wait(ends, timeout=timeout)

    async with services.stack(Lines()) as stack:
        pids = stack.pids
        with monkeypatch.context() as patched:
            patched.setattr(asyncio, "wait", noting)
            await stack.stop()
        assert 0.0 < sum(bounds) <= 2.0
    await until(lambda: not any(map(alive, pids.values())), BOUND_S)


async def test_stop_when_cancelled_kills_at_once(
    services: Services, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(stack_module, "STOP_GRACE_S", 10 * BOUND_S)
    services.update(dict.fromkeys(services, STUBBORN))
    async with services.stack(Lines()) as stack:
        pids = stack.pids
        stopping = asyncio.create_task(stack.stop())
        await asyncio.sleep(0.1)
        assert all(map(alive, pids.values()))
        stopping.cancel()
        await asyncio.gather(stopping, return_exceptions=True)
        await until(lambda: not any(map(alive, pids.values())), BOUND_S)


async def test_supervisor_with_dead_proposer_restarts_it(services: Services) -> None:
    lines = Lines()
    async with services.stack(lines) as stack:
        watch = asyncio.create_task(stack.supervise())
        first = stack.pids["proposer"]
        os.kill(first, signal.SIGKILL)
        await until(lambda: ("proposer", "is back") in lines, timeout_s=BOUND_S)
        assert stack.pids["proposer"] != first
        assert any("ended with signal 9" in line for _, line in lines)
        watch.cancel()
        await asyncio.gather(watch, return_exceptions=True)


async def test_supervisor_with_proposer_beyond_restart_goes_on(
    services: Services, tmp_path: Path
) -> None:
    lines = Lines()
    once = f"import pathlib\npathlib.Path({str(tmp_path / 'started')!r}).touch(exist_ok=False)\n"
    services["proposer"] = once + SERVE  # it fails from the second start on
    async with services.stack(lines) as stack:
        watch = asyncio.create_task(stack.supervise())
        os.kill(stack.pids["proposer"], signal.SIGKILL)
        await until(
            lambda: sum("restarting it in" in line for _, line in lines) >= 2, timeout_s=BOUND_S
        )
        assert not watch.done()
        watch.cancel()
        await asyncio.gather(watch, return_exceptions=True)


@pytest.mark.parametrize("name", ["scorer", "gateway"])
async def test_supervisor_with_ended_essential_service_reports_it(
    services: Services, name: str
) -> None:
    async with services.stack(Lines()) as stack:
        watch = asyncio.create_task(stack.supervise())
        os.kill(stack.pids[name], signal.SIGKILL)
        with pytest.raises(InternalError, match=f"the {name} ended with signal 9"):
            await asyncio.wait_for(watch, BOUND_S)


def test_port_when_taken_is_refused_by_flag() -> None:
    with socket.create_server(("127.0.0.1", 0)) as server:
        taken = server.getsockname()[1]
        with pytest.raises(ConfigError, match=rf"port {taken} .* --port, or 0"):
            check_port("127.0.0.1", taken, "--port")
    check_port("127.0.0.1", reserved_port(), "--port")
    check_port("127.0.0.1", 0, "--port")


def test_command_at_second_signal_ends_and_says_so(capfd: pytest.CaptureFixture[str]) -> None:
    async def command() -> int:
        for _ in range(2):
            signal.raise_signal(signal.SIGTERM)
            with contextlib.suppress(asyncio.CancelledError):
                await asyncio.sleep(BOUND_S)
        raise asyncio.CancelledError

    assert run_until_signal(command()) == 143
    assert "a second SIGTERM ends everything at once" in capfd.readouterr().err
