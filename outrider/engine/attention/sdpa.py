"""Attention over gathered pages in plain torch operations, on any device and in any dtype.

Query heads that share a key head are packed into the query dimension, so that keys and values are
read once for all of them.
"""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor

from outrider.engine.attention.base import AttentionParams
from outrider.engine.attention.row_groups import SHORT_QUERY_LEN, RowGroup, RowGroups
from outrider.engine.batch import PackedBatch
from outrider.engine.kv_cache.pools import LayerPool

_MIN_KEYS_FOR_BMM = 512  # in the group; see `_prefers_bmm`


class SdpaAttention:
    """Implements `LatentAttention`; as a callable it is an `AttentionBackend`."""

    def __init__(self, batch: PackedBatch) -> None:
        self._context = RowGroups(batch)

    @property
    def batch(self) -> PackedBatch:
        return self._context.batch

    @property
    def all_slots(self) -> Tensor:
        return self._context.all_slots

    def attend(self, query: Tensor, pool: LayerPool, params: AttentionParams) -> Tensor:
        parts = [
            _attend_group(query, *pool.gather(group.slots), group, params)
            for group in self._context.groups
        ]
        return self._context.restore(parts)

    def attend_expanded(
        self, query: Tensor, keys: Tensor, values: Tensor, params: AttentionParams
    ) -> Tensor:
        groups = self._context.groups
        sizes = [len(group.slots) for group in groups]
        parts = [
            _attend_group(query, group_keys, group_values, group, params)
            for group_keys, group_values, group in zip(
                torch.split(keys, sizes, dim=1),
                torch.split(values, sizes, dim=1),
                groups,
                strict=True,
            )
        ]
        return self._context.restore(parts)


def _attend_group(
    query: Tensor, keys: Tensor, values: Tensor, group: RowGroup, params: AttentionParams
) -> Tensor:
    """Attend to keys [kv_heads, B * L, dim]; return the group's tokens without padding."""
    kv_heads, repeats, dim = query.shape[1:]
    rows, value_dim = group.num_rows, values.shape[-1]
    if group.query_index is not None:
        query = query.index_select(0, group.query_index)
    query = query.view(rows, -1, kv_heads, repeats, dim)
    if _prefers_bmm(query, group, params):
        packed = query.permute(2, 0, 1, 3, 4).reshape(kv_heads * rows, -1, dim)
        out = _attend_by_bmm(
            packed,
            keys.reshape(kv_heads * rows, -1, dim),
            values.reshape(kv_heads * rows, -1, value_dim),
            group.head_major_mask(params.sliding_window, kv_heads, repeats, packed.dtype),
            params,
            repeats,
        )
        out = out.view(kv_heads, rows, -1, repeats, value_dim).permute(1, 2, 0, 3, 4)
    else:
        packed = query.transpose(1, 2).reshape(rows, kv_heads, -1, dim)
        out = F.scaled_dot_product_attention(
            packed,
            keys.view(kv_heads, rows, -1, dim).transpose(0, 1),
            values.view(kv_heads, rows, -1, value_dim).transpose(0, 1),
            group.mask(params.sliding_window, repeats, packed.dtype),
            scale=params.scaling,
        )
        out = out.view(rows, kv_heads, -1, repeats, value_dim).transpose(1, 2)
    out = out.reshape(-1, kv_heads, repeats, value_dim)
    return out if group.unpad_index is None else out.index_select(0, group.unpad_index)


def _prefers_bmm(query: Tensor, group: RowGroup, params: AttentionParams) -> bool:
    """Return whether batched products replace the fused kernel.

    The fused kernel supports neither softcap nor sinks, and on a CPU it gains nothing from
    bfloat16.
    """
    if params.softcap is not None or params.sinks is not None:
        return True
    fits = group.max_query_len <= SHORT_QUERY_LEN and len(group.slots) >= _MIN_KEYS_FOR_BMM
    return fits and query.dtype is torch.bfloat16 and query.device.type == "cpu"


def _attend_by_bmm(
    query: Tensor,
    keys: Tensor,
    values: Tensor,
    mask: Tensor,
    params: AttentionParams,
    repeats: int,
) -> Tensor:
    """Attend with query [N, Q * repeats, dim], keys [N, L, dim], and N = kv_heads * B.

    The mask is [N, Q * repeats, L].
    """
    scaling = params.scaling
    if params.softcap is None:
        scores = torch.baddbmm(mask, query, keys.transpose(1, 2), alpha=scaling)
    else:
        scores = torch.bmm(query, keys.transpose(1, 2)) * (scaling / params.softcap)
        scores = torch.tanh(scores) * params.softcap + mask
    if params.sinks is not None:
        # The sinks are one more column of scores, [kv_heads, repeats] for the heads.
        kv_heads = len(params.sinks) // repeats
        sinks = params.sinks.to(scores.dtype).view(kv_heads, 1, 1, repeats, 1)
        shape = (kv_heads, len(scores) // kv_heads, scores.shape[1] // repeats, repeats, 1)
        column = sinks.expand(shape).reshape(len(scores), -1, 1)
        return torch.bmm(torch.cat((scores, column), dim=-1).softmax(dim=-1)[..., :-1], values)
    return torch.bmm(scores.softmax(dim=-1), values)
