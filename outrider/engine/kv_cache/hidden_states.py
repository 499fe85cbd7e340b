"""The target's hidden states, kept in the same pages and slots as keys and values.

A cached prefix has its hidden states, and those of a rejected draft are overwritten.
"""

from __future__ import annotations

import torch
from torch import Tensor

from outrider.engine.kv_cache.memory import zeros
from outrider.features import FeatureSpec


class HiddenStatePool:
    """One bfloat16 row of states per slot; slot = page * page_size + offset."""

    def __init__(
        self, spec: FeatureSpec, num_pages: int, page_size: int, device: torch.device
    ) -> None:
        self.spec = spec
        self.page_size = page_size
        self._device = device
        self._columns = {layer: i * spec.hidden_size for i, layer in enumerate(spec.layers)}
        self.resize(num_pages)

    def resize(self, num_pages: int) -> None:
        """Hold `num_pages` pages of zeros from now on."""
        self.rows = zeros(
            num_pages * self.page_size,
            self.spec.captured_width,
            dtype=torch.bfloat16,
            device=self._device,
        )

    @property
    def bytes_per_slot(self) -> int:
        """Bytes of one token."""
        return self.spec.row_bytes

    def enter(self, layer: int, slots: Tensor, hidden: Tensor) -> None:
        """Keep the inputs `hidden` [n, hidden_size] of a captured layer in `slots` [n]."""
        column = self._columns.get(layer)
        if column is not None:
            self._write(column, slots, hidden)

    def final(self, slots: Tensor, normed: Tensor) -> None:
        """Keep the outputs of the final norm, [n, hidden_size], in `slots` [n]."""
        assert self.spec.final_norm
        self._write(len(self._columns) * self.spec.hidden_size, slots, normed)

    def read(self, slots: Tensor, spec: FeatureSpec, projection: Tensor | None) -> Tensor:
        """Read the states of `spec` from `slots` int64 [n], projected: [n, spec.width]."""
        rows = self.rows.index_select(0, slots)
        if spec.states != self.spec.states:
            size, kept = self.spec.hidden_size, self.spec.states
            starts = [kept.index(state) * size for state in spec.states]
            rows = torch.cat([rows[:, start : start + size] for start in starts], dim=1)
        return rows if projection is None else torch.nn.functional.linear(rows, projection)

    def _write(self, column: int, slots: Tensor, hidden: Tensor) -> None:
        place = self.rows[:, column : column + self.spec.hidden_size]
        place.index_copy_(0, slots, hidden.to(torch.bfloat16))
