"""Attention over paged keys and values, behind one small protocol.

Rows of a step are put into few groups: short rows (decode and verification) share one padded call,
long ones (prefill chunks) get a call each. Gather indices and masks are made once per step and
used by every layer. Within a call the query heads that share a key head are packed into the query
dimension: one K/V read serves them all, and it is 1.3-12 times faster on CPU than a call per head.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, Protocol

import torch
import torch.nn.functional as F
from torch import Tensor

from outrider.engine.batch import PackedBatch
from outrider.engine.kv_cache import LayerPool

ATTENTION_NAME = "outrider_paged"
SHORT_QUERY_LEN = 16  # rows with at most this many new tokens share a padded call


@dataclass(frozen=True, slots=True)
class AttentionParams:
    """What a layer asks of attention besides its tensors."""

    scaling: float
    sliding_window: int | None = None  # keys a query sees at most, itself included
    softcap: float | None = None
    sinks: Tensor | None = None  # [num_heads]: a logit per head that takes weight and gives nothing


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
        self._even = min(context_lens) == self.max_context_len
        picked = None if whole else torch.tensor(rows, device=device)
        self._table = batch.block_table if picked is None else batch.block_table[picked]
        self._context = batch.seq_lens if picked is None else batch.seq_lens[picked]
        if self.num_rows == 1:
            self._table = self._table[:, : -(-self.max_context_len // batch.page_size)]
        padded = min(query_lens) < self.max_query_len
        self.query_index: Tensor | None = None  # [B * Q] tokens of the batch; None: all, in order
        self.unpad_index: Tensor | None = None  # [tokens] of [B * Q]; None: all, in order
        if padded or not whole:
            starts = batch.cu_seqlens_q[:-1] if picked is None else batch.cu_seqlens_q[picked]
            lens = torch.tensor(query_lens, device=device)[:, None]
            steps = torch.arange(self.max_query_len, device=device)[None]
            # A padded query repeats the row's last one.
            self.query_index = (starts[:, None] + torch.minimum(steps, lens - 1)).flatten()
            if padded:
                self.unpad_index = (steps < lens).flatten().nonzero().flatten()
            self._positions = batch.positions[self.query_index].view(self.num_rows, -1)
        else:
            self._positions = batch.positions.view(self.num_rows, -1)
        self.slots = self._slots(batch.page_size)  # [B * L]
        self._masks: dict[tuple[int | None, int, torch.dtype], Tensor | None] = {}

    def _slots(self, page_size: int) -> Tensor:
        keys = torch.arange(self.max_context_len, device=self._table.device)
        if self._even:
            pages = self._table.index_select(1, keys // page_size)
            return (pages * page_size + keys % page_size).flatten()
        # Past its end a row reads its own last key: another row's numbers must not reach it.
        keys = torch.minimum(keys[None], self._context[:, None] - 1).to(torch.int64)
        pages = self._table.gather(1, keys // page_size)
        return (pages * page_size + keys % page_size).flatten()

    def mask(self, window: int | None, repeats: int, dtype: torch.dtype) -> Tensor | None:
        """Additive mask [B, 1, Q * repeats, L], each query `repeats` times; None if all is seen."""
        if window is not None and window >= self.max_context_len:
            window = None
        key = (window, repeats, dtype)
        if key not in self._masks:
            self._masks[key] = self._make_mask(window, repeats, dtype)
        return self._masks[key]

    def _make_mask(self, window: int | None, repeats: int, dtype: torch.dtype) -> Tensor | None:
        if window is None and self._even and self.max_query_len == 1:
            return None
        keys = torch.arange(self.max_context_len, device=self.slots.device)
        queries = self._positions[:, :, None]
        hidden = keys > queries  # [B, Q, L]
        if window is not None:
            hidden |= keys <= queries - window
        mask = torch.zeros(hidden.shape, dtype=dtype, device=hidden.device)
        mask.masked_fill_(hidden, float("-inf"))
        if repeats > 1:
            mask = mask.repeat_interleave(repeats, dim=1)
        return mask[:, None]


class StepContext:
    """All that attention needs to know about one step; made once, used by every layer."""

    def __init__(self, batch: PackedBatch) -> None:
        self.batch = batch
        lens = batch.query_lens
        short = tuple(i for i, n in enumerate(lens) if n <= SHORT_QUERY_LEN)
        long = tuple((i,) for i, n in enumerate(lens) if n > SHORT_QUERY_LEN)
        self.groups = [RowGroup(batch, rows) for rows in ((short,) if short else ()) + long]
        self._restore: Tensor | None = None  # [num_tokens]: from group order to batch order
        self._slots: Tensor | None = None
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
        """Joins the groups' outputs [tokens, ...] in the order of the batch."""
        if self._restore is None:
            return parts[0]
        joined = parts[0] if len(parts) == 1 else torch.cat(parts)
        return joined.index_select(0, self._restore)

    def gather(self, pool: LayerPool) -> Tensor:
        """All groups' key/value rows, one after the other: [sum of B * L, width]."""
        if self._slots is None:
            self._slots = torch.cat([group.slots for group in self.groups])
        return pool.data.index_select(0, self._slots)


class AttentionBackend(Protocol):
    """Attention of one layer over its pool."""

    def attend(
        self, query: Tensor, pool: LayerPool, context: StepContext, params: AttentionParams
    ) -> Tensor:
        """Query [tokens, group, num_kv_heads, key_dim] to [tokens, group, num_kv_heads, value_dim].

        `group` is the number of query heads per key head. The step's own keys and values are
        already in the pool.
        """
        ...

    def attend_expanded(
        self,
        query: Tensor,
        keys: Tensor,
        values: Tensor,
        context: StepContext,
        params: AttentionParams,
    ) -> Tensor:
        """The same over keys and values [n, heads, dim] that were expanded from
        `context.gather()`, for latent attention."""
        ...


class SdpaBackend:
    """`scaled_dot_product_attention` over gathered pages: any device, any dtype."""

    def attend(
        self, query: Tensor, pool: LayerPool, context: StepContext, params: AttentionParams
    ) -> Tensor:
        parts = []
        for group in context.groups:
            rows = pool.data.index_select(0, group.slots)
            keys, values = pool.split(rows)
            parts.append(_attend_group(query, keys, values, group, params))
        return context.restore(parts)

    def attend_expanded(
        self,
        query: Tensor,
        keys: Tensor,
        values: Tensor,
        context: StepContext,
        params: AttentionParams,
    ) -> Tensor:
        sizes = [len(group.slots) for group in context.groups]
        parts = [
            _attend_group(query, group_keys, group_values, group, params)
            for group_keys, group_values, group in zip(
                torch.split(keys, sizes), torch.split(values, sizes), context.groups, strict=True
            )
        ]
        return context.restore(parts)


def _attend_group(
    query: Tensor, keys: Tensor, values: Tensor, group: RowGroup, params: AttentionParams
) -> Tensor:
    repeats, kv_heads = query.shape[1], query.shape[2]
    rows, value_dim = group.num_rows, values.shape[-1]
    if group.query_index is not None:
        query = query.index_select(0, group.query_index)
    # [B, kv_heads, Q * repeats, dim] and [B, kv_heads, L, dim]
    packed = query.reshape(rows, -1, kv_heads, query.shape[-1]).transpose(1, 2)
    keys = keys.view(rows, -1, kv_heads, keys.shape[-1]).transpose(1, 2)
    values = values.view(rows, -1, kv_heads, value_dim).transpose(1, 2)
    mask = group.mask(params.sliding_window, repeats, packed.dtype)
    if params.softcap is None and params.sinks is None:
        out = F.scaled_dot_product_attention(packed, keys, values, mask, scale=params.scaling)
    else:
        out = _attend_by_hand(packed, keys, values, mask, params, repeats)
    out = out.transpose(1, 2).reshape(-1, repeats, kv_heads, value_dim)
    return out if group.unpad_index is None else out.index_select(0, group.unpad_index)


def _attend_by_hand(
    query: Tensor,
    keys: Tensor,
    values: Tensor,
    mask: Tensor | None,
    params: AttentionParams,
    repeats: int,
) -> Tensor:
    scores = torch.matmul(query, keys.transpose(2, 3)) * params.scaling
    if params.softcap is not None:
        scores = torch.tanh(scores / params.softcap) * params.softcap
    if mask is not None:
        scores = scores + mask
    wide = scores.to(torch.promote_types(scores.dtype, torch.float32))
    if params.sinks is None:
        weights = wide.softmax(dim=-1)
    else:
        kv_heads = query.shape[1]
        per_head = params.sinks.to(wide.dtype).view(kv_heads, 1, repeats)  # head = kv * repeats + r
        column = per_head.expand(kv_heads, query.shape[2] // repeats, repeats)
        column = column.reshape(1, kv_heads, -1, 1).expand(query.shape[0], -1, -1, -1)
        weights = torch.cat((wide, column), dim=-1).softmax(dim=-1)[..., :-1]
    return torch.matmul(weights.to(values.dtype), values)


@dataclass(frozen=True, slots=True)
class PagedStep:
    """The one keyword that our attention function receives through the modules."""

    context: StepContext
    backend: AttentionBackend
    pool_of: Any  # layer_idx -> LayerPool, or None for latent attention


def paged_attention_forward(
    module: torch.nn.Module,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attention_mask: Tensor | None,  # noqa: ARG001
    *,
    paged: PagedStep,
    scaling: float | None = None,
    sliding_window: int | None = None,
    softcap: float | None = None,
    s_aux: Tensor | None = None,
    **_: Any,
) -> tuple[Tensor, None]:
    """The function registered with `transformers`: query [1, H, T, D] to [1, T, H, Dv]."""
    heads, tokens, dim = query.shape[1:]
    params = AttentionParams(
        scaling=dim**-0.5 if scaling is None else scaling,
        sliding_window=sliding_window,
        softcap=softcap,
        sinks=s_aux,
    )
    kv_heads = key.shape[1]
    grouped = query[0].view(kv_heads, heads // kv_heads, tokens, dim).permute(2, 1, 0, 3)
    if paged.pool_of is not None:
        pool = paged.pool_of(module.layer_idx)
        out = paged.backend.attend(grouped, pool, paged.context, params)
    else:
        keys, values = key[0].transpose(0, 1), value[0].transpose(0, 1)
        out = paged.backend.attend_expanded(grouped, keys, values, paged.context, params)
    return out.transpose(1, 2).reshape(1, tokens, heads, -1), None
