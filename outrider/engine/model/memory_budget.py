"""Divide the memory of a CUDA device before serving.

With a small KV cache the largest eager steps are run and the two largest buckets are captured. The
memory of the other buckets is estimated from these. The KV cache gets the rest.
"""

from __future__ import annotations

import gc
import math
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from functools import partial
from itertools import pairwise

import torch
from torch import Tensor

from outrider.engine.batch import RowSlice, pack
from outrider.engine.model.paged_model import PagedModel
from outrider.engine.runner import MAX_EDITED
from outrider.engine.sampling.sample import Sample, SamplingBatch, sample
from outrider.errors import ConfigError
from outrider.params import SamplingParams

TRIAL_PAGES = 8  # of the KV cache while other memory is measured
_SLACK = 256 * 2**20  # for fragmentation
_MIN_GRAPH = 2 * 2**20  # bytes of a captured step without its tensors


class DeviceMemory:
    """The memory that this process takes, counted from before a model is loaded.

    Raises `ConfigError` if the wanted part of the device is not free.
    """

    def __init__(self, device: torch.device, utilization: float) -> None:
        self._device = device
        self._free, total = torch.cuda.mem_get_info(device)
        self.limit = int(total * utilization)
        if self._free < self.limit:
            raise ConfigError(
                f"--gpu-memory-utilization {utilization:g} asks for {_gib(self.limit)} of "
                f"{_gib(total)}, but only {_gib(self._free)} are free: stop what else uses "
                f"{device}, or give at most {math.floor(100 * self._free / total) / 100:.2f}."
            )

    def used(self) -> int:
        """Return the bytes in use, without garbage and without what the allocator caches."""
        gc.collect()  # a loaded model's modules are in cycles
        torch.cuda.synchronize(self._device)
        torch.cuda.empty_cache()
        return self._free - torch.cuda.mem_get_info(self._device)[0]

    def peak(self, work: Callable[[], object]) -> int:
        """Return the bytes that `work` needs beyond those in use before it.

        Raises `ConfigError` if the device has fewer.
        """
        before = self.used()
        torch.cuda.reset_peak_memory_stats(self._device)
        reserved = torch.cuda.memory_reserved(self._device)
        try:
            work()
            torch.cuda.synchronize(self._device)
        except torch.OutOfMemoryError as error:
            raise ConfigError(
                f"The largest step does not fit beside {_gib(before)} in use: lower "
                "--max-num-batched-tokens, --max-num-seqs or --max-model-len."
            ) from error
        return torch.cuda.max_memory_reserved(self._device) - reserved


@dataclass(frozen=True, slots=True)
class MemoryBudget:
    """The bytes of a device by their use."""

    limit: int
    weights: int  # and kernels, and the libraries' workspaces
    activations: int
    graphs: int
    page_bytes: int
    page_size: int

    @property
    def kv_cache(self) -> int:
        return max(0, self.limit - self.weights - self.activations - self.graphs - _SLACK)

    @property
    def num_pages(self) -> int:
        """Pages for sequences, without the scratch page."""
        return max(0, self.kv_cache // self.page_bytes - 1)

    def check(self, max_model_len: int) -> None:
        """Raise `ConfigError` unless one request of `max_model_len` tokens fits."""
        tokens = self.num_pages * self.page_size
        if tokens >= max_model_len:
            return
        wanted = (-(-max_model_len // self.page_size) + 1) * self.page_bytes
        raise ConfigError(
            f"{_gib(self.kv_cache)} are left for keys and values, which is {tokens} tokens; one "
            f"request of {max_model_len} takes {_gib(wanted)}. Raise --gpu-memory-utilization, or "
            "lower --max-model-len, --max-num-batched-tokens or --max-num-seqs. "
            f"The shares: {'; '.join(line.strip() for line in self.lines())}"
        )

    def lines(self) -> list[str]:
        """Return a table of the shares, a line each."""
        shares = {
            "weights": self.weights,
            "activations": self.activations,
            "graphs": self.graphs,
            "slack": _SLACK,
            "KV cache": self.kv_cache,
        }
        lines = [f"{name:<12}{_gib(size):>11}" for name, size in shares.items()]
        lines[-1] += f" = {self.num_pages} pages = {self.num_pages * self.page_size} tokens"
        return [*lines, f"{'limit':<12}{_gib(self.limit):>11}"]


def measure_activations(
    memory: DeviceMemory, model: PagedModel, *, max_num_seqs: int, max_num_batched_tokens: int
) -> int:
    """Return the bytes that the largest eager steps need, sampling included."""
    return max(map(memory.peak, largest_of(model, max_num_seqs, max_num_batched_tokens)))


@torch.inference_mode()
def claim_activations(
    model: PagedModel, sampler: Sample, *, max_num_seqs: int, max_num_batched_tokens: int
) -> None:
    """Run the largest eager steps, so that the allocator keeps their memory from the start.

    Raises `ConfigError` if they do not fit. The pages are undefined afterwards, and `sampler`
    is compiled.
    """
    try:
        for run in largest_of(model, max_num_seqs, max_num_batched_tokens):
            logits = run()[:1]
            for some in (logits, logits.to(model.dtype)):  # of eager and of captured forwards
                sampler(some, _sampling_of(some))
    except torch.OutOfMemoryError as error:
        raise ConfigError(
            "The largest step does not fit beside the KV cache: lower --max-num-batched-tokens or "
            "--max-num-seqs, or --kv-cache-memory if it is given."
        ) from error


def samplings(model: PagedModel, sampler: Sample) -> Iterator[Callable[[], Tensor]]:
    """Yield what samples one token, from logits of captured and of eager forwards."""
    for dtype in {model.dtype, torch.float32}:
        logits = torch.zeros(1, model.vocab_size, dtype=dtype, device=model.device)
        yield partial(sampler, logits, _sampling_of(logits))


def estimate_graphs(used: Sequence[int], num_graphs: int) -> int:
    """Estimate the bytes of `num_graphs` buckets, which share the memory of the largest.

    `used` are the bytes in use before the first, after the largest, and after the next.
    """
    first, *others = (after - before for before, after in pairwise(used))
    return first + (num_graphs - 1) * max((*others, _MIN_GRAPH))


def largest_steps(
    max_num_seqs: int, max_num_batched_tokens: int, max_model_len: int, page_size: int
) -> Iterator[list[RowSlice]]:
    """Yield the two steps that need the most memory: most prompt tokens, and most logits.

    All rows share page 0, and their numbers have no meaning. The rows of the second step end in
    trees, so that tree attention is compiled, too.
    """
    shares = (max_num_batched_tokens, ()), (-(-max_num_batched_tokens // max_num_seqs), (-1,))
    for longest, parents in shares:
        rows: list[RowSlice] = []
        left = max_num_batched_tokens
        while left and len(rows) < max_num_seqs:
            length = min(left, longest, max_model_len)
            table = [0] * -(-max_model_len // page_size)
            num_logits = length if longest < max_num_batched_tokens else 1
            start = max_model_len - length
            rows.append(RowSlice([0] * length, start, table, num_logits, parents))
            left -= length
        yield rows


def largest_of(
    model: PagedModel, max_num_seqs: int, max_num_batched_tokens: int
) -> Iterator[Callable[[], Tensor]]:
    """Yield what runs the largest eager steps, and returns their logits."""
    sizes = (max_num_seqs, max_num_batched_tokens, model.max_model_len, model.page_size)
    return (partial(_try_out, model, rows) for rows in largest_steps(*sizes))


@torch.inference_mode()
def _try_out(model: PagedModel, rows: list[RowSlice]) -> Tensor:
    """Run a step and the sampling that needs the most memory, and return the logits."""
    logits = model.forward(pack(rows, model.page_size, model.device))
    edited = logits[: max(1, MAX_EDITED // logits.shape[1])].to(torch.float32, copy=True)
    sample(logits, _sampling_of(logits))
    del edited  # held during `sample`
    return logits


def _sampling_of(logits: Tensor) -> SamplingBatch:
    params = SamplingParams(temperature=1.0, top_p=0.5, min_p=0.1)
    return SamplingBatch.build([params] * len(logits), range(len(logits)), logits.device)


def _gib(size: int) -> str:
    return f"{size / 2**30:.2f} GiB"
