"""The fastest way to use `transformers` here: how many threads, which dtype, which options."""

from __future__ import annotations

import statistics
from collections.abc import Sequence
from dataclasses import dataclass

from benchmarks.peers import TransformersSystem
from benchmarks.processes import Worker
from benchmarks.records import TokenIds

DTYPES = {"bf16": "bfloat16", "fp32": "float32"}
_REPEATS = 3
_TOKENS = 32


@dataclass(frozen=True)
class Choice:
    """A mode's fastest setting, and what the others reached (tokens per second)."""

    threads: int
    dtype: str  # "bf16" or "fp32"
    num_assistant_tokens: int
    tried: dict[str, float]


def choose(
    workers: dict[int, Worker],
    mode: str,
    assistant_tokens: Sequence[int],
    prompts: Sequence[TokenIds],
    timeout_s: float,
) -> Choice:
    """Try `mode` with every worker (by its threads), dtype and number of assistant tokens."""
    candidates = [
        (threads, dtype, k) for threads in workers for dtype in DTYPES for k in assistant_tokens
    ]
    systems = {
        (threads, dtype, k): TransformersSystem(
            "", workers[threads], mode, DTYPES[dtype], frozenset(), timeout_s, k
        )
        for threads, dtype, k in candidates
    }
    rates: dict[tuple[int, str, int], list[float]] = {key: [] for key in candidates}
    for system in systems.values():
        system.run(prompts[:1], 4, 1)  # loads, and warms up
    for i in range(_REPEATS):
        prompt = prompts[i % len(prompts)]
        for key, system in systems.items():
            rates[key].append(system.run([prompt], _TOKENS, 1).tokens_per_s)
    medians = {key: statistics.median(values) for key, values in rates.items()}
    best = max(medians, key=lambda key: medians[key])
    tried = {
        f"{mode} {dtype} {threads} threads" + (f" k={k}" if mode != "plain" else ""): rate
        for (threads, dtype, k), rate in medians.items()
    }
    return Choice(*best, tried)
