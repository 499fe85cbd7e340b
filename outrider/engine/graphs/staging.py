"""Arrays that the host fills and one copy brings to the device."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any

import torch
from numpy.typing import NDArray
from torch import Tensor

_ALIGNMENT = 256  # bytes: kernels read their inputs in wide words


def picked(rows: Tensor, places: Sequence[int]) -> Tensor:
    """Rows of a tensor by their places in it, without waiting for its device."""
    if list(places) == list(range(len(places))):
        return rows[: len(places)]
    index = torch.tensor(places, pin_memory=rows.device.type == "cuda")
    return rows.index_select(0, index.to(rows.device, non_blocking=True))


class PinnedMirror:
    """Named arrays in one buffer on the host (pinned for CUDA), and the same on the device."""

    def __init__(
        self, fields: dict[str, tuple[torch.dtype, tuple[int, ...]]], device: torch.device
    ) -> None:
        self.offsets: dict[str, int] = {}
        end = 0
        for name, (dtype, shape) in fields.items():
            self.offsets[name] = -(-end // _ALIGNMENT) * _ALIGNMENT
            end = self.offsets[name] + dtype.itemsize * math.prod(shape)
        self._host = torch.zeros(end, dtype=torch.uint8, pin_memory=device.type == "cuda")
        self._device = torch.zeros(end, dtype=torch.uint8, device=device)
        self._fields = fields

    def host(self, name: str) -> NDArray[Any]:
        return self._view(self._host, name).numpy()

    def device(self, name: str) -> Tensor:
        return self._view(self._device, name)

    def first(self, end: int) -> tuple[Tensor, Tensor]:
        """The first `end` bytes on the host and on the device."""
        return self._host[:end], self._device[:end]

    def _view(self, buffer: Tensor, name: str) -> Tensor:
        dtype, shape = self._fields[name]
        start = self.offsets[name]
        return buffer[start : start + dtype.itemsize * math.prod(shape)].view(dtype).view(shape)
