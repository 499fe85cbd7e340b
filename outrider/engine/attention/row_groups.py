"""Group the rows of a step for padded attention calls, with gather indices and masks.

Short rows (decode and verification) of similar context share one call. Long rows (prefill chunks)
have a call each. Groups are made once per step and used by every layer.
"""

from __future__ import annotations

from collections.abc import Sequence
from functools import cached_property

import torch
from torch import Tensor

from outrider.engine.batch import PackedBatch

SHORT_QUERY_LEN = 16  # rows with at most this many new tokens share a padded call
_SPLIT_SAVES = 1024  # padded keys that one more call must save


class RowGroup:
    """Rows that share one padded attention call: B rows, Q query tokens, L keys at most."""

    def __init__(self, batch: PackedBatch, rows: tuple[int, ...]) -> None:
        self.num_rows = len(rows)
        query_lens = [batch.query_lens[i] for i in rows]
        context_lens = [batch.context_lens[i] for i in rows]
        self.max_query_len = max(query_lens)
        self.max_context_len = max(context_lens)
        device = batch.input_ids.device
        whole = self.num_rows == len(batch.query_lens)
        self._even = min(context_lens) == self.max_context_len and not batch.recorded
        picked = None if whole else torch.tensor(rows, device=device)
        self._table = batch.block_table if picked is None else batch.block_table[picked]
        self._context = batch.seq_lens if picked is None else batch.seq_lens[picked]
        self._table = self._table[:, : -(-self.max_context_len // batch.page_size)]
        padded = min(query_lens) < self.max_query_len
        self.query_index: Tensor | None = None  # [B * Q] tokens of the batch; None: all, in order
        self.unpad_index: Tensor | None = None  # [tokens] of [B * Q]; None: all, in order
        if padded or not whole:
            starts = batch.cu_seqlens_q[:-1] if picked is None else batch.cu_seqlens_q[picked]
            lens = torch.tensor(query_lens, device=device)[:, None]
            steps = torch.arange(self.max_query_len, device=device)[None]
            # Padding repeats the row's last query.
            self.query_index = (starts[:, None] + torch.minimum(steps, lens - 1)).flatten()
            if padded:
                self.unpad_index = (steps < lens).flatten().nonzero().flatten()
        self._positions = self._per_query(batch.positions)
        self._trees = batch.trees
        if batch.trees is not None:
            starts = batch.trees.starts
            self._tree_starts = starts if picked is None else starts[picked]
            self._visible = self._per_query(batch.trees.visible)
        self.slots = self._slots(batch.page_size)  # [B * L]
        self._masks: dict[tuple[int | None, int, torch.dtype], Tensor | None] = {}

    def _per_query(self, values: Tensor) -> Tensor:
        """Arrange values [tokens of the batch] as [B, Q]."""
        if self.query_index is not None:
            values = values[self.query_index]
        return values.view(self.num_rows, -1)

    def _slots(self, page_size: int) -> Tensor:
        offsets = torch.arange(page_size, device=self._table.device)
        slots = (self._table[:, :, None] * page_size + offsets).flatten(1)
        if not self._even:
            # Past its end a row reads its own last key, never another row's numbers.
            keys = torch.arange(self.max_context_len, device=slots.device)
            slots = slots.gather(1, torch.minimum(keys, self._context[:, None].long() - 1))
        return slots[:, : self.max_context_len].flatten()

    def mask(self, window: int | None, repeats: int, dtype: torch.dtype) -> Tensor | None:
        """Return the additive mask [B, 1, Q * repeats, L], or None if all keys are visible.

        Each query is repeated `repeats` times.
        """
        if window is not None and window >= self.max_context_len:
            window = None
        key = (window, repeats, dtype)
        if key not in self._masks:
            self._masks[key] = self._make_mask(window, repeats, dtype)
        return self._masks[key]

    def _make_mask(self, window: int | None, repeats: int, dtype: torch.dtype) -> Tensor | None:
        if window is None and self._even and self.max_query_len == 1 and self._trees is None:
            return None
        keys = torch.arange(self.max_context_len, device=self.slots.device)
        queries = self._positions[:, :, None]
        hidden = keys > queries  # [B, Q, L]
        if window is not None:
            hidden |= keys <= queries - window
        if self._trees is not None:
            seen = self._trees.seen(keys, self._tree_starts, self._visible, window)
            hidden = torch.where(keys < self._tree_starts[:, None, None], hidden, ~seen)
        mask = torch.zeros(hidden.shape, dtype=dtype, device=hidden.device)
        mask.masked_fill_(hidden, float("-inf"))
        return mask.repeat_interleave(repeats, dim=1)[:, None]


def split_by_context(rows: Sequence[int], context_lens: Sequence[int]) -> list[tuple[int, ...]]:
    """Split rows into groups of similar context, so that short ones need little padding.

    A group is cut in two where that saves the most keys, as long as it saves enough of them.
    """
    by_length = sorted(rows, key=lambda i: context_lens[i])
    count = len(by_length)
    if count < 2 or context_lens[by_length[-1]] * count <= _SPLIT_SAVES:
        return [tuple(rows)] if count else []
    longest = context_lens[by_length[-1]]
    saved = [cut * (longest - context_lens[by_length[cut - 1]]) for cut in range(1, count)]
    best = max(saved)
    if best < _SPLIT_SAVES:
        return [tuple(rows)]
    cut = saved.index(best) + 1
    return split_by_context(sorted(by_length[:cut]), context_lens) + split_by_context(
        sorted(by_length[cut:]), context_lens
    )


class RowGroups:
    """The groups of a step's rows."""

    def __init__(self, batch: PackedBatch) -> None:
        self.batch = batch
        lens = batch.query_lens
        short = [i for i, n in enumerate(lens) if n <= SHORT_QUERY_LEN]
        long = [(i,) for i, n in enumerate(lens) if n > SHORT_QUERY_LEN]
        self.groups = [
            RowGroup(batch, rows) for rows in split_by_context(short, batch.context_lens) + long
        ]
        self._restore: Tensor | None = None  # [num_tokens]: from group order to batch order
        if len(self.groups) > 1 or self.groups[0].unpad_index is not None:
            self._restore = self._make_restore()

    def _make_restore(self) -> Tensor:
        parts: list[Tensor] = []
        for group in self.groups:
            tokens = group.query_index
            assert tokens is not None
            parts.append(tokens if group.unpad_index is None else tokens[group.unpad_index])
        order = torch.cat(parts).to(torch.int64)
        restore = torch.empty_like(order)
        restore[order] = torch.arange(len(order), device=order.device)
        return restore

    def restore(self, parts: list[Tensor]) -> Tensor:
        """Concatenate the groups' outputs [tokens, ...] in the order of the batch."""
        if self._restore is None:
            return parts[0]
        return torch.cat(parts).index_select(0, self._restore)

    @cached_property
    def all_slots(self) -> Tensor:
        """Slots of the keys of all groups, concatenated: [sum of B * L]."""
        return torch.cat([group.slots for group in self.groups])
