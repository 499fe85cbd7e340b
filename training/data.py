"""Token streams that live on the training device."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import torch
from torch import Tensor


def load_tokens(path: Path, device: torch.device) -> Tensor:
    """A uint16 file as an int16 tensor (ids stay under 8192)."""
    return torch.from_numpy(np.fromfile(path, dtype=np.uint16).astype(np.int16)).to(device)


class Stream:
    """Shuffled windows of one long token stream; each epoch cuts it at another offset."""

    def __init__(self, tokens: Tensor, length: int, seed: int) -> None:
        self.tokens, self.length = tokens, length
        self.generator = torch.Generator().manual_seed(seed)
        self.starts = torch.empty(0, dtype=torch.long)
        self.epochs = 0

    def next(self, rows: int) -> Tensor:
        """`[rows, length + 1]` token ids: inputs and their successors."""
        if len(self.starts) < rows:
            shift = int(torch.randint(self.length, (1,), generator=self.generator))
            count = (len(self.tokens) - shift - 1) // self.length
            order = torch.randperm(count, generator=self.generator)
            self.starts = order * self.length + shift
            self.epochs += 1
        take, self.starts = self.starts[:rows], self.starts[rows:]
        span = torch.arange(self.length + 1)
        index = (take[:, None] + span).to(self.tokens.device)
        return self.tokens[index].long()


def training_stream(data: Path, device: torch.device, length: int, seed: int) -> Stream:
    """Plain documents with the chat examples spread among them."""
    plain = load_tokens(data / "train.bin", device)
    chat = load_tokens(data / "chat.bin", device)
    parts = max(1, min(len(chat) // 4096, 2000))
    pieces: list[Tensor] = []
    for a, b in zip(plain.tensor_split(parts), chat.tensor_split(parts), strict=True):
        pieces += [a, b]
    return Stream(torch.cat(pieces), length, seed)
