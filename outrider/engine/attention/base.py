"""Attention over paged keys and values, behind one small protocol."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, Protocol, cast

import torch
from torch import Tensor

from outrider.engine.batch import PackedBatch
from outrider.engine.kv_cache.pools import LayerPool

ATTENTION_NAME = "outrider_paged"


@dataclass(frozen=True, slots=True)
class AttentionParams:
    """What a layer asks of attention besides its tensors."""

    scaling: float
    sliding_window: int | None = None  # keys a query sees at most, itself included
    softcap: float | None = None
    sinks: Tensor | None = None  # [num_heads]: a logit per head that takes weight and gives nothing


class StepAttention(Protocol):
    """The attention of one step: what it needs of the batch is made once, for every layer."""

    @property
    def batch(self) -> PackedBatch: ...

    def attend(self, query: Tensor, pool: LayerPool, params: AttentionParams) -> Tensor:
        """Query [tokens, num_kv_heads, group, key_dim] to [tokens, num_kv_heads, group, value_dim].

        `group` is the number of query heads per key head; a token's heads lie one after the other
        in memory. The step's own keys and values are already in the pool.
        """
        ...


class LatentAttention(StepAttention, Protocol):
    """Attention that can also run over keys and values expanded from cached latents."""

    @property
    def all_slots(self) -> Tensor:
        """The slots [n] whose latents are to be expanded."""
        ...

    def attend_expanded(
        self, query: Tensor, keys: Tensor, values: Tensor, params: AttentionParams
    ) -> Tensor:
        """`attend` over keys and values [num_kv_heads, n, dim] expanded from `all_slots`."""
        ...


AttentionBackend = Callable[[PackedBatch], StepAttention]
"""Makes the attention of one step."""


@dataclass(frozen=True, slots=True)
class PagedStep:
    """The one keyword that our attention function receives through the modules."""

    attention: StepAttention
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
    # Where only a part of each head is turned, modules put the parts together head after head.
    by_token = query[0].transpose(0, 1).contiguous()
    grouped = by_token.view(tokens, kv_heads, heads // kv_heads, dim)
    if paged.pool_of is not None:
        pool = paged.pool_of(module.layer_idx)
        out = paged.attention.attend(grouped, pool, params)
    else:
        latent = cast("LatentAttention", paged.attention)
        out = latent.attend_expanded(grouped, key[0], value[0], params)
    return out.reshape(1, tokens, heads, -1), None
