"""The paged KV pools, and the `transformers` Cache that writes to them.

A pool holds one layer: a flat row per token slot, the key's numbers first and the value's after
them, so that one copy writes a token and one gather reads it. Slot = page * page_size + offset.
Multi-head latent attention stores its latents the same way (one "head" each).
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor
from transformers.cache_utils import Cache

if TYPE_CHECKING:
    from outrider.engine.attention import StepContext


class LayerPool:
    """Keys and values of one layer for all pages.

    `data` is [num_slots, num_kv_heads * (key_dim + value_dim)]; `keys` and `values` are views
    [num_slots, num_kv_heads, dim] of it.
    """

    def __init__(
        self,
        num_slots: int,
        num_kv_heads: int,
        key_dim: int,
        value_dim: int,
        dtype: torch.dtype,
        device: torch.device,
    ) -> None:
        self.num_kv_heads = num_kv_heads
        self.key_dim = key_dim
        self.value_dim = value_dim
        width = num_kv_heads * (key_dim + value_dim)
        # Zeros, because slots past a row's end are read and masked: 0 * garbage could be NaN.
        self.data = torch.zeros(num_slots, width, dtype=dtype, device=device)
        self.keys, self.values = self.split(self.data)

    def split(self, rows: Tensor) -> tuple[Tensor, Tensor]:
        """Views rows [n, width] as keys [n, heads, key_dim] and values [n, heads, value_dim]."""
        n = rows.shape[0]
        key_width = self.num_kv_heads * self.key_dim
        keys = rows[:, :key_width].view(n, self.num_kv_heads, self.key_dim)
        values = rows[:, key_width:].view(n, self.num_kv_heads, self.value_dim)
        return keys, values


class KVPools:
    """One `LayerPool` per layer, allocated when the layer's shapes are first known."""

    def __init__(
        self, num_pages: int, page_size: int, dtype: torch.dtype, device: torch.device
    ) -> None:
        self.num_pages = num_pages
        self.page_size = page_size
        self._dtype = dtype
        self._device = device
        self._layers: dict[int, LayerPool] = {}

    def layer(self, layer_idx: int) -> LayerPool:
        """The pool of a layer that has been allocated."""
        return self._layers[layer_idx]

    def allocate(
        self, layer_idx: int, num_kv_heads: int, key_dim: int, value_dim: int
    ) -> LayerPool:
        """The layer's pool, new or (with the same shapes) as it is."""
        pool = self._layers.get(layer_idx)
        if pool is None:
            slots = self.num_pages * self.page_size
            pool = LayerPool(slots, num_kv_heads, key_dim, value_dim, self._dtype, self._device)
            self._layers[layer_idx] = pool
        assert (pool.num_kv_heads, pool.key_dim, pool.value_dim) == (
            num_kv_heads,
            key_dim,
            value_dim,
        )
        return pool

    @property
    def bytes_per_page(self) -> int:
        """Bytes that one page takes in all allocated layers."""
        return self.page_size * sum(
            pool.data.shape[1] * pool.data.element_size() for pool in self._layers.values()
        )


class PagedCache(Cache):  # type: ignore[misc]
    """What the modules of `transformers` see as `past_key_values` during one forward.

    `update` writes the new keys and values by `slot_mapping`. Attention reads the pool itself, so
    what is returned is what came in, except for latent attention (`latent=True`), whose modules
    expand what `update` returns into heads: they get the gathered latents.
    """

    def __init__(self, pools: KVPools, *, latent: bool) -> None:
        super().__init__(layers=[])
        self._pools = pools
        self._latent = latent
        self._context: StepContext | None = None

    def begin(self, context: StepContext) -> None:
        """Points the cache at the step that is about to run."""
        self._context = context

    def update(
        self, key_states: Tensor, value_states: Tensor, layer_idx: int, *_: Any, **__: Any
    ) -> tuple[Tensor, Tensor]:
        """Writes keys [1, heads, T, key_dim] and values [1, heads, T, value_dim] of the step."""
        assert self._context is not None, "begin() comes first"
        heads, tokens, key_dim = key_states.shape[1:]
        pool = self._pools.allocate(layer_idx, heads, key_dim, value_states.shape[-1])
        slots = self._context.batch.slot_mapping
        rows = torch.cat(
            (
                key_states[0].transpose(0, 1).reshape(tokens, -1),
                value_states[0].transpose(0, 1).reshape(tokens, -1),
            ),
            dim=1,
        )
        pool.data.index_copy_(0, slots, rows)
        if not self._latent:
            return key_states, value_states
        keys, values = pool.split(self._context.gather(pool))
        return keys.transpose(0, 1)[None], values.transpose(0, 1)[None]

    # Positions come from the batch; these answers only have to be harmless.
    def get_seq_length(self, layer_idx: int = 0) -> int:  # noqa: ARG002
        return 0

    def get_mask_sizes(self, query_length: int, layer_idx: int) -> tuple[int, int]:  # noqa: ARG002
        return query_length, 0

    def get_query_offset(self, layer_idx: int = 0) -> int:  # noqa: ARG002
        return 0
