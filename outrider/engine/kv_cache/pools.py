"""The paged KV pools.

Multi-head latent attention stores its latents as one "head" each, of different widths.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Iterator

import torch
from torch import Tensor

from outrider.engine.kv_cache.hidden_states import HiddenStatePool
from outrider.engine.kv_cache.memory import move, zeros
from outrider.features import FeatureSpec


class LayerPool(ABC):
    """Keys and values of one layer; slot = page * page_size + offset."""

    keys: Tensor
    values: Tensor
    shape: tuple[int, int, int]
    """(num_kv_heads, key_dim, value_dim)"""

    def __init__(
        self,
        num_pages: int,
        page_size: int,
        shape: tuple[int, int, int],
        dtype: torch.dtype,
        device: torch.device,
        joint: Tensor | None = None,
    ) -> None:
        self.shape = shape
        self._page_size = page_size
        self._dtype = dtype
        self._device = device
        self.resize(num_pages, joint)

    @abstractmethod
    def resize(self, num_pages: int, joint: Tensor | None = None) -> None:
        """Hold `num_pages` pages of zeros from now on, or `joint` if it is given."""

    @property
    def bytes_per_slot(self) -> int:
        """Bytes of one token in this layer."""
        heads, key_dim, value_dim = self.shape
        return heads * (key_dim + value_dim) * self._dtype.itemsize

    @abstractmethod
    def write(self, slots: Tensor, keys: Tensor, values: Tensor) -> None:
        """Store keys [n, heads, key_dim] and values [n, heads, value_dim] in `slots` int64 [n]."""

    @abstractmethod
    def gather(self, slots: Tensor) -> tuple[Tensor, Tensor]:
        """Copy the keys [heads, n, key_dim] and values [.., value_dim] of `slots` [n]."""

    def _zeros(self, *shape: int) -> Tensor:
        # Slots past a row's end are read and masked, and 0 * garbage could be NaN.
        return zeros(*shape, dtype=self._dtype, device=self._device)


class HeadMajorPool(LayerPool):
    """Keys [num_kv_heads, num_slots, key_dim] and values [.., value_dim], for a CPU.

    A gather is contiguous per head, as batched products need it. Keys and values of equal width
    are the halves of `joint` [2 * num_kv_heads, num_slots, dim].
    """

    joint: Tensor | None

    def resize(self, num_pages: int, joint: Tensor | None = None) -> None:
        heads, key_dim, value_dim = self.shape
        num_slots = num_pages * self._page_size
        if joint is None and key_dim == value_dim:
            joint = self._zeros(2 * heads, num_slots, key_dim)
        self.joint = joint
        if joint is not None:
            self.keys, self.values = joint[:heads], joint[heads:]
        else:
            self.keys = self._zeros(heads, num_slots, key_dim)
            self.values = self._zeros(heads, num_slots, value_dim)

    def write(self, slots: Tensor, keys: Tensor, values: Tensor) -> None:
        self.keys.index_copy_(1, slots, keys.transpose(0, 1))
        self.values.index_copy_(1, slots, values.transpose(0, 1))

    def gather(self, slots: Tensor) -> tuple[Tensor, Tensor]:
        if self.joint is None:
            return self.keys.index_select(1, slots), self.values.index_select(1, slots)
        both = self.joint.index_select(1, slots)
        return both[: self.shape[0]], both[self.shape[0] :]


class PageMajorPool(LayerPool):
    """Keys and values [num_pages, page_size, num_kv_heads, dim], for GPU kernels.

    They are the halves of `joint` [2, num_pages, ...], if it is given.
    """

    def resize(self, num_pages: int, joint: Tensor | None = None) -> None:
        if joint is not None:
            self.keys, self.values = joint
            return
        heads, key_dim, value_dim = self.shape
        self.keys = self._zeros(num_pages, self._page_size, heads, key_dim)
        self.values = self._zeros(num_pages, self._page_size, heads, value_dim)

    def write(self, slots: Tensor, keys: Tensor, values: Tensor) -> None:
        self.keys.flatten(0, 1).index_copy_(0, slots, keys)
        self.values.flatten(0, 1).index_copy_(0, slots, values)

    def gather(self, slots: Tensor) -> tuple[Tensor, Tensor]:
        keys = self.keys.flatten(0, 1).index_select(0, slots).transpose(0, 1).contiguous()
        values = self.values.flatten(0, 1).index_select(0, slots).transpose(0, 1).contiguous()
        return keys, values


class KVPools:
    """One `LayerPool` per layer, allocated when the layer's shapes are first known.

    `page_major` chooses the layout, by default that of the device. Given `num_layers`, all layers
    have one shape, with keys as wide as values, and share one tensor, so that a page is copied in
    all layers at once. `features` are hidden states to keep in the same slots.
    """

    def __init__(
        self,
        num_pages: int,
        page_size: int,
        dtype: torch.dtype,
        device: torch.device,
        *,
        page_major: bool | None = None,
        num_layers: int | None = None,
        features: FeatureSpec | None = None,
    ) -> None:
        self.num_pages = num_pages
        self.page_size = page_size
        self._dtype = dtype
        self._device = device
        self._page_major = device.type == "cuda" if page_major is None else page_major
        self._num_layers = num_layers
        self._joint: Tensor | None = None  # [num_layers, ...]
        self._layers: dict[int, LayerPool] = {}
        self.features = (
            None if features is None else HiddenStatePool(features, num_pages, page_size, device)
        )

    def layer(self, layer_idx: int) -> LayerPool:
        """Return the pool of a layer that has been allocated."""
        return self._layers[layer_idx]

    def allocate(
        self, layer_idx: int, num_kv_heads: int, key_dim: int, value_dim: int
    ) -> LayerPool:
        """Return the layer's pool, allocated at the first call."""
        shape = (num_kv_heads, key_dim, value_dim)
        pool = self._layers.get(layer_idx)
        if pool is None:
            joint = self._joint_of(layer_idx, shape)
            kind = PageMajorPool if self._page_major else HeadMajorPool
            pool = kind(self.num_pages, self.page_size, shape, self._dtype, self._device, joint)
            self._layers[layer_idx] = pool
        assert pool.shape == shape
        return pool

    def resize(self, num_pages: int) -> None:
        """Give every layer `num_pages` pages of zeros in place of its own."""
        self._joint = None
        for pool in self._layers.values():
            pool.resize(0)  # frees the old pages before the new ones are allocated
        if self.features is not None:
            self.features.resize(0)
        if self._device.type == "cuda":
            torch.cuda.empty_cache()
        self.num_pages = num_pages
        for layer_idx, pool in self._layers.items():
            pool.resize(num_pages, self._joint_of(layer_idx, pool.shape))
        if self.features is not None:
            self.features.resize(num_pages)

    def copy_pages(self, source: Tensor, target: Tensor) -> None:
        """Copy pages `source` int64 [n] to pages `target` [n], in every layer."""
        self._move(self.num_pages, source, target)

    def move_slots(self, source: Tensor, target: Tensor) -> None:
        """Copy slots `source` int64 [n] to slots `target` [n], in every layer.

        Where two targets are the same, so are their sources.
        """
        self._move(self.num_pages * self.page_size, source, target)

    def _move(self, count: int, source: Tensor, target: Tensor) -> None:
        for tensor, parts in self._tensors():
            move(tensor.view(parts, count, -1), source, target)

    def _tensors(self) -> Iterator[tuple[Tensor, int]]:
        """Yield each tensor, and the product of its dimensions before the pages."""
        if self._joint is not None:
            yield self._joint, self._joint.shape[:2].numel()
        else:
            for pool in self._layers.values():
                for part in (pool.keys, pool.values):
                    yield part, 1 if self._page_major else len(part)
        if self.features is not None:
            yield self.features.rows, 1

    def _joint_of(self, layer_idx: int, shape: tuple[int, int, int]) -> Tensor | None:
        if self._num_layers is None:
            return None
        heads, key_dim, value_dim = shape
        assert key_dim == value_dim
        if self._joint is None:
            size = (
                (2, self.num_pages, self.page_size, heads, key_dim)
                if self._page_major
                else (2 * heads, self.num_pages * self.page_size, key_dim)
            )
            self._joint = zeros(self._num_layers, *size, dtype=self._dtype, device=self._device)
        return self._joint[layer_idx]

    @property
    def bytes_per_page(self) -> int:
        """Bytes of one page in all allocated layers, hidden states included."""
        features = 0 if self.features is None else self.features.bytes_per_slot
        layers = sum(pool.bytes_per_slot for pool in self._layers.values())
        return self.page_size * (layers + features)
