"""The paged KV pools.

Multi-head latent attention stores its latents as one "head" each, of different widths.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Iterator
from functools import partial

import torch
from torch import Tensor

from outrider.engine.kv_cache import fp8
from outrider.engine.kv_cache.hidden_states import HiddenStatePool
from outrider.engine.kv_cache.memory import move, zeros
from outrider.features import FeatureSpec


class LayerPool(ABC):
    """Keys and values of one layer; slot = page * page_size + offset.

    They have the model's dtype, or are float8 with a scale for each token and head.
    """

    keys: Tensor
    values: Tensor
    joint: Tensor | None
    """Keys and values [2, ...] if they are equally wide."""
    scales: Tensor | None
    """bfloat16 [..., 2]: of a slot and head, the key's and the value's. None: not rounded."""
    shape: tuple[int, int, int]
    """(num_kv_heads, key_dim, value_dim)"""

    def __init__(
        self,
        num_pages: int,
        page_size: int,
        shape: tuple[int, int, int],
        dtype: torch.dtype,
        device: torch.device,
        *,
        float8: bool = False,
    ) -> None:
        """Store `dtype`, the model's, or float8."""
        self.shape = shape
        self._page_size = page_size
        self._dtype = dtype
        self._stored = fp8.NUMBERS if float8 else dtype
        self._device = device
        self.resize(num_pages)

    def resize(
        self, num_pages: int, joint: Tensor | None = None, scales: Tensor | None = None
    ) -> None:
        """Hold `num_pages` pages of zeros from now on, or `joint` and `scales` if given."""
        # Slots past a row's end are read and masked, and 0 * garbage could be NaN.
        make = partial(zeros, dtype=self._stored, device=self._device)
        heads, key_dim, value_dim = self.shape
        size = self.layout(num_pages, self._page_size, heads)
        if joint is None and key_dim == value_dim:
            joint = make(2, *size, key_dim)
        if scales is None and self._stored is fp8.NUMBERS:
            scales = make(*size, 2, dtype=fp8.SCALES)
        self.joint, self.scales = joint, scales
        if joint is not None:
            self.keys, self.values = joint
        else:
            self.keys, self.values = make(*size, key_dim), make(*size, value_dim)

    @staticmethod
    @abstractmethod
    def layout(num_pages: int, page_size: int, heads: int) -> tuple[int, ...]:
        """Return the shape of keys or values, without their width."""

    @property
    def bytes_per_slot(self) -> int:
        """Bytes of one token in this layer."""
        heads, key_dim, value_dim = self.shape
        scales = 0 if self.scales is None else 2 * heads * fp8.SCALES.itemsize
        return heads * (key_dim + value_dim) * self._stored.itemsize + scales

    def write(self, slots: Tensor, keys: Tensor, values: Tensor) -> None:
        """Store keys [n, heads, key_dim] and values [n, heads, value_dim] in `slots` int64 [n]."""
        if self.scales is None:
            self._put(self.keys, slots, keys)
            self._put(self.values, slots, values)
            return
        scales = []
        for stored, vectors in ((self.keys, keys), (self.values, values)):
            numbers, scale = fp8.quantise(vectors)
            self._put(fp8.as_bytes(stored), slots, fp8.as_bytes(numbers))
            scales.append(scale)
        self._put(self.scales, slots, torch.stack(scales, dim=-1))

    def gather(self, slots: Tensor) -> tuple[Tensor, Tensor]:
        """Copy the keys [heads, n, key_dim] and values [.., value_dim] of `slots` [n].

        They have the model's dtype.
        """
        if self.scales is None:
            return self._take(self.keys, slots), self._take(self.values, slots)
        numbers = (self._take(fp8.as_bytes(each), slots) for each in (self.keys, self.values))
        keys, values = (
            fp8.dequantise(each.view(fp8.NUMBERS), scales, self._dtype)
            for each, scales in zip(numbers, self._take(self.scales, slots).unbind(-1), strict=True)
        )
        return keys, values

    @abstractmethod
    def _put(self, pool: Tensor, slots: Tensor, rows: Tensor) -> None:
        """Store rows [n, heads, ...] in keys, values or the scales of either."""

    @abstractmethod
    def _take(self, pool: Tensor, slots: Tensor) -> Tensor:
        """Copy rows [heads, n, ...] of keys, values or the scales of either."""


class HeadMajorPool(LayerPool):
    """Keys [num_kv_heads, num_slots, key_dim] and values [.., value_dim], for a CPU.

    A gather is contiguous per head, as batched products need it.
    """

    @staticmethod
    def layout(num_pages: int, page_size: int, heads: int) -> tuple[int, ...]:
        return heads, num_pages * page_size

    def gather(self, slots: Tensor) -> tuple[Tensor, Tensor]:
        if self.joint is None or self.scales is not None:
            return super().gather(slots)
        keys, values = self.joint.index_select(2, slots)
        return keys, values

    def _put(self, pool: Tensor, slots: Tensor, rows: Tensor) -> None:
        pool.index_copy_(1, slots, rows.transpose(0, 1))

    def _take(self, pool: Tensor, slots: Tensor) -> Tensor:
        return pool.index_select(1, slots)


class PageMajorPool(LayerPool):
    """Keys and values [num_pages, page_size, num_kv_heads, dim], for GPU kernels."""

    @staticmethod
    def layout(num_pages: int, page_size: int, heads: int) -> tuple[int, ...]:
        return num_pages, page_size, heads

    def _put(self, pool: Tensor, slots: Tensor, rows: Tensor) -> None:
        pool.flatten(0, 1).index_copy_(0, slots, rows)

    def _take(self, pool: Tensor, slots: Tensor) -> Tensor:
        return pool.flatten(0, 1).index_select(0, slots).transpose(0, 1).contiguous()


class KVPools:
    """One `LayerPool` per layer, allocated when the layer's shapes are first known.

    `page_major` chooses the layout, by default that of the device. Given `num_layers`, all layers
    have one shape, with keys as wide as values, and share one tensor, so that a page is copied in
    all layers at once. `features` are hidden states to keep in the same slots. With `float8` keys
    and values are stored in 8 bits, and `dtype` is the model's.
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
        float8: bool = False,
    ) -> None:
        self.num_pages = num_pages
        self.page_size = page_size
        self._dtype = dtype
        self._device = device
        self._page_major = device.type == "cuda" if page_major is None else page_major
        self._kind = PageMajorPool if self._page_major else HeadMajorPool
        self._num_layers = num_layers
        self._float8 = float8
        self.joint: Tensor | None = None  # [num_layers, 2, ...]; None: the layers have their own
        self._joint_scales: Tensor | None = None  # [num_layers, ...]
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
            settings = (self.page_size, shape, self._dtype, self._device)
            pool = self._kind(0, *settings, float8=self._float8)
            pool.resize(self.num_pages, *self._joint_of(layer_idx, shape))
            self._layers[layer_idx] = pool
        assert pool.shape == shape
        return pool

    def resize(self, num_pages: int) -> None:
        """Give every layer `num_pages` pages of zeros in place of its own."""
        self.joint = self._joint_scales = None
        for pool in self._layers.values():
            pool.resize(0)  # frees the old pages before the new ones are allocated
        if self.features is not None:
            self.features.resize(0)
        if self._device.type == "cuda":
            torch.cuda.empty_cache()
        self.num_pages = num_pages
        for layer_idx, pool in self._layers.items():
            pool.resize(num_pages, *self._joint_of(layer_idx, pool.shape))
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
        before = 0 if self._page_major else 1
        if self.joint is not None:
            yield self.joint, self.joint.shape[: 2 + before].numel()
        if self._joint_scales is not None:
            yield self._joint_scales, self._joint_scales.shape[: 1 + before].numel()
        for pool in () if self.joint is not None else self._layers.values():
            for part in (pool.keys, pool.values, pool.scales):
                if part is not None:
                    yield part, part.shape[:before].numel()
        if self.features is not None:
            yield self.features.rows, 1

    def _joint_of(
        self, layer_idx: int, shape: tuple[int, int, int]
    ) -> tuple[Tensor | None, Tensor | None]:
        if self._num_layers is None:
            return None, None
        heads, key_dim, value_dim = shape
        assert key_dim == value_dim
        if self.joint is None:
            size = self._kind.layout(self.num_pages, self.page_size, heads)
            make = partial(zeros, self._num_layers, device=self._device)
            stored = fp8.NUMBERS if self._float8 else self._dtype
            self.joint = make(2, *size, key_dim, dtype=stored)
            self._joint_scales = make(*size, 2, dtype=fp8.SCALES) if self._float8 else None
        scales = self._joint_scales
        return self.joint[layer_idx], None if scales is None else scales[layer_idx]

    @property
    def bytes_per_page(self) -> int:
        """Bytes of one page in all allocated layers, hidden states included."""
        features = 0 if self.features is None else self.features.bytes_per_slot
        layers = sum(pool.bytes_per_slot for pool in self._layers.values())
        return self.page_size * (layers + features)
