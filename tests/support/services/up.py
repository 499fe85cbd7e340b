"""`outrider serve` as a child of the tests, and its clients. Every wait is bounded."""

from __future__ import annotations

import asyncio
import contextlib
import json
import os
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path

from outrider.cli.client import stream
from outrider.rpc.channel import open_channel
from outrider.v1 import common_pb2, scorer_pb2, scorer_pb2_grpc
from tests.support.services.options import GenerateOptions
from tests.support.waiting import wait_until

START_DEADLINE_S = 180.0  # a cold machine that also runs something else
EVERY_ROUND = ("--speculation-policy", "fixed")  # whether drafting pays on this machine or not
OUTRIDER = (sys.executable, "-m", "outrider.cli")


@dataclass
class Up:
    """A running stack."""

    process: subprocess.Popen[str]
    http: str  # http://host:port
    grpc: str  # host:port
    log: list[str] = field(default_factory=list)

    @property
    def services(self) -> dict[str, int]:
        """Package of each running service -> its process id."""
        found = {}
        for pid in children(self.process.pid):
            argv = command_line(pid)
            if "-m" in argv:
                found[argv[argv.index("-m") + 1]] = pid
        return found

    @property
    def scorer(self) -> str:
        """The scorer's gRPC address: its Unix socket, since its port is any free one."""
        argv = command_line(self.services["scorer_service"])
        return f"unix:{argv[argv.index('--listen-unix') + 1]}"

    def stop(self) -> float:
        """SIGINT to the parent; returns the seconds until it and its children have ended."""
        pids = list(self.services.values())
        started = time.monotonic()
        self.process.send_signal(signal.SIGINT)
        self.process.wait(20)
        wait_until(lambda: not any(map(alive, pids)), 20, "the services to end")
        return time.monotonic() - started


@contextlib.contextmanager
def running(*flags: object, beside: bool = True) -> Iterator[Up]:
    """`outrider serve` on free ports, from its ready line on; ended with all its children.

    The embedded model is served, unless `flags` name another, and a proposer drafts `beside` the
    scorer.
    """
    served = ("--port", 0, "--grpc-port", 0, "--served-model-name", "default")
    model = () if "--model" in flags else ("embedded",)
    draft = ("--draft-device", "cpu") if beside else ()
    process = subprocess.Popen(
        [*OUTRIDER, "serve", *map(str, (*model, *served, *draft, *flags))],
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
    )
    assert process.stdout is not None
    assert process.stderr is not None
    log: list[str] = []
    reader = threading.Thread(target=log.extend, args=(process.stderr,), daemon=True)
    reader.start()
    watchdog = threading.Timer(START_DEADLINE_S, process.kill)
    watchdog.start()
    try:
        ready = process.stdout.readline().split()
        watchdog.cancel()
        assert ready[:1] == ["ready"], f"not ready: {ready}\n{''.join(log)}"
        yield Up(process, ready[1], ready[2].removeprefix("grpc://"), log)
    finally:
        watchdog.cancel()
        pids = children(process.pid) if process.poll() is None else []
        if process.poll() is None:
            process.terminate()
            with contextlib.suppress(subprocess.TimeoutExpired):
                process.wait(10)
        for pid in (*pids, *([process.pid] if process.poll() is None else [])):
            with contextlib.suppress(ProcessLookupError):
                os.kill(pid, signal.SIGKILL)
        process.wait(10)
        reader.join(10)
        process.stdout.close()
        process.stderr.close()


@contextlib.contextmanager
def service(*argv: object) -> Iterator[subprocess.Popen[str]]:
    """`python -m ARGV...`, killed at the end."""
    process = subprocess.Popen(
        [sys.executable, "-m", *map(str, argv)],
        stdout=subprocess.PIPE,
        stderr=subprocess.DEVNULL,
        text=True,
    )
    try:
        yield process
    finally:
        process.kill()
        process.communicate()


@contextlib.contextmanager
def drafting(scorer: str, method: str, *flags: object) -> Iterator[None]:
    """A further proposer of a stack, from when its scorer knows it."""
    name = f"proposer-{method}"
    flags = ("--scorer", scorer, "--method", method, "--proposer-id", name, *flags)
    with service("proposer_service", *flags):
        asyncio.run(until_attached(scorer, 60, name))
        yield


def addresses(process: subprocess.Popen[str]) -> dict[str, str]:
    """Where a service listens; waits until it is ready."""
    assert process.stdout is not None
    line = process.stdout.readline()
    assert line.startswith("ready "), line
    fields: dict[str, str] = json.loads(line.removeprefix("ready "))
    return fields


def run_outrider(*args: object, timeout_s: float = 60.0) -> subprocess.CompletedProcess[str]:
    """Runs one command to its end."""
    return subprocess.run(
        [*OUTRIDER, *map(str, args)],
        capture_output=True,
        text=True,
        timeout=timeout_s,
        check=False,
        stdin=subprocess.DEVNULL,
    )


@dataclass(frozen=True, slots=True)
class Completion:
    """What came back."""

    text: str
    token_ids: tuple[int, ...]
    kinds: tuple[int, ...]
    finish_reason: int
    usage: common_pb2.Usage
    aux: common_pb2.AuxInfo


async def complete(
    address: str,
    options: GenerateOptions,
    *,
    timeout_s: float = 60.0,
    on_tokens: Callable[[int], None] = lambda _: None,
) -> Completion:
    """One completion over gRPC; `on_tokens` hears the number of tokens so far."""
    text, ids, kinds = "", [], []
    async with open_channel(address) as channel:
        async for response in stream(channel, options.to_proto(), timeout_s=timeout_s):
            text += response.text
            ids += [token.id for token in response.tokens]
            kinds += [token.kind for token in response.tokens]
            on_tokens(len(ids))
    return Completion(
        text, tuple(ids), tuple(kinds), response.finish_reason, response.usage, response.aux_info
    )


async def complete_all(address: str, *options: GenerateOptions) -> list[Completion]:
    """Completions at once, which share the scorer's steps."""
    return await asyncio.gather(*(complete(address, one, timeout_s=200) for one in options))


async def scorer_info(address: str) -> scorer_pb2.GetScorerInfoResponse:
    """What a scorer says about itself."""
    async with open_channel(address) as channel:
        stub = scorer_pb2_grpc.ScorerServiceStub(channel)
        return await stub.GetScorerInfo(scorer_pb2.GetScorerInfoRequest(), timeout=10)


async def until_idle(address: str, timeout_s: float = 20.0) -> scorer_pb2.GetScorerInfoResponse:
    """Waits until a scorer has nothing to do."""
    async with asyncio.timeout(timeout_s):
        while True:
            info = await scorer_info(address)
            if info.running_requests + info.waiting_requests == 0:
                return info
            await asyncio.sleep(0.05)


async def until_attached(address: str, timeout_s: float, proposer_id: str = "") -> None:
    """Waits until a scorer has a proposer, or that one."""
    async with asyncio.timeout(timeout_s):
        while True:
            attached = (await scorer_info(address)).proposers
            if any(proposer_id in ("", proposer.proposer_id) for proposer in attached):
                return
            await asyncio.sleep(0.1)


def children(pid: int) -> list[int]:
    """Process ids of a process's children, however many threads started them."""
    found = []
    with contextlib.suppress(FileNotFoundError):
        for task in Path(f"/proc/{pid}/task").iterdir():
            with contextlib.suppress(FileNotFoundError):
                found += [int(child) for child in (task / "children").read_text().split()]
    return found


def command_line(pid: int) -> Sequence[str]:
    """A process's argv; empty once it has ended."""
    with contextlib.suppress(FileNotFoundError):
        return Path(f"/proc/{pid}/cmdline").read_text().split("\0")
    return ()


def alive(pid: int) -> bool:
    """Whether a process still runs."""
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] != "Z"
    except FileNotFoundError:
        return False
