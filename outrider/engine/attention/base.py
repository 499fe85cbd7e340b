"""The protocol of attention over paged keys and values."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, Protocol, cast

import torch
from torch import Tensor

from outrider.engine.batch import PackedBatch
from outrider.engine.kv_cache.pools import LayerPool
from outrider.errors import UnsupportedModelError

ATTENTION_NAME = "outrider_paged"


@dataclass(frozen=True, slots=True)
class AttentionParams:
    """A layer's settings of attention."""

    scaling: float
    sliding_window: int | None = None  # keys a query sees at most, itself included
    softcap: float | None = None
    sinks: Tensor | None = None  # [num_heads]: a logit per head that takes weight and adds no value


class StepAttention(Protocol):
    """Attention of one step, made once of its batch and used by every layer."""

    batch: PackedBatch

    def attend(self, query: Tensor, pool: LayerPool, params: AttentionParams) -> Tensor:
        """Map query [tokens, num_kv_heads, group, key_dim] to [..., value_dim].

        `group` is the number of query heads per key head. The heads of a token are contiguous. The
        step's own keys and values are already in the pool.
        """


class LatentAttention(StepAttention, Protocol):
    """Attention that can also read keys and values expanded from cached latents."""

    @property
    def all_slots(self) -> Tensor:
        """Slots [n] of the latents to expand."""

    def attend_expanded(
        self, query: Tensor, keys: Tensor, values: Tensor, params: AttentionParams
    ) -> Tensor:
        """Attend to keys and values [num_kv_heads, n, dim] expanded from `all_slots`."""


AttentionBackend = Callable[[PackedBatch], StepAttention]
"""Makes the attention of a step."""


@dataclass(frozen=True, slots=True)
class PagedStep:
    """The keyword argument `paged` of `paged_attention_forward`."""

    attention: StepAttention
    pool_of: Any  # layer_idx -> LayerPool, or None for latent attention


def paged_attention_forward(
    module: torch.nn.Module,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attention_mask: Tensor | None,  # noqa: ARG001
    *,
    paged: PagedStep | None = None,
    **settings: Any,
) -> tuple[Tensor, None]:
    """Map query [1, H, T, D] to [1, T, H, Dv], as `transformers` calls it.

    Of its `settings`, scaling, sliding_window, softcap and s_aux count. Raises
    `UnsupportedModelError` if the model's modules do not hand `paged` on.
    """
    if paged is None:
        raise UnsupportedModelError("its modules do not hand keyword arguments on to attention")
    heads, tokens, dim = query.shape[1:]
    scaling = settings.get("scaling")
    params = AttentionParams(
        scaling=dim**-0.5 if scaling is None else scaling,
        sliding_window=settings.get("sliding_window"),
        softcap=settings.get("softcap"),
        sinks=settings.get("s_aux"),
    )
    kv_heads = key.shape[1]
    # Modules with partial rotation concatenate the parts head by head.
    by_token = query[0].transpose(0, 1).contiguous()
    grouped = by_token.view(tokens, kv_heads, heads // kv_heads, dim)
    if paged.pool_of is not None:
        pool = paged.pool_of(module.layer_idx)
        out = paged.attention.attend(grouped, pool, params)
    else:
        latent = cast("LatentAttention", paged.attention)
        out = latent.attend_expanded(grouped, key[0], value[0], params)
    return out.reshape(1, tokens, heads, -1), None
