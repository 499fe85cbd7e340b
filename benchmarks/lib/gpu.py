"""The GPU's name and bandwidth, and clocks for calls on it."""

from __future__ import annotations

import itertools
import statistics
import time
from collections.abc import Callable, Mapping
from typing import Any

import torch
from transformers import LlamaConfig, LlamaForCausalLM


def random_llama(shape: Mapping[str, Any], dtype: str, device: torch.device) -> Any:
    """Return a Llama of random weights, made on the device."""
    torch.set_default_dtype(getattr(torch, dtype))
    with device:
        model = LlamaForCausalLM(LlamaConfig(**shape, max_position_embeddings=8192))
    torch.set_default_dtype(torch.float32)
    return model.eval()


def gpu_name() -> str:
    return torch.cuda.get_device_name() if torch.cuda.is_available() else "none"


def copy_bandwidth(device: torch.device) -> float:
    """Return the bytes per second, read and written, of a copy larger than any cache."""
    size = 2**32 if device.type == "cuda" else 2**26
    source = torch.ones(size, dtype=torch.uint8, device=device)
    target = torch.empty_like(source)
    return 2 * size / (time_ms(lambda: target.copy_(source), device, repeats=20) * 1e-3)


def time_ms(call: Callable[[], object], device: torch.device, repeats: int) -> float:
    """Return the milliseconds of a call on the device: the median on CUDA, else the mean.

    On CUDA, events surround each call, and all calls are enqueued before the first is waited for,
    so that the host's time does not count while the host is ahead of the device.
    """
    for _ in range(5):
        call()
    if device.type != "cuda":
        began = time.perf_counter()
        for _ in range(repeats):
            call()
        return (time.perf_counter() - began) * 1e3 / repeats
    torch.cuda.synchronize(device)
    marks = [
        torch.cuda.Event(enable_timing=True)  # type: ignore[no-untyped-call]
        for _ in range(repeats + 1)
    ]
    marks[0].record()
    for mark in marks[1:]:
        call()
        mark.record()
    torch.cuda.synchronize(device)
    times: list[float] = [a.elapsed_time(b) for a, b in itertools.pairwise(marks)]
    return statistics.median(times)
