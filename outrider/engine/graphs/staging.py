"""Inputs that the host writes and one copy brings to the device."""

from __future__ import annotations

import math
from collections.abc import Iterable
from dataclasses import dataclass
from typing import Any

import torch
from numpy.typing import NDArray
from torch import Tensor

from outrider.bounded import remember
from outrider.engine.batch import RowSlice

_ALIGNMENT = 256  # bytes: kernels read their inputs in wide words


@dataclass(frozen=True, slots=True)
class PageLayout:
    """The paged KV cache that captured work reads and writes."""

    max_model_len: int
    page_size: int
    scratch_page: int  # belongs to no sequence; padding rows and tokens write to it
    device: torch.device

    def holds(self, rows: Iterable[RowSlice]) -> bool:
        """Tell whether all tokens have slots: a tree may reach beyond the longest context."""
        return all(row.start + len(row.token_ids) <= self.max_model_len for row in rows)


class Staging:
    """Named columns in one buffer on the host (pinned for CUDA) and their mirror on the device."""

    def __init__(
        self, columns: dict[str, tuple[torch.dtype, tuple[int, ...]]], device: torch.device
    ) -> None:
        self._columns = columns
        self._starts: dict[str, int] = {}
        end = 0
        for name, (dtype, shape) in columns.items():
            self._starts[name] = -(-end // _ALIGNMENT) * _ALIGNMENT
            end = self._starts[name] + dtype.itemsize * math.prod(shape)
        self._host = torch.zeros(end, dtype=torch.uint8, pin_memory=device.type == "cuda")
        self._device = torch.zeros(end, dtype=torch.uint8, device=device)
        self._on_host = {name: self._view(self._host, name) for name in columns}
        self._on_device = {name: self._view(self._device, name) for name in columns}
        self._parts: dict[tuple[str, int], tuple[Tensor, Tensor]] = {}  # that `send` copies
        self._copied = torch.cuda.Event() if device.type == "cuda" else None  # type: ignore[no-untyped-call]

    def host(self, name: str) -> Tensor:
        return self._on_host[name]

    def array(self, name: str) -> NDArray[Any]:
        """Return the host's column as an array."""
        array: NDArray[Any] = self.host(name).numpy()
        return array

    def device(self, name: str) -> Tensor:
        return self._on_device[name]

    def send(self, last: str, num_rows: int) -> None:
        """Enqueue the copy of all columns before `last` and of the first rows of `last`."""
        if (parts := self._parts.get((last, num_rows))) is None:
            dtype, (_, *shape) = self._columns[last]
            end = self._starts[last] + num_rows * dtype.itemsize * math.prod(shape)
            parts = remember(self._parts, (last, num_rows), (self._device[:end], self._host[:end]))
        parts[0].copy_(parts[1], non_blocking=True)
        if self._copied is not None:
            self._copied.record()

    def await_copy(self) -> None:
        """Return when the last copy has been made, after which the host's columns may change.

        It waits behind a step in flight only, never for one: by then the step before has ended.
        """
        if self._copied is None or self._copied.query():  # type: ignore[no-untyped-call]
            return
        self._copied.synchronize()  # which gives up the interpreter even if the copy was made

    def _view(self, buffer: Tensor, name: str) -> Tensor:
        dtype, shape = self._columns[name]
        start = self._starts[name]
        return buffer[start : start + dtype.itemsize * math.prod(shape)].view(dtype).view(shape)
