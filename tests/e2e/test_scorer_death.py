"""A scorer killed with SIGKILL mid-stream: the request goes on elsewhere, with the same text."""

from __future__ import annotations

import json
import subprocess
import sys
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path

import httpx

from outrider.cli.client import GenerateOptions
from tests.support.up import complete

_PROMPT = "def fibonacci(n):"


@contextmanager
def service(*argv: object) -> Iterator[subprocess.Popen[str]]:
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


def addresses(process: subprocess.Popen[str]) -> dict[str, str]:
    assert process.stdout is not None
    line = process.stdout.readline()
    assert line.startswith("ready "), line
    fields: dict[str, str] = json.loads(line.removeprefix("ready "))
    return fields


def busy(scorer: dict[str, str]) -> bool:
    """Whether it has a request under way."""
    metrics = httpx.get(scorer["metrics"]).text.splitlines()
    values = [line for line in metrics if line.startswith("outrider:num_requests_running")]
    return any(float(line.split()[-1]) > 0 for line in values)


async def test_a_scorer_killed_mid_stream(pair: tuple[Path, Path]) -> None:
    flags = ("--model", pair[0], "--threads", 1, "--kv-cache-memory", 16)
    with ExitStack() as stack:
        scorers = [stack.enter_context(service("scorer_service", *flags)) for _ in range(2)]
        infos = [addresses(scorer) for scorer in scorers]
        targets = ",".join(info["grpc"] for info in infos)
        gateway = stack.enter_context(service("gateway", "--scorer", targets, "--model", pair[0]))
        grpc = addresses(gateway)["grpc"]
        options = GenerateOptions(
            prompt=_PROMPT, temperature=1.0, seed=5, max_tokens=400, aux_info=True
        )
        expected = await complete(grpc, options)

        killed: list[int] = []

        def kill_the_busy_one(num_tokens: int) -> None:
            if num_tokens >= 10 and not killed:
                killed.extend(n for n, info in enumerate(infos) if busy(info))
                assert len(killed) == 1
                scorers[killed[0]].kill()

        resumed = await complete(grpc, options, on_tokens=kill_the_busy_one)
        assert killed
        assert resumed.text == expected.text
        assert resumed.token_ids == expected.token_ids
        assert resumed.finish_reason == expected.finish_reason
        assert resumed.aux.retries == 1
        assert resumed.aux.output_len == resumed.usage.completion_tokens == len(expected.token_ids)
