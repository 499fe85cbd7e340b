"""Attention over gathered pages in plain torch operations, on any device and in any dtype.

Query heads that share a key head are packed into the query dimension, so that keys and values are
read once for all of them.
"""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor

from outrider.engine.attention.base import AttentionParams
from outrider.engine.attention.row_groups import RowGroup, RowGroups
from outrider.engine.batch import PackedBatch
from outrider.engine.kv_cache.pools import LayerPool


class SdpaAttention:
    """Implements `LatentAttention`; as a callable it is an `AttentionBackend`."""

    def __init__(self, batch: PackedBatch) -> None:
        self.batch, self._groups = batch, RowGroups(batch)

    @property
    def all_slots(self) -> Tensor:
        return self._groups.all_slots

    def attend(self, query: Tensor, pool: LayerPool, params: AttentionParams) -> Tensor:
        parts = [
            _attend_group(query, *pool.gather(group.slots), group, params)
            for group in self._groups.groups
        ]
        return self._groups.restore(parts)

    def attend_expanded(
        self, query: Tensor, keys: Tensor, values: Tensor, params: AttentionParams
    ) -> Tensor:
        groups = self._groups.groups
        sizes = [len(group.slots) for group in groups]
        split = (torch.split(each, sizes, dim=1) for each in (keys, values))
        parts = [
            _attend_group(query, group_keys, group_values, group, params)
            for group_keys, group_values, group in zip(*split, groups, strict=True)
        ]
        return self._groups.restore(parts)


def _attend_group(
    query: Tensor, keys: Tensor, values: Tensor, group: RowGroup, params: AttentionParams
) -> Tensor:
    """Attend to keys [kv_heads, B * L, dim]; return the group's tokens without padding."""
    kv_heads, repeats, dim = query.shape[1:]
    rows, value_dim = group.num_rows, values.shape[-1]
    if group.query_index is not None:
        query = query.index_select(0, group.query_index)
    query = query.view(rows, -1, kv_heads, repeats, dim).transpose(1, 2)
    packed = query.reshape(rows, kv_heads, -1, dim)
    keys = keys.view(kv_heads, rows, -1, dim).transpose(0, 1)
    values = values.view(kv_heads, rows, -1, value_dim).transpose(0, 1)
    mask = group.mask(params.sliding_window, repeats, packed.dtype)
    if params.softcap is None and params.sinks is None:
        out = F.scaled_dot_product_attention(packed, keys, values, mask, scale=params.scaling)
    else:
        out = _attend_by_matmul(packed, keys, values, mask, params)
    out = out.view(rows, kv_heads, -1, repeats, value_dim).transpose(1, 2)
    out = out.reshape(-1, kv_heads, repeats, value_dim)
    return out if group.unpad_index is None else out.index_select(0, group.unpad_index)


def _attend_by_matmul(
    query: Tensor, keys: Tensor, values: Tensor, mask: Tensor | None, params: AttentionParams
) -> Tensor:
    """Attend with softcap and sinks: query [B, kv_heads, Q * repeats, dim], mask [B, 1, .., L]."""
    scores = query @ keys.transpose(-1, -2) * params.scaling
    if params.softcap is not None:
        scores = torch.tanh(scores / params.softcap) * params.softcap
    if mask is not None:
        scores = scores + mask
    if params.sinks is None:
        return scores.softmax(dim=-1) @ values
    # The sinks are one more column of scores, [kv_heads, repeats] for the heads.
    rows, kv_heads, queries, _ = scores.shape
    sinks = params.sinks.to(scores.dtype).view(kv_heads, 1, -1)
    column = sinks.expand(-1, queries // sinks.shape[2], -1).reshape(kv_heads, queries, 1)
    scores = torch.cat((scores, column.expand(rows, -1, -1, -1)), dim=-1)
    return scores.softmax(dim=-1)[..., :-1] @ values
