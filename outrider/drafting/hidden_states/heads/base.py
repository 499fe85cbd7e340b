"""What a draft module implements to be run by `drafting/recurrent.py` or `one_shot.py`."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Protocol

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from outrider.drafting.hidden_states.trees import Nodes, TargetDraws
from outrider.engine.attention.base import StepAttention
from outrider.engine.batch import PackedBatch
from outrider.engine.kv_cache.pools import KVPools
from outrider.engine.layers.ops import Use
from outrider.engine.model.attention_backends import AttentionTraits
from outrider.features import FeatureSpec


def wanted_rows(batch: PackedBatch) -> Tensor | None:
    """The rows int64 [m] whose outputs are wanted; None: all.

    Of a prompt's other rows only keys and values are needed, which spares them most of a layer.
    """
    return None if len(batch.logits_index) == len(batch.input_ids) else batch.logits_index


def spread(known: Tensor, token_ids: Tensor | None, vocab_size: int) -> Tensor:
    """Logits [n, m] of the tokens int64 [m] as those of all [n, vocab_size]: -inf for the others.

    None: these are all, in order.
    """
    if token_ids is None:
        return known
    logits = known.new_full((len(known), vocab_size), -torch.inf)
    return logits.index_copy_(1, token_ids, known)


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
    def uses(self) -> Sequence[Use]:
        """Its products, in the order of a round: how they are computed may be chosen by them."""
        ...

    @property
    def capturable(self) -> bool:
        """Whether its work can be recorded, attention apart: nothing waits for the device."""
        ...

    def attention_traits(self) -> AttentionTraits:
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
        """Run rows: int64 [n] and [n, state_size] to outputs [n, width of its own].

        It may leave out the outputs of all rows but `wanted_rows(attention.batch)`.
        Writes their keys and values at `attention.batch.slot_mapping`; rows stand at
        `attention.batch.positions`. `step` is 0 for rows with true states, k for the k-th row
        after them.
        """
        ...

    def feed_back(self, outputs: Tensor) -> Tensor:
        """Output [m, ...] of `forward` as the next rows' states [m, state_size]."""
        ...

    def logits(self, outputs: Tensor) -> Tensor:
        """Output [m, ...] of `forward` to float logits over the target's vocabulary [m, vocab].

        -inf for tokens that the module does not know.
        """
        ...


class OneShotHead(Protocol):
    """Guesses several tokens from one state of the target."""

    @property
    def features(self) -> FeatureSpec:
        """What it needs of the target."""
        ...

    @property
    def vocab_size(self) -> int:
        """Of the target."""
        ...

    @property
    def max_depth(self) -> int:
        """Tokens that it foresees."""
        ...

    @property
    def uses(self) -> Sequence[Use]:
        """As of a `RecurrentHead`."""
        ...

    @property
    def device(self) -> torch.device: ...

    def guess(
        self, states: Tensor, tokens: Tensor, draws: TargetDraws, depth: int, width: int
    ) -> Tensor:
        """What trees are chosen from: int32 [n, ...], of float32 numbers their bits.

        states: bfloat16 [n, features.width]; tokens int64 [n], which were drawn from them; both on
        `device`, for which nothing waits. Looks `depth` tokens ahead, 1 to `max_depth`, and at the
        `width` likeliest of each place. Rows do not affect each other.
        """
        ...

    def trees(self, guesses: NDArray[np.int32], sizes: Sequence[int]) -> list[Nodes]:
        """A tree per row, of `sizes[i]` nodes at most; of a `width` of 1 they are chains.

        What was guessed deeper or wider than a tree can be makes no difference to it.
        """
        ...

    def begin(self, states: Tensor) -> Tensor:
        """The same states as the first `step` takes them."""
        ...

    def step(self, states: Tensor, tokens: Tensor, depth: int) -> tuple[Tensor, Tensor]:
        """For those who choose every token themselves: `tokens` int64 [n] came `depth` tokens
        after the states, and next come float32 logits [n, vocab]. Also returns the next states.
        """
        ...
