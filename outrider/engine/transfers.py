"""Copies between the host and a device that wait for no step in flight."""

from __future__ import annotations

from collections.abc import Callable, Sequence

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from outrider.engine.events import make_events

Fetch = Callable[[], NDArray[np.int32]]


def index_on(device: torch.device, places: Sequence[int]) -> Tensor:
    """Return indices on the device, which copies them by itself: int64 [places]."""
    pinned = device.type == "cuda"  # torch uses such memory again once it was copied
    index = torch.tensor(places, dtype=torch.int64, device="cpu", pin_memory=pinned)
    return index.to(device, non_blocking=True)


def select_rows(rows: Tensor, places: Sequence[int]) -> Tensor:
    """Return `rows[places]` without waiting for the device."""
    if list(places) == list(range(len(places))):
        return rows[: len(places)]
    return rows.index_select(0, index_on(rows.device, places))


def begin_fetch(tokens: Tensor) -> Fetch:
    """Enqueue the copy of int32 tokens to the host; return what waits for it and returns them."""
    pinned = tokens.device.type == "cuda"
    on_host = torch.empty(tokens.shape, dtype=torch.int32, device="cpu", pin_memory=pinned)
    on_host.copy_(tokens, non_blocking=True)
    (copied,) = make_events(tokens.device, 1)
    copied.record()

    def fetch() -> NDArray[np.int32]:
        copied.synchronize()
        numbers: NDArray[np.int32] = on_host.numpy().copy()  # pinned memory is soon used again
        return numbers

    return fetch
