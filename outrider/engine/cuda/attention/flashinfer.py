"""FlashInfer over pages; the host plans its kernels for every step."""

from __future__ import annotations

from typing import Any, ClassVar

import numpy as np
import torch
from flashinfer import BatchPrefillWithPagedKVCacheWrapper
from torch import Tensor

from outrider.engine.attention.base import AttentionParams
from outrider.engine.batch import PackedBatch
from outrider.engine.kv_cache.pools import LayerPool

_WORKSPACE_BYTES = 128 * 2**20  # FlashInfer's recommendation


class FlashInferBackend:
    """An `AttentionBackend` whose kernels nvcc compiles at their first use.

    Plans share buffers, so steps must run one after the other on one stream.
    """

    capturable: ClassVar[bool] = False

    def __init__(self, device: torch.device) -> None:
        self.workspace = torch.empty(_WORKSPACE_BYTES, dtype=torch.uint8, device=device)
        self.wrappers: dict[tuple[Any, ...], Any] = {}

    def __call__(self, batch: PackedBatch) -> FlashInferAttention:
        return FlashInferAttention(batch, self)


class FlashInferAttention:
    """Implements `StepAttention`; plans each kind of layer (window, softcap, shape) once."""

    def __init__(self, batch: PackedBatch, backend: FlashInferBackend) -> None:
        self._batch = batch
        self._backend = backend
        self._planned: set[tuple[Any, ...]] = set()
        self._layout = _ragged(batch)

    @property
    def batch(self) -> PackedBatch:
        return self._batch

    def attend(self, query: Tensor, pool: LayerPool, params: AttentionParams) -> Tensor:
        window, kind = params.sliding_window, (params.scaling, params.softcap)
        key = (*query.shape[1:], query.dtype, self._batch.page_size, window, *kind)
        wrappers = self._backend.wrappers
        if key not in self._planned:
            if key not in wrappers:
                wrappers[key] = BatchPrefillWithPagedKVCacheWrapper(
                    self._backend.workspace, "NHD", backend="fa2"
                )
            wrappers[key].plan(
                *self._layout,
                num_qo_heads=query.shape[1] * query.shape[2],
                num_kv_heads=query.shape[1],
                head_dim_qk=query.shape[3],
                page_size=self._batch.page_size,
                causal=True,
                sm_scale=params.scaling,
                window_left=-1 if window is None else window - 1,
                logits_soft_cap=params.softcap,
                q_data_type=query.dtype,
            )
            self._planned.add(key)
        out: Tensor = wrappers[key].run(query.flatten(1, 2), (pool.keys, pool.values))
        return out.view(query.shape)


def _ragged(batch: PackedBatch) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """Return FlashInfer's first four arguments, made on the host without a device sync."""
    lens = np.asarray(batch.context_lens, np.int32)
    pages = -(-lens // batch.page_size)
    starts = np.concatenate([[0], np.cumsum(pages)]).astype(np.int32)
    query_starts = np.concatenate([[0], np.cumsum(batch.query_lens)]).astype(np.int32)
    table = batch.block_table
    at = np.arange(starts[-1]) + np.repeat(
        np.arange(len(lens)) * table.shape[1] - starts[:-1], pages
    )
    indices = table.flatten()[torch.from_numpy(at).to(table.device, non_blocking=True)]
    last = lens - (pages - 1) * batch.page_size
    return (
        torch.from_numpy(query_starts),
        torch.from_numpy(starts),
        indices,
        torch.from_numpy(last),
    )
