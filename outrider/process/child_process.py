"""A service as a child process: its ready line, its words, its end."""

from __future__ import annotations

import asyncio
import contextlib
import io
import json
import os
import shlex
import signal
from collections import deque
from collections.abc import AsyncIterator, Callable, Iterable
from dataclasses import dataclass
from typing import Any, NamedTuple

from outrider.errors import ConfigError, InternalError, UnavailableError

Relay = Callable[[str, str], None]
"""Takes a service's name and one line it wrote."""

_MAX_LINE_BYTES = 16_384


@dataclass(frozen=True, slots=True)
class ServiceSpec:
    """A process to run, which prints a line `ready <json object>` on stdout once it serves."""

    name: str
    argv: tuple[str, ...]
    env: tuple[tuple[str, str], ...] = ()
    """Variables that it gets beside those of its parent."""
    optional: bool = False
    """The others serve on without it, and it is started again when it ends."""

    def __str__(self) -> str:
        """Return the command as a shell would take it."""
        return shlex.join((*(f"{name}={value}" for name, value in self.env), *self.argv))


class _Pipe(NamedTuple):
    sink: io.FileIO
    reader: asyncio.StreamReader
    transport: asyncio.ReadTransport


class ServiceProcess:
    """A running child. `start` first; after that `wait`, `terminate` and `kill` at any time."""

    def __init__(self, spec: ServiceSpec, relay: Relay) -> None:
        self.name, self._spec = spec.name, spec
        self._relay = relay
        self._process: asyncio.subprocess.Process | None = None
        self._pipes: list[_Pipe] = []
        self._pumps: list[asyncio.Task[None]] = []
        self._ready: asyncio.Future[dict[str, str]] = asyncio.get_running_loop().create_future()
        self._last_lines: deque[str] = deque(maxlen=1)

    @property
    def started(self) -> bool:
        """There is a process, running or ended."""
        return self._process is not None

    @property
    def pid(self) -> int:
        assert self._process is not None, "started"
        return self._process.pid

    async def start(self, deadline_s: float) -> dict[str, str]:
        """Run the child and return what its ready line says.

        Raises `ConfigError` with the child's own last words if it ends instead, and
        `UnavailableError` if it is not ready in time (the child still runs then).
        """
        stdout, stderr = await self._pipe(), await self._pipe()
        with stdout.sink, stderr.sink:
            self._process = await asyncio.create_subprocess_exec(
                *self._spec.argv,
                stdin=asyncio.subprocess.DEVNULL,
                stdout=stdout.sink,
                stderr=stderr.sink,
                # Progress bars redraw a line; a relay has none to redraw.
                env={
                    **os.environ,
                    "PYTHONUNBUFFERED": "1",
                    "TQDM_DISABLE": "1",
                    **dict(self._spec.env),
                },
                process_group=0,  # Ctrl-C reaches the parent alone; it decides who stops and when
            )
        self._pumps = [
            asyncio.create_task(self._pump_stdout(stdout.reader)),
            asyncio.create_task(self._pump_stderr(stderr.reader)),
        ]
        ended = asyncio.create_task(self.wait())
        outcomes: list[asyncio.Future[Any]] = [ended, self._ready]
        try:
            await asyncio.wait(outcomes, timeout=deadline_s, return_when=asyncio.FIRST_COMPLETED)
            if self._ready.done():
                return self._ready.result()
            if ended.done():
                cause = self._last_lines[-1] if self._last_lines else "it said nothing"
                cause = cause.removeprefix(f"{self.name}: ")
                code = ended.result()
                raise ConfigError(f"the {self.name} could not start (exit code {code}): {cause}")
            raise UnavailableError(f"the {self.name} was not ready within {deadline_s:g} s")
        finally:
            ended.cancel()

    async def wait(self) -> int:
        """Return the exit code once the child has ended and all its output was relayed."""
        assert self._process is not None, "started"
        code = await self._process.wait()
        # A grandchild may hold the pipes open: do not wait for it.
        await asyncio.wait(self._pumps, timeout=0.2)
        for pipe in self._pipes:
            pipe.transport.close()
        return code

    async def _pipe(self) -> _Pipe:
        """Make a pipe of our own: asyncio's `wait` lasts until all ends of its pipes are closed."""
        source, sink = os.pipe()
        reader = asyncio.StreamReader()
        transport, _ = await asyncio.get_running_loop().connect_read_pipe(
            lambda: asyncio.StreamReaderProtocol(reader), os.fdopen(source, "rb", buffering=0)
        )
        self._pipes.append(pipe := _Pipe(os.fdopen(sink, "wb", buffering=0), reader, transport))
        return pipe

    def terminate(self) -> None:
        """Ask the child to stop."""
        self._signal(signal.SIGTERM)

    def kill(self) -> None:
        """End the child at once."""
        self._signal(signal.SIGKILL)

    def _signal(self, number: signal.Signals) -> None:
        if self._process is not None and self._process.returncode is None:
            with contextlib.suppress(ProcessLookupError):
                self._process.send_signal(number)

    async def _pump_stdout(self, stream: asyncio.StreamReader) -> None:
        async for line in _lines(stream):
            word, _, rest = line.partition(" ")
            if word == "ready" and not self._ready.done():
                try:
                    self._ready.set_result(_parse_ready(rest))
                except InternalError as error:
                    self._ready.set_exception(error)
            else:
                self._relay(self.name, line)

    async def _pump_stderr(self, stream: asyncio.StreamReader) -> None:
        async for line in _lines(stream):
            self._last_lines.append(line)
            self._relay(self.name, line)


async def stop_all(processes: Iterable[ServiceProcess], grace_s: float, kill_s: float) -> None:
    """SIGTERM to all, SIGKILL by id to those that have not ended within the grace.

    Cancelling it, as a second Ctrl-C does, ends the grace. `kill_s` bounds the wait for the killed.
    """
    started = [each for each in processes if each.started]
    ends = [asyncio.create_task(each.wait()) for each in started]
    if not ends:
        return
    try:
        for each in started:
            each.terminate()
        await asyncio.wait(ends, timeout=grace_s)
    finally:
        for each in started:
            each.kill()
    await asyncio.wait(ends, timeout=kill_s)


def describe_exit(code: int) -> str:
    """Put an exit status into words."""
    if code == -signal.SIGKILL:
        return "signal 9 (out of memory, if nobody killed it: see dmesg)"
    return f"signal {-code}" if code < 0 else f"exit code {code}"


def _parse_ready(text: str) -> dict[str, str]:
    try:
        value = json.loads(text)
    except ValueError:
        value = None
    if not isinstance(value, dict):
        raise InternalError(f"a service printed `ready {text}`, not `ready <json object>`")
    return {str(key): str(item) for key, item in value.items()}


async def _lines(stream: asyncio.StreamReader) -> AsyncIterator[str]:
    """Non-empty lines; one longer than the bound comes in pieces instead of growing a buffer."""
    buffer = b""
    while chunk := await stream.read(4096):
        *complete, buffer = (buffer + chunk).split(b"\n")
        if len(buffer) > _MAX_LINE_BYTES:
            complete, buffer = [*complete, buffer], b""
        for raw in complete:
            if line := raw.decode(errors="replace").rstrip():
                yield line
    if line := buffer.decode(errors="replace").rstrip():
        yield line
