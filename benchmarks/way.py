"""How long a round is under way between scorer and proposer, and what it costs of CPU time.

    python -m benchmarks.way                        # about two minutes
    python -m benchmarks.way --against ../before    # in turns with another checkout of Outrider
    python -m benchmarks.way --row-bytes 24576 --prompt-tokens 256 --rounds 16 --requests 3

A real scorer and a real proposer, each in its own process, that sleep instead of computing
(stamped.py), so nothing but the way is left; rows wait for their drafts. The way of a round is
from the moment that the engine's thread has a step's result to the moment that it has the block
that was drafted from it, without the time inside the drafting method. Blocks that come in the
middle of a step (of other requests) have to wait for its end, and are left out.
With `--ahead-ms` the drafting thread holds the interpreter lock between messages, and looks for one
so often. With `--row-bytes` the proposer is sent hidden states. A first draft then waits for its
prompt's; the way of those rounds is told apart. With `--requests` clients ask so often, one request
after another, the first ones of different lengths: prompts come while others decode.
CPU is each process's time per step, in brackets that of its event loop: the scorer's engine cannot
run Python meanwhile. One stack per checkout and kind of connection is up all the time, and they
take turns: only numbers of one run compare.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import random
import sys
import tempfile
import time
from collections.abc import Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Final

from benchmarks.processes import REPO, Child, ProcessError, python_path, stopping
from benchmarks.program import guarded
from benchmarks.stamped import TOKEN
from benchmarks.way_report import Turn, report, row
from outrider.rpc.channel import open_channel
from outrider.v1 import common_pb2, scorer_pb2
from outrider.v1.scorer_pb2_grpc import ScorerServiceStub

_TIMEOUT_S = 120.0
_ATTACH_S = 20.0
_K: Final = 4


@dataclass
class Stack:
    """A scorer and a proposer of one checkout."""

    name: str
    scorer: Child
    proposer: Child
    address: str
    files: tuple[Path, Path]
    stream_interval: int
    turns: list[Turn] = field(default_factory=list)

    def cpu(self) -> tuple[float, ...]:
        """Seconds so far; see `Turn`."""
        return tuple(
            child.cpu_seconds(main_thread=main)
            for child in (self.scorer, self.proposer)
            for main in (False, True)
        )


def main(argv: Sequence[str] | None = None) -> int:
    """Print the tables; 2 if a service failed."""
    p = argparse.ArgumentParser(
        prog="python -m benchmarks.way",
        description=__doc__,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    p.add_argument("--sessions", type=int, nargs="+", default=[1, 8, 32], help="at a time")
    p.add_argument("--forward-ms", type=float, default=5.0, help="the target's forward")
    p.add_argument("--draft-ms", type=float, default=0.0, help="a cycle of the proposer")
    p.add_argument("--ahead-ms", type=float, default=0.0, help="of Python between its messages")
    p.add_argument("--wire", choices=("tcp", "unix"), nargs="+", default=["tcp", "unix"])
    p.add_argument("--against", type=Path, nargs="*", default=[], help="other checkouts")
    p.add_argument("--stream-interval", type=int, nargs="+", default=[0], help="of clients")
    p.add_argument("--turns", type=int, default=12)
    p.add_argument("--rounds", type=int, default=60, help="of a request")
    p.add_argument("--requests", type=int, default=1, help="of a client")
    p.add_argument("--prompt-tokens", type=int, default=8)
    p.add_argument("--row-bytes", type=int, default=0, help="of a token's hidden states")
    p.add_argument("--out", type=Path, help="JSON")
    args = p.parse_args(argv)
    return guarded(lambda: _run(args))


def _run(args: argparse.Namespace) -> int:
    with tempfile.TemporaryDirectory() as folder, stopping([]) as children:
        stacks = [
            start(tree.resolve(), wire, interval, Path(folder), children, args)
            for tree in (REPO, *args.against)
            for wire in args.wire
            for interval in args.stream_interval
        ]
        asyncio.run(measure(stacks, args))
        for child in children:
            child.stop()  # they write their stamps
        rows = [
            row(stack.name, stack.files, stack.turns, n, args.prompt_tokens)
            for n in args.sessions
            for stack in stacks
        ]
    report(rows)
    if args.out:
        args.out.write_text(json.dumps([asdict(each) for each in rows], indent=1) + "\n")
    return 0


def start(
    tree: Path,
    wire: str,
    interval: int,
    folder: Path,
    children: list[Child],
    args: argparse.Namespace,
) -> Stack:
    """Return when both serve."""
    name = f"{tree.name}-{wire}" + (f"-{interval}" if interval else "")
    files = folder / f"{name}-scorer.json", folder / f"{name}-proposer.json"

    def run(service: str, stamps: Path, sleep_ms: float, *flags: object) -> Child:
        command = [sys.executable, "-P", "-m", "benchmarks.stamped", service]
        command += ["--stamps", str(stamps), "--sleep-ms", str(sleep_ms), "--exit-with-parent"]
        command += ["--row-bytes", str(args.row_bytes)]
        command += map(str, flags)
        child = Child(stamps.stem, command, folder, env=python_path(tree))
        children.append(child)
        return child

    path = folder / f"{name}.sock"
    scorer = run(
        "scorer_service",
        files[0],
        args.forward_ms,
        *("--num-speculative-tokens", _K, "--listen-unix", path, "--no-enable-prefix-caching"),
        *("--kv-cache-memory", 512),  # no row is preempted
    )
    address = scorer.ready(_TIMEOUT_S)["grpc"]
    dialled = f"unix:{path}" if wire == "unix" else address
    # No branches: it does not draft ahead.
    method = ("--method", "ngram", "--max-branches", 0)
    more = ("--ahead-ms", args.ahead_ms) if args.ahead_ms else ()  # others may not know it
    proposer = run(
        *("proposer_service", files[1], args.draft_ms, *more),
        *("--scorer", dialled, "--port", 0, *method),
    )
    proposer.ready(_TIMEOUT_S)
    return Stack(name, scorer, proposer, address, files, interval)


async def measure(stacks: Sequence[Stack], args: argparse.Namespace) -> None:
    """All stacks take turns with all numbers of sessions; the first turn does not count."""
    rng = random.Random(0)
    for stack in stacks:
        await _attached(stack)
    for turn in range(args.turns + 1):
        for sessions in args.sessions:
            for stack in rng.sample(stacks, len(stacks)):
                taken = await draft_between_steps(stack, sessions, args)
                if turn:
                    stack.turns.append(taken)


async def draft_between_steps(stack: Stack, sessions: int, args: argparse.Namespace) -> Turn:
    """So many clients, who begin together."""
    async with open_channel(stack.address) as channel:
        stub = ScorerServiceStub(channel)

        async def ask(rounds: int) -> int:
            request = scorer_pb2.ScorerServiceGenerateRequest(
                prompt_token_ids=(TOKEN,) * args.prompt_tokens,
                sampling=common_pb2.SamplingParams(temperature=0.0),
                stop=common_pb2.StopParams(max_tokens=1 + rounds * (_K + 1), ignore_eos=True),
                speculation=common_pb2.SpeculationParams(enabled=True),
                stream_interval=stack.stream_interval,
            )
            async for _ in stub.Generate(request, timeout=_TIMEOUT_S):
                pass
            return request.stop.max_tokens

        async def client(which: int) -> int:
            first = args.rounds if args.requests == 1 else -(-args.rounds * which // sessions)
            return await ask(first) + sum([await ask(args.rounds) for _ in range(1, args.requests)])

        cpu, began = stack.cpu(), time.perf_counter_ns()
        tokens = sum(await asyncio.gather(*(client(i + 1) for i in range(sessions))))
        ended, used = time.perf_counter_ns(), stack.cpu()
    spent = tuple(b - a for a, b in zip(cpu, used, strict=True))
    return Turn(sessions, began, ended, spent, tokens)


async def _attached(stack: Stack) -> None:
    async with open_channel(stack.address) as channel:
        stub, deadline = ScorerServiceStub(channel), time.monotonic() + _ATTACH_S
        while time.monotonic() < deadline:
            info = await stub.GetScorerInfo(scorer_pb2.GetScorerInfoRequest(), timeout=_TIMEOUT_S)
            if info.proposers:
                return
            await asyncio.sleep(0.1)
    raise ProcessError(f"{stack.name}: no proposer attached; {stack.proposer.log.read_text()}")


if __name__ == "__main__":
    sys.exit(main())
