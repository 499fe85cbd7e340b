"""Records what autoscalers read of a scorer under load, for the tests to play again.

    python -m tests.support.kubernetes.record_load tests/k8s/recorded_load.csv

The embedded pair with room for four requests serves three minutes of arrivals: a trickle, a burst,
long answers, and nothing more. Each second has a row: requests that came, that run and that wait at
the scorer, that are open at the gateway, and the part of the KV cache in use.
"""

from __future__ import annotations

import asyncio
import csv
import random
import re
import sys
from collections import Counter
from pathlib import Path

import httpx

from outrider.rpc.channel import open_channel
from outrider.v1 import scorer_pb2, scorer_pb2_grpc
from tests.support.services import up

ROOM = 4
COLUMNS = ("second", "came", "running", "waiting", "open", "kv")
PHASES = ((30, 0.2, 16), (20, 4.0, 64), (40, 0.2, 192), (90, 0.0, 0))
"""Seconds, requests a second, and tokens of each."""


async def record(stack: up.Up) -> list[tuple[float, ...]]:
    """Ask at random moments, and look every second."""
    came: Counter[int] = Counter()
    rows: list[tuple[float, ...]] = []
    moments = random.Random(0)
    start = asyncio.get_running_loop().time()
    limits = httpx.Limits()  # none
    async with httpx.AsyncClient(base_url=stack.http, timeout=300, limits=limits) as client:

        async def ask(at: float, max_tokens: int) -> None:
            await asyncio.sleep(start + at - asyncio.get_running_loop().time())
            came[int(at)] += 1
            body = {"prompt": "def median(values):", "max_tokens": max_tokens}
            body |= {"ignore_eos": True, "seed": int(at * 1000)}
            (await client.post("/v1/completions", json=body)).raise_for_status()

        begun, asked = 0.0, []
        for seconds, rate, max_tokens in PHASES:
            at = begun
            while rate and (at := at + moments.expovariate(rate)) < begun + seconds:
                asked.append(asyncio.create_task(ask(at, max_tokens)))
            begun += seconds
        async with open_channel(stack.scorer) as channel:
            stub = scorer_pb2_grpc.ScorerServiceStub(channel)
            for second in range(int(begun)):
                await asyncio.sleep(start + second + 1 - asyncio.get_running_loop().time())
                info = await stub.GetScorerInfo(scorer_pb2.GetScorerInfoRequest(), timeout=30)
                shown = (await client.get("/metrics")).text
                (in_flight,) = re.findall(
                    r"^outrider:gateway_requests_in_flight(?:\{.*\})? (\S+)$", shown, re.MULTILINE
                )
                load = (info.running_requests, info.waiting_requests, int(float(in_flight)))
                kv = round(1 - info.free_pages / info.total_pages, 3)
                rows.append((second, came[second], *load, kv))
        for asking in asked:  # on a busy machine some are left
            asking.cancel()
        for ended in await asyncio.gather(*asked, return_exceptions=True):
            if isinstance(ended, Exception):
                raise ended
    return rows


def main(path: Path) -> None:
    """Serve, record, and write the rows."""
    with up.running("--max-num-seqs", ROOM, beside=False) as stack:
        rows = asyncio.run(record(stack))
    with path.open("w", newline="") as file:
        csv.writer(file, lineterminator="\n").writerows([COLUMNS, *rows])


if __name__ == "__main__":
    main(Path(sys.argv[1]))
