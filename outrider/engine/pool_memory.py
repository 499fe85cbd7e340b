"""Memory for the pools of keys, values and hidden states, and what to say if it lacks."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator

import torch
from torch import Tensor

from outrider.errors import ConfigError


def zeros(*shape: int, dtype: torch.dtype, device: torch.device) -> Tensor:
    """As torch's. Raises `torch.OutOfMemoryError` on a CPU, too."""
    try:
        return torch.zeros(shape, dtype=dtype, device=device)
    except torch.OutOfMemoryError:
        raise
    except (RuntimeError, TypeError) as error:  # TypeError: a number of more than 64 bits
        if device.type != "cpu":
            raise
        raise torch.OutOfMemoryError(str(error)) from error


@contextlib.contextmanager
def fitting(what: str, kv_cache_memory: int | None) -> Iterator[None]:
    """Raises `ConfigError` if `what` is loaded within and does not fit into the device's memory.

    `kv_cache_memory` MiB are what its pools were told to take; None: they take what is left.
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
