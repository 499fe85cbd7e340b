"""How a CUDA device's memory is shared out before anything is served.

What a step can take at most is tried out with a small KV cache: the largest eager steps, and the
recording of the two largest buckets, from which the rest follow. The KV cache gets what is left.
"""

from __future__ import annotations

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
from outrider.engine.sampling.coupled import Sample, SamplingBatch, sample
from outrider.errors import ConfigError
from outrider.params import SamplingParams

TRIAL_PAGES = 8  # of the KV cache while the rest is measured
_SLACK = 256 * 2**20  # what the allocator loses to rounding and to steps in another order
_MIN_GRAPH = 2 * 2**20  # bytes of a recorded step besides what its tensors share


class DeviceMemory:
    """What this process takes of a device, from when this was made (before any model is loaded).

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
        """Bytes in use now; what the allocator merely keeps is given back first."""
        torch.cuda.synchronize(self._device)
        torch.cuda.empty_cache()
        return self._free - torch.cuda.mem_get_info(self._device)[0]

    def peak(self, work: Callable[[], object]) -> int:
        """Bytes that `work` needs for a while, beyond what is in use before it.

        Raises `ConfigError` if the device has not so much.
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
    """Bytes, by what they are for."""

    limit: int
    """All that may be used."""
    weights: int
    """Whatever stays from loading: weights, kernels, the libraries' workspaces."""
    activations: int
    graphs: int
    page_bytes: int
    page_size: int

    @property
    def kv_cache(self) -> int:
        return max(0, self.limit - self.weights - self.activations - self.graphs - _SLACK)

    @property
    def num_pages(self) -> int:
        """Pages for sequences; the scratch page comes on top."""
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
        """The shares as a table, a line each."""
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
    """Bytes that the largest eager steps take for a while, drawing included."""
    return max(map(memory.peak, _largest_of(model, max_num_seqs, max_num_batched_tokens)))


def claim_activations(
    model: PagedModel, draw: Sample, *, max_num_seqs: int, max_num_batched_tokens: int
) -> None:
    """Run the largest eager steps, so that the allocator keeps from the start what they take.

    Else memory would grow while serving, and what does not fit beside a KV cache of a given size
    would be found out then. Raises `ConfigError`. The model's pages hold nothing afterwards, and
    `draw` is compiled.
    """
    try:
        for run in _largest_of(model, max_num_seqs, max_num_batched_tokens):
            _draw_both(draw, run(), model)
    except torch.OutOfMemoryError as error:
        raise ConfigError(
            "The largest step does not fit beside the KV cache: lower --max-num-batched-tokens or "
            "--max-num-seqs, or --kv-cache-memory if it is given."
        ) from error


def estimate_graphs(used: Sequence[int], num_graphs: int) -> int:
    """Bytes of `num_graphs` buckets; `used` before any, after the largest, and after the next.

    All but the first reuse the memory of its tensors.
    """
    first, *others = (after - before for before, after in pairwise(used))
    return first + (num_graphs - 1) * max((*others, _MIN_GRAPH))


def largest_steps(
    max_num_seqs: int, max_num_batched_tokens: int, max_model_len: int, page_size: int
) -> Iterator[list[RowSlice]]:
    """The steps that need the most memory: many prompt tokens, and many tokens with logits.

    All rows share page 0, and none has a future: the numbers mean nothing. The rows of the second
    end in trees, whose attention is a kernel of its own: it is compiled now.
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


def _largest_of(
    model: PagedModel, max_num_seqs: int, max_num_batched_tokens: int
) -> Iterator[Callable[[], Tensor]]:
    sizes = (max_num_seqs, max_num_batched_tokens, model.max_model_len, model.page_size)
    return (partial(_try_out, model, rows) for rows in largest_steps(*sizes))


@torch.inference_mode()
def _try_out(model: PagedModel, rows: list[RowSlice]) -> Tensor:
    """The step's logits."""
    logits = model.forward(pack(rows, model.page_size, model.device))
    # The most that drawing can take: an edited copy, noise, and a sort.
    edited = logits[: max(1, MAX_EDITED // logits.shape[1])].to(torch.float32, copy=True)
    sample(logits, _cutting(logits))
    del edited  # until now
    return logits


@torch.inference_mode()
def _draw_both(draw: Sample, logits: Tensor, model: PagedModel) -> None:
    """Draws from logits as an eager forward gives them, and as a recorded one does."""
    for some in (logits[:1], logits[:1].to(model.dtype)):
        draw(some, _cutting(some))


def _cutting(logits: Tensor) -> SamplingBatch:
    params = SamplingParams(temperature=1.0, top_p=0.5, min_p=0.1)
    return SamplingBatch.build([params] * len(logits), range(len(logits)), logits.device)


def _gib(size: int) -> str:
    return f"{size / 2**30:.2f} GiB"
