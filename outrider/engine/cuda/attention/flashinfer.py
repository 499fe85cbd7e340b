"""FlashInfer over pages. Its kernels follow a plan that the host makes for every step."""

from __future__ import annotations

from typing import Any, ClassVar

import numpy as np
import torch
from flashinfer import BatchPrefillWithPagedKVCacheWrapper
from torch import Tensor

from outrider.engine.attention.base import AttentionParams
from outrider.engine.batch import PackedBatch
from outrider.engine.kv_cache.pools import LayerPool

_WORKSPACE_BYTES = 128 * 2**20  # for the parts of divided rows; FlashInfer's recommendation


class FlashInferBackend:
    """An `AttentionBackend`. Kernels are compiled with nvcc at their first use (20 s), then cached.

    Steps must run one after the other on one stream: their plans share buffers.
    """

    capturable: ClassVar[bool] = False

    def __init__(self, device: torch.device) -> None:
        self.workspace = torch.empty(_WORKSPACE_BYTES, dtype=torch.uint8, device=device)
        self.wrappers: dict[tuple[Any, ...], Any] = {}

    def __call__(self, batch: PackedBatch) -> FlashInferAttention:
        return FlashInferAttention(batch, self)


class FlashInferAttention:
    """Implements `StepAttention`. A kind of layer (window, softcap, shape) is planned when met.

    With `graph=True` the plan lives in buffers of its own: run once, then capture. A replay is of
    the same step.
    """

    def __init__(
        self, batch: PackedBatch, backend: FlashInferBackend, *, graph: bool = False
    ) -> None:
        self._batch = batch
        self._backend = backend
        self._wrappers: dict[tuple[Any, ...], Any] = {} if graph else backend.wrappers
        self._graph = graph
        self._planned: set[tuple[Any, ...]] = set()
        self._layout = _ragged(batch)

    @property
    def batch(self) -> PackedBatch:
        return self._batch

    def attend(self, query: Tensor, pool: LayerPool, params: AttentionParams) -> Tensor:
        window, kind = params.sliding_window, (params.scaling, params.softcap)
        key = (*query.shape[1:], query.dtype, self._batch.page_size, window, *kind)
        if key not in self._planned:
            if key not in self._wrappers:
                self._wrappers[key] = self._wrapper()
            self._wrappers[key].plan(
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
        out: Tensor = self._wrappers[key].run(query.flatten(1, 2), (pool.keys, pool.values))
        return out.view(query.shape)

    def _wrapper(self) -> Any:
        buffers: dict[str, Any] = {}
        if self._graph:
            rows, pages = self._batch.block_table.shape

            def buffer(size: int) -> Tensor:
                return torch.zeros(size, dtype=torch.int32, device=self._batch.block_table.device)

            buffers = {
                "use_cuda_graph": True,
                "qo_indptr_buf": buffer(rows + 1),
                "paged_kv_indptr_buf": buffer(rows + 1),
                "paged_kv_indices_buf": buffer(rows * pages),
                "paged_kv_last_page_len_buf": buffer(rows),
            }
        return BatchPrefillWithPagedKVCacheWrapper(
            self._backend.workspace, "NHD", backend="fa2", **buffers
        )


def _ragged(batch: PackedBatch) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """FlashInfer's first four arguments: all on the host, but the rows' pages one after the other.

    Made of the host's lengths, so that nothing waits for the device.
    """
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
