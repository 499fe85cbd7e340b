"""A model without weights that notices every mistake in paging.

Its "KV cache" stores token ids and positions in the slots that a forward is told to write. Each
row of logits is a pseudo-random function of the whole context, read back through the block table:
a stale page, a wrong slot, a bad rollback or a wrongly shared prefix changes the output.
"""

from __future__ import annotations

import numpy as np
import torch
from torch import Tensor

from outrider.engine.batch import PackedBatch


class HashModel:
    """Implements `outrider.engine.batch.Model`. `peak` sharpens the distribution."""

    def __init__(
        self,
        vocab_size: int = 32,
        page_size: int = 4,
        num_pages: int = 64,
        max_model_len: int = 64,
        *,
        peak: float = 3.0,
    ) -> None:
        self.vocab_size = vocab_size
        self.page_size = page_size
        self.num_pages = num_pages
        self.max_model_len = max_model_len
        self.device = torch.device("cpu")
        self.peak = peak
        self.forwards = 0
        self.fail_next = False
        self._slots = np.full(num_pages * page_size, -1, np.int64)
        self._positions = np.full(num_pages * page_size, -1, np.int64)

    def forward(self, batch: PackedBatch) -> Tensor:
        self.forwards += 1
        slots = batch.slot_mapping.numpy()
        assert len(np.unique(slots)) == len(slots), "two tokens in one slot"
        self._slots[slots] = batch.input_ids.numpy()
        self._positions[slots] = batch.positions.numpy()
        if self.fail_next:
            self.fail_next = False
            raise RuntimeError("the device fell over")
        ends = batch.cu_seqlens_q[1:].tolist()
        rows = np.searchsorted(ends, batch.logits_index.numpy(), side="right")
        logits = [
            self.logits_of(self._context(batch, int(row), int(index)))
            for row, index in zip(rows, batch.logits_index, strict=True)
        ]
        return torch.from_numpy(np.stack(logits)) if logits else torch.empty(0, self.vocab_size)

    def _context(self, batch: PackedBatch, row: int, index: int) -> list[int]:
        """Tokens at positions 0 .. position of token `index`, as the pages hold them."""
        length = int(batch.positions[index]) + 1
        at = np.arange(length)
        pages = batch.block_table[row].numpy()[at // self.page_size]
        slots = pages * self.page_size + at % self.page_size
        assert (self._positions[slots] == at).all(), "a slot holds another position"
        return self._slots[slots].tolist()  # type: ignore[no-any-return]

    def logits_of(self, context: list[int]) -> np.ndarray:
        """float32 [vocab_size] from a hash of the whole context."""
        state = 0x811C9DC5
        for token in context:
            state = ((state ^ (token + 1)) * 0x01000193 + 0x9E3779B9) & 0xFFFFFFFF
            state ^= state >> 15
        x = (np.arange(self.vocab_size, dtype=np.uint64) * 0x9E3779B1 + state) & 0xFFFFFFFF
        x = ((x ^ (x >> 16)) * 0x21F0AAAD) & 0xFFFFFFFF
        x = ((x ^ (x >> 15)) * 0x735A2D97) & 0xFFFFFFFF
        return ((x ^ (x >> 15)) * (self.peak * 2.0**-31) - self.peak).astype(np.float32)
