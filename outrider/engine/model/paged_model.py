"""A loaded model that runs packed batches: `outrider.engine.batch.Model` made real."""

from __future__ import annotations

from typing import Any, Protocol, runtime_checkable

import torch
from torch import Tensor, nn
from transformers import AttentionInterface

from outrider.engine.attention.backends import is_capturable
from outrider.engine.attention.base import (
    ATTENTION_NAME,
    AttentionBackend,
    PagedStep,
    StepAttention,
    paged_attention_forward,
)
from outrider.engine.batch import PackedBatch
from outrider.engine.hidden_states.hooks import HiddenStateHooks
from outrider.engine.kv_cache.pools import KVPools, PagedCache
from outrider.engine.model.config_sizes import caches_latents

AttentionInterface.register(ATTENTION_NAME, paged_attention_forward)


class Step(Protocol):
    """One way to run the layers."""

    def forward(self, attention: StepAttention, out: Tensor | None = None) -> Tensor:
        """Logits [num_logits, vocab_size] in the model's dtype, in `out` if given."""
        ...


@runtime_checkable
class LayeredStep(Step, Protocol):
    """One whose layers and head can run apart."""

    def hidden(self, attention: StepAttention) -> Tensor:
        """What `head` takes, of every token: [tokens, hidden]."""
        ...

    def head(self, hidden: Tensor, out: Tensor | None = None) -> Tensor:
        """Logits [n, vocab_size] of rows of it [n, hidden], in `out` if given."""
        ...


class TransformersStep:
    """Runs the modules of `transformers` themselves, on packed rows and a paged cache.

    `model` must have been loaded or set to the attention implementation `ATTENTION_NAME`.
    """

    def __init__(self, model: nn.Module, pools: KVPools) -> None:
        config: Any = model.config
        self._model = model
        latent = caches_latents(config)
        self._cache = PagedCache(pools, latent=latent)
        self._pool_of = None if latent else pools.layer
        self._hooks = None if pools.features is None else HiddenStateHooks(model, pools.features)

    def forward(self, attention: StepAttention, out: Tensor | None = None) -> Tensor:
        """Logits [num_logits, vocab_size] in the model's dtype, in `out` if given."""
        batch = attention.batch
        self._cache.begin(attention)
        if self._hooks is not None:
            self._hooks.slots = batch.slot_mapping
        output: Any = self._model(
            input_ids=batch.input_ids[None],
            position_ids=batch.positions[None],
            past_key_values=self._cache,
            use_cache=True,
            logits_to_keep=batch.logits_index,
            paged=PagedStep(attention, self._pool_of),
        )
        logits: Tensor = output.logits[0]
        return logits if out is None else out.copy_(logits)


class PagedModel:
    """A causal language model over a paged KV cache that it owns; implements `Model`.

    The pools hold one page more than `num_pages`: `scratch_page`, where tokens that only fill up
    a batch leave their keys and values. No sequence ever gets it.
    """

    def __init__(
        self,
        step: Step,
        pools: KVPools,
        backend: AttentionBackend,
        *,
        name: str,
        vocab_size: int,
        max_model_len: int,
        eos_token_ids: frozenset[int],
        dtype: torch.dtype,
        device: torch.device,
    ) -> None:
        self._step = step
        self.pools = pools
        self._backend = backend
        self.name = name
        self.vocab_size = vocab_size
        self.max_model_len = max_model_len
        self.eos_token_ids = eos_token_ids
        self.dtype = dtype
        self.device = device
        self.page_size = pools.page_size

    @property
    def num_pages(self) -> int:
        return self.pools.num_pages - 1

    @property
    def scratch_page(self) -> int:
        return self.num_pages

    @property
    def capturable(self) -> bool:
        """Whether the attention's work can be recorded in a CUDA graph."""
        return is_capturable(self._backend)

    @property
    def layered(self) -> bool:
        """Whether there are `hidden` and `head`."""
        return isinstance(self._step, LayeredStep)

    def resize(self, num_pages: int) -> None:
        """Give the cache another size; what it held is lost."""
        self.pools.resize(num_pages + 1)

    @property
    def kv_bytes_per_page(self) -> int:
        """Bytes that one page takes over all layers, features included."""
        return self.pools.bytes_per_page

    @torch.inference_mode()
    def copy_pages(self, source: Tensor, target: Tensor) -> None:
        """Make pages `target` int64 [n] hold the keys and values of `source` [n]."""
        self.pools.copy_pages(source, target)

    @torch.inference_mode()
    def move_slots(self, source: Tensor, target: Tensor) -> None:
        """Make slots `target` int64 [n] hold what `source` [n] held before, in every layer."""
        self.pools.move_slots(source, target)

    @torch.inference_mode()
    def logits(self, batch: PackedBatch, out: Tensor | None = None) -> Tensor:
        """What `forward` returns, in the model's dtype, in `out` [num_logits, vocab] if given."""
        return self._step.forward(self._backend(batch), out)

    def forward(self, batch: PackedBatch) -> Tensor:
        """Write the new keys and values and returns float32 logits [num_logits, vocab_size].

        A float64 model returns float64: its near ties are the point.
        """
        return _widened(self.logits(batch))

    @torch.inference_mode()
    def hidden(self, batch: PackedBatch) -> Tensor:
        """Write the new keys and values and returns what `head` takes: [tokens, hidden]."""
        assert self.layered
        assert isinstance(self._step, LayeredStep)
        return self._step.hidden(self._backend(batch))

    @torch.inference_mode()
    def head(self, hidden: Tensor) -> Tensor:
        """Logits [n, vocab_size] of rows of it [n, hidden]; as `forward` returns them."""
        assert self.layered
        assert isinstance(self._step, LayeredStep)
        return _widened(self._step.head(hidden))


def _widened(logits: Tensor) -> Tensor:
    return logits if logits.dtype is torch.float64 else logits.float()
