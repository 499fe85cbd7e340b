"""A loaded model that runs packed batches: the `Model` of `outrider.engine.batch`."""

from __future__ import annotations

from contextlib import AbstractContextManager
from dataclasses import dataclass
from typing import Protocol, runtime_checkable

import torch
from torch import Tensor

from outrider.engine.attention.base import AttentionBackend, StepAttention
from outrider.engine.batch import PackedBatch
from outrider.engine.kv_cache.pools import KVPools
from outrider.engine.model.attention_backends import is_capturable


class Network(Protocol):
    """One way to run a model's layers."""

    def forward(self, attention: StepAttention, out: Tensor | None = None) -> Tensor:
        """Return logits [num_logits, vocab_size] in the model's dtype, in `out` if given."""

    def windows_at_most(self, length: int) -> AbstractContextManager[None]:
        """Shorten sliding windows to `length` keys within the context, for a self-test."""


@runtime_checkable
class LayeredNetwork(Network, Protocol):
    """A network whose layers and head can run separately."""

    def hidden(self, attention: StepAttention) -> Tensor:
        """Return the input of `head` for every token: [tokens, hidden]."""

    def head(self, hidden: Tensor, out: Tensor | None = None) -> Tensor:
        """Return logits [n, vocab_size] of `hidden` [n, hidden], in `out` if given."""


@dataclass(frozen=True, slots=True)
class ModelInfo:
    """Facts about a loaded model."""

    name: str
    vocab_size: int
    max_model_len: int
    eos_token_ids: frozenset[int]
    dtype: torch.dtype
    device: torch.device


class PagedModel:
    """A causal language model over a paged KV cache that it owns; implements `Model`.

    The pools hold one page more than `num_pages`: the `scratch_page`, where padding tokens write
    their keys and values. No sequence ever gets that page.
    """

    def __init__(
        self, network: Network, pools: KVPools, backend: AttentionBackend, info: ModelInfo
    ) -> None:
        self.network = network
        self.pools = pools
        self._backend = backend
        self.name = info.name
        self.vocab_size = info.vocab_size
        self.max_model_len = info.max_model_len
        self.eos_token_ids = info.eos_token_ids
        self.dtype = info.dtype
        self.device = info.device
        self.page_size = pools.page_size

    @property
    def num_pages(self) -> int:
        return self.pools.num_pages - 1

    @property
    def scratch_page(self) -> int:
        return self.num_pages

    @property
    def capturable(self) -> bool:
        """True if a CUDA graph can capture the attention."""
        return is_capturable(self._backend)

    @property
    def layered(self) -> bool:
        """True if `hidden` and `head` can be called."""
        return isinstance(self.network, LayeredNetwork)

    def resize(self, num_pages: int) -> None:
        """Give the cache another size; it loses its contents."""
        self.pools.resize(num_pages + 1)

    @property
    def kv_bytes_per_page(self) -> int:
        """Bytes of one page over all layers, hidden states included."""
        return self.pools.bytes_per_page

    @torch.inference_mode()
    def copy_pages(self, source: Tensor, target: Tensor) -> None:
        """Copy pages `source` int64 [n] to pages `target` [n]."""
        self.pools.copy_pages(source, target)

    @torch.inference_mode()
    def move_slots(self, source: Tensor, target: Tensor) -> None:
        """Copy slots `source` int64 [n] to slots `target` [n], in every layer."""
        self.pools.move_slots(source, target)

    def windows_at_most(self, length: int) -> AbstractContextManager[None]:
        """Shorten sliding windows to `length` keys within the context, for a self-test."""
        return self.network.windows_at_most(length)

    @torch.inference_mode()
    def logits(self, batch: PackedBatch, out: Tensor | None = None) -> Tensor:
        """Run `forward`, but return logits in the model's dtype, in `out` if it is given."""
        return self.network.forward(self._backend(batch), out)

    def forward(self, batch: PackedBatch) -> Tensor:
        """Write the new keys and values and return float32 logits [num_logits, vocab_size].

        A float64 model returns float64, which decides near ties in tests.
        """
        return _widened(self.logits(batch))

    @torch.inference_mode()
    def hidden(self, batch: PackedBatch) -> Tensor:
        """Write the new keys and values and return the input of `head`: [tokens, hidden]."""
        assert isinstance(self.network, LayeredNetwork)
        return self.network.hidden(self._backend(batch))

    @torch.inference_mode()
    def head(self, hidden: Tensor) -> Tensor:
        """Return logits [n, vocab_size] of `hidden` [n, hidden], as `forward` does."""
        assert isinstance(self.network, LayeredNetwork)
        return _widened(self.network.head(hidden))


def _widened(logits: Tensor) -> Tensor:
    return logits if logits.dtype is torch.float64 else logits.float()
