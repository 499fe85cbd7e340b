"""Prediction modules around a decoder layer of `transformers`: latents and experts."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn
from transformers import AttentionInterface

from outrider.engine.attention.base import (
    ATTENTION_NAME,
    PagedStep,
    StepAttention,
    paged_attention_forward,
)
from outrider.engine.kv_cache.pools import KVPools
from outrider.engine.layers.ops import Use
from outrider.engine.model.pack import prepack_linears
from outrider.engine.model.transformers_step import PagedCache

AttentionInterface.register(ATTENTION_NAME, paged_attention_forward)


Rotary = Callable[[Tensor, Tensor], tuple[Tensor, Tensor]]
"""Of a tensor in the wanted dtype and positions [1, n]: cosines and sines [1, n, turned]."""


class ModuleWeights(nn.Module):
    """What a module consists of: x = eh_proj [enorm(e); hnorm(h)], `block`, `norm`."""

    def __init__(self, block: nn.Module, hidden_size: int, eps: float) -> None:
        super().__init__()
        parts: Any = block
        norm_class = type(parts.input_layernorm)  # with its family's convention for the weight
        self.enorm = norm_class(hidden_size, eps=eps)
        self.hnorm = norm_class(hidden_size, eps=eps)
        self.eh_proj = nn.Linear(2 * hidden_size, hidden_size, bias=False)
        self.block = block
        self.norm = norm_class(hidden_size, eps=eps)


class LayerModule:
    """Implements `MtpModule`. `latent`: its attention keeps latents (multi-head latent attention).

    The layer must have been made with the attention implementation `ATTENTION_NAME`.
    """

    capturable = False  # its experts look on the host at which tokens they get
    uses: tuple[Use, ...] = ()  # launched one by one: there is no chain to measure them in

    def __init__(self, weights: ModuleWeights, rotary: Rotary, *, latent: bool) -> None:
        prepack_linears(weights.eval().requires_grad_(False))
        self._weights = weights
        self._block: Any = weights.block
        self._rotary = rotary
        self._latent = latent
        self._cache: PagedCache | None = None
        self._pool_of: Any = None

    def bind(self, pools: KVPools) -> None:
        self._cache = PagedCache(pools, latent=self._latent)
        self._pool_of = None if self._latent else pools.layer

    def forward(
        self, embedded: Tensor, states: Tensor, attention: StepAttention, rows: Tensor | None
    ) -> Tensor:
        assert self._cache is not None, "bind() comes first"
        self._cache.begin(attention)
        weights, positions = self._weights, attention.batch.positions[None]
        joined = torch.cat((weights.enorm(embedded), weights.hnorm(states)), dim=-1)
        x, block = weights.eh_proj(joined)[None], self._block
        attended, _ = block.self_attn(
            hidden_states=block.input_layernorm(x),
            attention_mask=None,
            position_ids=positions,
            position_embeddings=self._rotary(x, positions),
            past_key_values=self._cache,
            paged=PagedStep(attention, self._pool_of),
        )
        x = x + attended
        if rows is not None:
            x = x.index_select(1, rows)
        output: Tensor = x + block.mlp(block.post_attention_layernorm(x))
        return output[0]

    def norm(self, outputs: Tensor) -> Tensor:
        normed: Tensor = self._weights.norm(outputs)
        return normed
