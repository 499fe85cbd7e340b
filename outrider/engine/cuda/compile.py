"""Compile kernels in parallel, once for all starts."""

from __future__ import annotations

import os
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor, wait
from contextlib import AbstractContextManager

import torch

from outrider.engine.cuda import disk_cache

COMPILERS = min(16, os.cpu_count() or 1)
"""So many run at once, at most: each takes memory."""
_FILE = "compiled"


def compile_once(works: Sequence[Callable[[], object]], key: Sequence[object]) -> None:
    """Run `compile_together`, unless an earlier start did that for the same key.

    Triton reads what was compiled then, so these works need not run beforehand.
    """
    if disk_cache.read(_FILE, key) is None and compile_together(works):
        disk_cache.keep(_FILE, key, "")


def compile_together(works: Sequence[Callable[[], object]], at_once: int = 8) -> bool:
    """Run works in threads, so that their kernels are compiled in parallel, each one once.

    Memory must hold what `at_once` works compute. All work is enqueued on the current stream. What
    fails is left to whoever runs it again; False if anything did.
    """
    import triton  # here, since only CUDA brings it

    stream = torch.cuda.current_stream()
    left, failed = iter(works), []

    def run(compiling: AbstractContextManager[object]) -> None:
        with compiling, torch.cuda.stream(stream):
            for work in left:  # each thread takes the next one
                try:
                    work()
                except Exception as error:
                    failed.append(error)

    with (
        ThreadPoolExecutor(COMPILERS, "compiler") as compilers,
        ThreadPoolExecutor(at_once, "compile") as pool,
    ):
        # Kernels are told apart by their keys, so that no two threads compile the same.
        compiling = triton.AsyncCompileMode(compilers, ignore_errors=True)
        wait([pool.submit(run, compiling) for _ in range(at_once)])
    stream.synchronize()
    torch.cuda.empty_cache()
    return not failed
