"""CPU time of a gateway and of a scorer around its engine, per token of a stream.

Two stacks of a gateway and a scorer that only streams, one whose gateway calls Generate for each
request and one that shares a stream of steps, take turns under the same load: --streams requests,
each of which gets a token every --step-ms. Process CPU times are read from the kernel.
"""

from __future__ import annotations

import asyncio
import json
import sys
import tempfile
from dataclasses import dataclass
from pathlib import Path
from statistics import median
from typing import Any, Final

from benchmarks.lib.processes import Child, python_path, stopping
from benchmarks.lib.program import arguments, guarded, say
from outrider.rpc.channel import open_channel
from outrider.v1 import common_pb2, generation_pb2

_WAYS: Final = {"generate": ("--no-steps",), "steps": ()}
_START_S: Final = 120.0
_SETTLE_S: Final = 2.0
_METHOD: Final = "/outrider.v1.GenerationService/Generate"


@dataclass(frozen=True, slots=True)
class Stack:
    """A gateway and its scorer."""

    gateway: Child
    scorer: Child
    grpc: str
    http: str


@dataclass(slots=True)
class Load:
    """Streams that run until they are cancelled."""

    messages: int = 0

    async def over_grpc(self, address: str) -> None:
        """Read one stream after another, without parsing messages."""
        request = generation_pb2.GenerateRequest(
            tokens=generation_pb2.TokenPrompt(token_ids=[5, 6, 7]),
            stop=common_pb2.StopParams(max_tokens=8000, ignore_eos=True),
        ).SerializeToString()
        async with open_channel(address) as channel:
            call: Any = channel.unary_stream(_METHOD)
            async for _ in call(request):
                self.messages += 1

    async def over_http(self, url: str) -> None:
        """Read one stream of server-sent events."""
        host, _, port = url.removeprefix("http://").rpartition(":")
        reader, writer = await asyncio.open_connection(host, int(port))
        body = json.dumps(
            {"model": "default", "prompt": [5, 6, 7], "max_tokens": 8000, "stream": True}
            | {"ignore_eos": True}
        )
        head = "POST /v1/completions HTTP/1.1\r\nHost: x\r\nContent-Type: application/json\r\n"
        writer.write(f"{head}Content-Length: {len(body)}\r\n\r\n{body}".encode())
        try:
            while data := await reader.read(2**16):
                self.messages += data.count(b"data: {")
        finally:
            writer.close()


async def _measure(stack: Stack, protocol: str, streams: int, seconds: float) -> tuple[float, ...]:
    """Return microseconds per message of the gateway and of the scorer, and messages a second."""
    load = Load()
    begin = load.over_grpc if protocol == "grpc" else load.over_http
    address = stack.grpc if protocol == "grpc" else stack.http
    tasks = [asyncio.create_task(begin(address)) for _ in range(streams)]
    while load.messages < 2 * streams:  # noqa: ASYNC110
        await asyncio.sleep(0.1)
    await asyncio.sleep(_SETTLE_S)
    before = load.messages, stack.gateway.cpu_seconds(), stack.scorer.cpu_seconds()
    await asyncio.sleep(seconds)
    after = load.messages, stack.gateway.cpu_seconds(), stack.scorer.cpu_seconds()
    for task in tasks:
        task.cancel()
    await asyncio.gather(*tasks, return_exceptions=True)
    await asyncio.sleep(_SETTLE_S)
    messages, gateway_s, scorer_s = (b - a for a, b in zip(before, after, strict=True))
    return gateway_s / messages * 1e6, scorer_s / messages * 1e6, messages / seconds


def _start(children: list[Child], way: str, step_ms: float, logs: Path) -> Stack:
    python = (sys.executable, "-m")
    scorer = Child(
        f"scorer-{way}",
        (*python, "benchmarks.lib.streaming_scorer", f"--step-ms={step_ms}", *_WAYS[way]),
        logs,
        env=python_path(),
    )
    children.append(scorer)
    target = scorer.ready(_START_S)["grpc"]
    flags = (f"--scorer={target}", "--http-port=0", "--grpc-port=0", "--max-in-flight=4096")
    gateway = Child(f"gateway-{way}", (*python, "gateway", *flags), logs, env=python_path())
    children.append(gateway)
    addresses = gateway.ready(_START_S)
    return Stack(gateway, scorer, addresses["grpc"], addresses["http"])


def main(argv: list[str] | None = None) -> int:
    """Measure, print a table and return the exit code."""
    parser = arguments("benchmarks.steps", __doc__)
    parser.add_argument("--streams", type=int, default=256)
    parser.add_argument("--step-ms", type=float, default=400.0, help="slow, so that all keep up")
    parser.add_argument("--seconds", type=float, default=8.0, help="of a measurement")
    parser.add_argument("--rounds", type=int, default=3)
    args = parser.parse_args(argv)

    def measure() -> int:
        with tempfile.TemporaryDirectory() as logs, stopping([]) as children:
            stacks = {way: _start(children, way, args.step_ms, Path(logs)) for way in _WAYS}
            print("| clients | way | gateway, us/message | scorer, us/row and step | messages/s |")
            print("|---|---|---|---|---|")
            for protocol in ("grpc", "http"):
                found: dict[str, list[tuple[float, ...]]] = {way: [] for way in _WAYS}
                for _ in range(args.rounds):
                    for way, stack in stacks.items():
                        work = _measure(stack, protocol, args.streams, args.seconds)
                        found[way].append(asyncio.run(work))
                        say(f"{protocol} {way}: {found[way][-1]}")
                for way, runs in found.items():
                    values = [median(column) for column in zip(*runs, strict=True)]
                    print(f"| {protocol} | {way} |", " | ".join(f"{v:.0f}" for v in values), "|")
        return 0

    return guarded(measure)


if __name__ == "__main__":
    sys.exit(main())
