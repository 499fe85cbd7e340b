"""What a draft module implements to be run by `drafting/recurrent.py`."""

from __future__ import annotations

from typing import Protocol

import torch
from torch import Tensor

from outrider.engine.attention import StepAttention
from outrider.engine.backends import AttentionTraits
from outrider.engine.batch import PackedBatch
from outrider.engine.kv_cache import KVPools
from outrider.features import FeatureSpec


def wanted_rows(batch: PackedBatch) -> Tensor | None:
    """The rows int64 [m] whose outputs are wanted; None: all.

    Of a prompt's other rows only keys and values are needed, which spares them most of a layer.
    """
    return None if len(batch.logits_index) == len(batch.input_ids) else batch.logits_index


class RecurrentHead(Protocol):
    """One draft module applied again and again: EAGLE, EAGLE-3, MTP.

    Draft row p is the pair (token at p + 1, state at p), at position p of its own paged KV cache;
    what comes out of it predicts the token at p + 2. The true rows of committed positions take
    states from the target (`begin`), rows past them what the module put out itself (`feed_back`).
    """

    @property
    def features(self) -> FeatureSpec:
        """What it needs of the target."""
        ...

    @property
    def projection(self) -> bytes:
        """The matrix that `features` announces, as it is sent; empty if there is none."""
        ...

    @property
    def vocab_size(self) -> int:
        """Of the target."""
        ...

    @property
    def max_model_len(self) -> int:
        """Positions that it can compute."""
        ...

    @property
    def state_size(self) -> int:
        """Width of the state that a row takes."""
        ...

    @property
    def dtype(self) -> torch.dtype: ...

    @property
    def device(self) -> torch.device: ...

    @property
    def kv_layers(self) -> tuple[tuple[int, int, int], ...]:
        """(kv_heads, key_dim, value_dim) of each layer: what it will allocate of the pools."""
        ...

    @property
    def capturable(self) -> bool:
        """Whether its work can be recorded, attention apart: nothing waits for the device."""
        ...

    def attention_traits(self, page_size: int) -> AttentionTraits:
        """What its layers ask of attention."""
        ...

    def bind(self, pools: KVPools) -> None:
        """Called once, before the first forward: where its keys and values are to be kept."""
        ...

    def begin(self, features: Tensor) -> Tensor:
        """True states as a row takes them: bfloat16 [n, features.width] to [n, state_size]."""
        ...

    def forward(
        self, token_ids: Tensor, states: Tensor, attention: StepAttention, step: int
    ) -> Tensor:
        """Runs rows: int64 [n] and [n, state_size] to outputs [n, width of its own].

        It may leave out the outputs of all rows but `wanted_rows(attention.batch)`.
        Writes their keys and values at `attention.batch.slot_mapping`; rows stand at
        `attention.batch.positions`. `step` is 0 for rows with true states, k for the k-th row
        after them.
        """
        ...

    def feed_back(self, outputs: Tensor) -> Tensor:
        """Outputs [m, ...] of `forward` as the next rows' states [m, state_size]."""
        ...

    def logits(self, outputs: Tensor) -> Tensor:
        """Outputs [m, ...] of `forward` to float logits over the target's vocabulary [m, vocab].

        -inf for tokens that the module does not know.
        """
        ...
