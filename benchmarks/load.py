"""Load any server of OpenAI's API with streams, and tell what its clients saw.

    python -m benchmarks.load --url http://127.0.0.1:8000/v1 --rate 50
    python -m benchmarks.load --url ... --rate 50 --burst 20
    python -m benchmarks.load --url ... --in-flight 1000 --seconds 600

`--rate` is an open loop: requests arrive as a Poisson process, singly or in bursts, whether or not
those before were answered, and their times run from the arrival. `--in-flight` is a closed loop:
each answer is followed by the next request. One process and one core hold thousands of streams;
where `lag` or the generator's own CPU is high, its numbers are its own and not the server's.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import os
import random
import resource
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, Final

import uvloop

from benchmarks.lib import report
from benchmarks.lib.load.driver import Driver, Endpoint, Limits
from benchmarks.lib.load.tally import Bound, Tally
from benchmarks.lib.program import arguments, guarded
from outrider.errors import ConfigError

_WORDS = ("the", "of", "to", "and", "in", "is", "it", "you", "that", "was", "for", "on", "are")
_DIGITS = 9
_TIMES: Final = {
    "time to first token": "ttft_ms",
    "between two events of a stream": "inter_token_ms",
    "per token after the first": "tpot_ms",
    "whole answer": "total_ms",
}
_COUNTS: Final = (
    *(("answered", 0), ("requests_per_s", 1), ("goodput_per_s", 1), ("good", 3)),
    *(("messages_per_s", 0), ("tokens_per_s", 0), ("steady_tokens_per_s", 0)),
    ("slowest_to_median", 2),
    *(("most_open", 0), ("lag_ms", 1), ("generator_cores", 2)),
)


def parser() -> argparse.ArgumentParser:
    p = arguments("benchmarks.load", __doc__)
    p.add_argument("--url", required=True, help="base URL, such as http://127.0.0.1:8000/v1")
    p.add_argument("--model", default="default")
    p.add_argument("--chat", action="store_true", help="chat completions; unset: completions")
    how = p.add_mutually_exclusive_group(required=True)
    how.add_argument("--rate", type=float, help="requests a second that arrive")
    how.add_argument("--in-flight", type=int, help="requests at a time")
    p.add_argument("--burst", type=int, default=1, help="with --rate: requests that come together")
    p.add_argument("--seconds", type=float, default=30.0, help="in which requests begin")
    p.add_argument("--requests", type=int, default=1_000_000, help="at most")
    p.add_argument("--connections", type=int, default=16_384, help="open at most")
    p.add_argument("--timeout", type=float, default=120.0, help="seconds of one request")
    p.add_argument("--prompt-words", type=int, default=32)
    p.add_argument("--max-tokens", type=int, default=128)
    p.add_argument("--body", type=json.loads, default={}, metavar="JSON", help="further fields")
    p.add_argument("--key-env", metavar="NAME", help="variable that holds the API key")
    p.add_argument("--good-ttft-ms", type=float, default=1000.0, help="bound of a good answer")
    p.add_argument("--good-tpot-ms", type=float, default=100.0, help="likewise, a token after it")
    p.add_argument("--seed", type=int, default=0)
    p.add_argument("--out", type=Path, help="writes this name with .json and .md")
    return p


def main(argv: Sequence[str] | None = None) -> int:
    """Return 0 if any request was answered, 1 if none was, 2 if it could not run."""
    return guarded(_run, parser(), argv)


def _run(args: argparse.Namespace) -> int:
    found = measure(args)
    report.publish("Load", "benchmarks.load", tables(found), found, args.out)
    return 0 if found["answered"] else 1


def measure(args: argparse.Namespace) -> dict[str, Any]:
    """Return the numbers of one load. Raises `ConfigError`."""
    for name in ("rate", "in_flight", "burst", "seconds", "requests", "connections", "timeout"):
        value = getattr(args, name)
        if value is not None and not value > 0:
            raise ConfigError(f"--{name.replace('_', '-')} must be greater than 0.")
    path = "/chat/completions" if args.chat else "/completions"
    key = None if args.key_env is None else os.environ.get(args.key_env)
    if args.key_env is not None and not key:
        raise ConfigError(f"--key-env {args.key_env}: there is no such variable.")
    try:
        endpoint = Endpoint.of(args.url, path)
    except (OSError, ValueError) as error:
        raise ConfigError(f"--url {args.url}: {error}.") from error
    _raise_file_limit(args.connections)
    tally = Tally(Bound(args.good_ttft_ms / 1e3, args.good_tpot_ms / 1e3))
    limits = Limits(args.requests, args.seconds, args.timeout, args.connections)

    async def drive() -> float:
        driver = Driver(endpoint, requests(args, endpoint, key), limits, tally)
        if args.in_flight is not None:
            return await driver.closed_loop(args.in_flight)
        come = poisson(args.rate, args.seed)
        if args.burst > 1:
            come = bursts(args.rate, args.burst, args.seed)
        return await driver.open_loop(come)

    began = time.process_time()
    with asyncio.Runner(loop_factory=uvloop.new_event_loop) as runner:
        seconds = runner.run(drive())
    cores = (time.process_time() - began) / seconds
    return {**tally.numbers(seconds), "generator_cores": cores}


def requests(
    args: argparse.Namespace, endpoint: Endpoint, key: str | None
) -> Callable[[int], bytes]:
    """Return what makes request `n`: all alike but for a number at the begin of the prompt.

    So none finds its prompt in a cache of prefixes.
    """
    draw = random.Random(args.seed)
    mark = "0" * _DIGITS
    prompt = " ".join([mark, *draw.choices(_WORDS, k=args.prompt_words)])
    chat = {"messages": [{"role": "user", "content": prompt}]}
    body = {
        "model": args.model,
        **(chat if args.chat else {"prompt": prompt}),
        "max_tokens": args.max_tokens,
        "stream": True,
        "stream_options": {"include_usage": True},
        **args.body,
    }
    whole = endpoint.request(json.dumps(body).encode(), key)
    before, _, after = whole.partition(mark.encode())

    def request(n: int) -> bytes:
        return b"%b%0*d%b" % (before, _DIGITS, n, after)

    return request


def poisson(rate: float, seed: int) -> Iterator[float]:
    """Yield arrival times in seconds, `rate` a second on average, without memory."""
    draw = random.Random(seed)
    at = 0.0
    while True:
        at += draw.expovariate(rate)
        yield at


def bursts(rate: float, size: int, seed: int) -> Iterator[float]:
    """Yield arrival times of bursts of `size` at once, which come as `poisson` does.

    The mean rate of requests is `rate`, too.
    """
    for at in poisson(rate / size, seed):
        for _ in range(size):
            yield at


def tables(found: Mapping[str, Any]) -> list[str]:
    """Return the tables of one load."""
    quantiles = ["p50", "p90", "p99", "max"]
    times = [
        [name, *(report.number(found[field][q], 1) for q in quantiles)]
        for name, field in _TIMES.items()
    ]
    counts = [[name.replace("_", " "), report.number(found[name], n)] for name, n in _COUNTS]
    failures = [[kind, str(count)] for kind, count in found["failures"].items()]
    return [
        *report.table(["ms", *quantiles], times),
        "",
        *report.table(["", "count"], counts),
        "",
        *(report.table(["failure", "requests"], failures) if failures else ["No request failed."]),
    ]


def _raise_file_limit(connections: int) -> None:
    """Let this process open so many sockets. Raises `ConfigError`."""
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    wanted = connections + 256
    if hard != resource.RLIM_INFINITY and wanted > hard:
        raise ConfigError(f"--connections {connections}: this user may open {hard} files.")
    if soft < wanted:
        resource.setrlimit(resource.RLIMIT_NOFILE, (wanted, hard))


if __name__ == "__main__":
    raise SystemExit(main())
