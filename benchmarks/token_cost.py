"""What a token costs `transformers` and vLLM, from two lengths of output: prompts do not count."""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable
from typing import Any

import torch

from benchmarks.gpu import synchronize
from benchmarks.processes import Worker

NEW_TOKENS = (16, 144)
"""Of two runs; their difference is what is measured."""


def transformers_ms(model: Any, rows: int, context: int) -> float:
    """`generate` with a compiled static cache, per token."""
    ids = torch.randint(0, 1000, (rows, context - NEW_TOKENS[1] // 2)).to(model.device)

    def run(tokens: int) -> float:
        synchronize(model.device)
        began = time.perf_counter()
        model.generate(
            ids,
            attention_mask=torch.ones_like(ids),
            do_sample=False,
            max_new_tokens=tokens,
            min_new_tokens=tokens,
            cache_implementation="static",
        )
        synchronize(model.device)
        return time.perf_counter() - began

    return _per_token_ms(run)


def vllm_ms(worker: Worker, rows: int, context: int) -> float:
    """Of a `vllm_worker`, per token."""
    # In the middle of its output a row is as long as the context.
    length = max(1, context - NEW_TOKENS[1] // 2)
    prompts = [[(7 * j + i) % 1000 for j in range(length)] for i in range(rows)]

    def run(tokens: int) -> float:
        request = {"prompts": prompts, "max_tokens": tokens, "concurrency": rows}
        answer = worker.ask(request, timeout_s=120)
        seconds: float = answer["wall_s"]
        return seconds

    return _per_token_ms(run)


def _per_token_ms(run: Callable[[int], float]) -> float:
    """What one token costs in `run(tokens) -> seconds`: the median of three differences."""
    short, long = NEW_TOKENS
    run(short)
    run(long)
    costs = [(run(long) - run(short)) / (long - short) * 1e3 for _ in range(3)]
    return statistics.median(costs)
