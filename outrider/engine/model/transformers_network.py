"""Run the modules of `transformers` on packed rows and a paged cache."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from contextlib import AbstractContextManager
from typing import Any, cast

from torch import Tensor, nn
from transformers import AttentionInterface
from transformers.cache_utils import Cache

from outrider.engine.attention.base import (
    ATTENTION_NAME,
    LatentAttention,
    PagedStep,
    StepAttention,
    paged_attention_forward,
)
from outrider.engine.hidden_states.hooks import HiddenStateHooks
from outrider.engine.kv_cache.pools import KVPools
from outrider.engine.model.config_sizes import caches_latents

AttentionInterface.register(ATTENTION_NAME, paged_attention_forward)


class PagedCache(Cache):  # type: ignore[misc]
    """The `past_key_values` that modules of `transformers` see during one forward.

    Attention reads the pools itself, so `update` returns its arguments. For latent attention
    (`latent=True`) it returns the gathered latents, which the modules expand into heads.
    """

    def __init__(self, pools: KVPools, *, latent: bool) -> None:
        super().__init__(layers=[])
        self._pools = pools
        self._latent = latent
        self._attention: StepAttention | None = None

    def begin(self, attention: StepAttention) -> None:
        """Write to the slots of this step from now on."""
        self._attention = attention

    def update(
        self, key_states: Tensor, value_states: Tensor, layer_idx: int, *_: Any, **__: Any
    ) -> tuple[Tensor, Tensor]:
        """Write keys [1, heads, T, key_dim] and values [1, heads, T, value_dim] of the step."""
        assert self._attention is not None, "begin() comes first"
        heads, key_dim, value_dim = key_states.shape[1], key_states.shape[3], value_states.shape[3]
        pool = self._pools.allocate(layer_idx, heads, key_dim, value_dim)
        slots = self._attention.batch.slot_mapping
        pool.write(slots, key_states[0].transpose(0, 1), value_states[0].transpose(0, 1))
        if not self._latent:
            return key_states, value_states
        keys, values = pool.gather(cast(LatentAttention, self._attention).all_slots)
        return keys[None], values[None]

    # The batch has the positions, so these answers are never used.
    def get_seq_length(self, layer_idx: int = 0) -> int:  # noqa: ARG002
        return 0

    def get_mask_sizes(self, query_length: int, layer_idx: int) -> tuple[int, int]:  # noqa: ARG002
        return query_length, 0

    def get_query_offset(self, layer_idx: int = 0) -> int:  # noqa: ARG002
        return 0


@contextlib.contextmanager
def shortened_windows(model: nn.Module, length: int) -> Iterator[None]:
    """Shorten the sliding windows of a `transformers` model, in its config and its modules."""
    config: Any = model.config
    holders: list[Any] = [config, config.get_text_config(decoder=True)]
    holders += list(model.modules())
    before = [
        (holder, window)
        for holder in {id(holder): holder for holder in holders}.values()
        if isinstance(window := getattr(holder, "sliding_window", None), int) and window > length
    ]
    for holder, _ in before:
        holder.sliding_window = length
    try:
        yield
    finally:
        for holder, window in before:
            holder.sliding_window = window


class TransformersNetwork:
    """Implements `Network` by a model that uses the attention implementation `ATTENTION_NAME`."""

    def __init__(self, model: nn.Module, pools: KVPools) -> None:
        config: Any = model.config
        self._model = model
        latent = caches_latents(config)
        self._cache = PagedCache(pools, latent=latent)
        self._pool_of = None if latent else pools.layer
        self._hooks = None if pools.features is None else HiddenStateHooks(model, pools.features)

    def windows_at_most(self, length: int) -> AbstractContextManager[None]:
        """Shorten sliding windows to `length` keys within the context."""
        return shortened_windows(self._model, length)

    def forward(self, attention: StepAttention, out: Tensor | None = None) -> Tensor:
        """Return logits [num_logits, vocab_size] in the model's dtype, in `out` if given."""
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
