"""Allocate and move the memory of the pools, and report where it does not suffice."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator

import torch
from torch import Tensor

from outrider.errors import ConfigError


def zeros(*shape: int, dtype: torch.dtype, device: torch.device) -> Tensor:
    """Return `torch.zeros`; raise `torch.OutOfMemoryError` on a CPU, too."""
    try:
        return torch.zeros(shape, dtype=dtype, device=device)
    except (RuntimeError, TypeError) as error:  # TypeError: a size of more than 64 bits
        if device.type != "cpu":
            raise
        raise torch.OutOfMemoryError(str(error)) from error


def move(units: Tensor, source: Tensor, target: Tensor) -> None:
    """Copy units `source` int64 [n] to `target` [n] in a tensor [parts, count, numbers].

    All units are read before any is written. The kernel's time follows the number of elements, so
    the widest elements are moved.
    """
    size = units.shape[-1] * units.element_size()
    wide = next((x for x in (torch.complex128, torch.int64) if size % x.itemsize == 0), units.dtype)
    units = units.view(torch.uint8 if wide.itemsize == 1 else wide)
    units.index_copy_(1, target, units.index_select(1, source))


@contextlib.contextmanager
def fitting(what: str, kv_cache_memory: int | None) -> Iterator[None]:
    """Turn running out of memory while loading `what` into a `ConfigError`.

    `kv_cache_memory` is the MiB that its pools take, or None if they take the rest.
    """
    try:
        yield
    except torch.OutOfMemoryError as error:
        if kv_cache_memory is None:
            raise ConfigError(f"{what} does not fit into the device's free memory.") from error
        raise ConfigError(
            f"{what} and --kv-cache-memory {kv_cache_memory} do not fit into the device's free "
            "memory: give fewer MiB."
        ) from error
