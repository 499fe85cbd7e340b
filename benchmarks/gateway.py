"""Measure what a gateway's processes spend on a message, and what its workers carry.

    python -m benchmarks.gateway [--workers 1 2]

A message is what one round of one request becomes on its way to the client. A scorer whose device
is simulated takes `--step-ms` for each step. CPU time is the kernel's account of all the
gateway's processes while every stream is under way; the scorer's and this generator's are told
apart. Gateways with another number of workers are measured in turns.
"""

from __future__ import annotations

import argparse
import asyncio
import statistics
import sys
import time
from collections.abc import Sequence
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any, Final

import uvloop

from benchmarks.lib import report
from benchmarks.lib.processes import cpu_seconds, module_child, process_tree, stopping
from benchmarks.lib.program import arguments, guarded, say
from benchmarks.steady import Holding, grpc_streams, http_streams

_START_S: Final = 240.0
_SETTLE_S: Final = 2.0
_FACES: Final[dict[str, Holding]] = {"http": http_streams, "grpc": grpc_streams}


def parser() -> argparse.ArgumentParser:
    p = arguments("benchmarks.gateway", __doc__)
    p.add_argument("--streams", type=int, default=500)
    p.add_argument("--step-ms", type=float, default=100.0)
    p.add_argument("--seconds", type=float, default=8.0, help="of one measurement")
    p.add_argument("--rounds", type=int, default=3)
    p.add_argument("--workers", type=int, nargs="+", default=[1])
    p.add_argument("--draft-tokens", type=int, default=0, help="K of an ngram proposer; 0: none")
    p.add_argument("--faces", nargs="+", choices=tuple(_FACES), default=list(_FACES))
    p.add_argument("--out", type=Path, default=Path("benchmarks/results/gateway"))
    return p


def main(argv: Sequence[str] | None = None) -> int:
    """Return 0 if it measured, 2 if it could not."""
    return guarded(_run, parser(), argv)


def _run(args: argparse.Namespace) -> int:
    cells: dict[tuple[str, int], list[dict[str, float]]] = {}
    for number in range(args.rounds):
        for face in args.faces:
            for workers in args.workers:
                cell = _measure(args, face, workers)
                say(f"round {number}, {face}, {workers} workers: {cell}")
                cells.setdefault((face, workers), []).append(cell)
    rows: list[dict[str, Any]] = [
        {"face": face, "workers": n, "runs": runs}
        | {key: statistics.median(run[key] for run in runs) for key in runs[0]}
        for (face, n), runs in cells.items()
    ]
    columns = ("gateway_us", "messages_per_s", "gateway_cores", "scorer_us", "client_us")
    body = [
        [row["face"], str(row["workers"]), *(report.number(row[name], 1) for name in columns)]
        for row in rows
    ]
    head = ["", "workers", "gateway µs/message", "messages/s", "gateway cores"]
    head += ["scorer µs", "client µs"]
    table = report.table(head, body)
    report.publish("Gateway", "benchmarks.gateway", table, rows, args.out)
    return 0


def _measure(args: argparse.Namespace, face: str, workers: int) -> dict[str, float]:
    """Return the numbers of one gateway. Raises `ProcessError`."""
    with TemporaryDirectory() as logs, stopping([]) as children:
        command = ["benchmarks.lib.streaming_scorer", "--step-ms", args.step_ms]
        command += ["--max-num-seqs", args.streams, "--max-num-batched-tokens", 16 * args.streams]
        command += ["--num-speculative-tokens", args.draft_tokens]
        scorer = module_child("scorer", command, Path(logs), children)
        address = scorer.ready(_START_S)["grpc"]
        if args.draft_tokens:
            command = ["proposer_service", "--scorer", address, "--method", "ngram"]
            command += ["--max-sessions", args.streams, "--max-branches", 0]
            module_child("proposer", command, Path(logs), children).ready(_START_S)
        command = ["gateway", "--scorer", address, "--workers", workers]
        command += ["--max-in-flight", 2 * args.streams]
        command += ["--resume-timeout", 60]  # where the machine does other things, too
        gateway = module_child("gateway", command, Path(logs), children)
        ready = gateway.ready(_START_S)
        with asyncio.Runner(loop_factory=uvloop.new_event_loop) as runner:
            return runner.run(_steady(args, _FACES[face], ready[face], (gateway.pid, scorer.pid)))


async def _steady(
    args: argparse.Namespace, hold: Holding, address: str, pids: tuple[int, int]
) -> dict[str, float]:
    trees = [process_tree(pid) for pid in pids]

    def look(count: Any) -> list[float]:
        used = [cpu_seconds(tree) for tree in trees]
        return [time.perf_counter(), count(), *used, time.process_time()]

    async with hold(address, args.streams) as count:
        await asyncio.sleep(_SETTLE_S)
        before = look(count)
        await asyncio.sleep(args.seconds)
        after = look(count)
    seconds, messages, gateway, scorer, client = (b - a for a, b in zip(before, after, strict=True))
    return {
        "gateway_us": gateway / messages * 1e6,
        "messages_per_s": messages / seconds,
        "gateway_cores": gateway / seconds,
        "scorer_us": scorer / messages * 1e6,
        "client_us": client / messages * 1e6,
    }


if __name__ == "__main__":
    sys.exit(main())
