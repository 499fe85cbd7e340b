"""What the device chose, for the host to read without waiting for what was launched later."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor


class HostCopy:
    """Host memory that the device copies token ids to, one copy at a time."""

    def __init__(self, most: int, device: torch.device) -> None:
        """Hold at most so many token ids of a device."""
        on_cuda = device.type == "cuda"
        self._on_host = torch.empty(most, dtype=torch.int32, device="cpu", pin_memory=on_cuda)
        cuda: Any = torch.cuda
        self._copied = cuda.Event() if on_cuda else None
        self._length = 0

    def begin(self, tokens: Tensor) -> None:
        """Have the device copy tokens once it has chosen them: int32 [n], n at most `most`."""
        self._length = len(tokens)
        self._on_host[: self._length].copy_(tokens, non_blocking=self._copied is not None)
        if self._copied is not None:
            self._copied.record()

    def wait(self) -> list[int]:
        """Wait for the copy, and return its tokens."""
        if self._copied is not None:
            self._copied.synchronize()
        tokens: list[int] = self._on_host[: self._length].tolist()
        return tokens
