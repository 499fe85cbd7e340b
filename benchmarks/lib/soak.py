"""Find errors, kept pages and growing memory under many requests of mixed lengths."""

from __future__ import annotations

import random
import subprocess
import threading
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field

import grpc

from benchmarks.lib.client import Job
from benchmarks.lib.gpu import memory_used_mib
from benchmarks.lib.processes import ProcessError
from benchmarks.lib.prompts import Prompts
from benchmarks.lib.stack import Stack

_SAMPLE_S = 2.0
_SETTLED = 0.25  # of the time; growth before is warm-up
_GROWTH_MIB = 256.0
_OUTPUT_TOKENS = (1, 8, 64, 128, 400)
_TEMPERATURES = (0.0, 0.8)


@dataclass
class _Memory:
    """Used memory of the GPU over time, empty where no tool reports it."""

    samples: list[tuple[float, float]] = field(default_factory=list)
    done: threading.Event = field(default_factory=threading.Event)

    def watch(self) -> None:
        began = time.monotonic()
        while not self.done.wait(_SAMPLE_S):
            try:
                used = memory_used_mib()
            except (OSError, ValueError, subprocess.SubprocessError):
                return
            self.samples.append((time.monotonic() - began, used))


def soak(
    stack: Stack,
    prompts: Prompts,
    seconds: float,
    in_flight: int,
    timeout_s: float,
    say: Callable[[str], None],
) -> list[str]:
    """Keep `in_flight` requests going for `seconds`; return the faults, a line each."""
    memory = _Memory()
    watcher = threading.Thread(target=memory.watch, daemon=True)
    watcher.start()
    requests = tokens = 0
    began = time.monotonic()
    faults: list[str] = []
    try:
        requests, tokens = stack.client.generate_for(
            _jobs(prompts), seconds, in_flight, timeout_s=timeout_s
        )
    except* (grpc.RpcError, ProcessError) as failed:
        faults += [f"soak: a request failed: {error}" for error in failed.exceptions]
    finally:
        memory.done.set()
        watcher.join()
    rate = tokens / (time.monotonic() - began)
    say(f"soak: {requests} requests, {tokens} tokens, {rate:.0f} tokens per second")
    return faults + _kept(stack) + _grown(memory.samples, say)


def _jobs(prompts: Prompts) -> Iterator[Job]:
    """Yield requests of random prompt lengths, numbers of tokens and temperatures."""
    rng = random.Random(0)
    while True:
        prompt = rng.choice(prompts.token_ids)
        start = prompt[: rng.randint(1, len(prompt))]
        yield Job(start, rng.choice(_OUTPUT_TOKENS), "draft_model", rng.choice(_TEMPERATURES))


def _kept(stack: Stack) -> list[str]:
    """Return what the scorer still holds a moment after the last request."""
    wanted = ("num_requests_running", "num_requests_waiting", "kv_cache_usage_perc")
    deadline = time.monotonic() + 5.0
    while True:
        values = {s.name.removeprefix("outrider:"): s.value for s in stack.metrics()}
        kept = [f"soak: {name} is {values[name]:g} at the end" for name in wanted if values[name]]
        if not kept or time.monotonic() > deadline:
            return kept
        time.sleep(0.2)


def _grown(samples: list[tuple[float, float]], say: Callable[[str], None]) -> list[str]:
    if not samples:
        say("soak: the GPU's memory could not be read; it was not watched")
        return []
    settled = next(used for at, used in samples if at >= _SETTLED * samples[-1][0])
    growth = max(used for _, used in samples) - settled
    say(f"soak: GPU memory {settled:.0f} MiB, then at most {growth:+.0f} MiB")
    if growth <= _GROWTH_MIB:
        return []
    return [f"soak: GPU memory grew by {growth:.0f} MiB"]
