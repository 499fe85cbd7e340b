"""The draft modules ("heads") that `cached_proposer.py` and `one_shot.py` run."""

from __future__ import annotations

import hashlib
from collections.abc import Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from pathlib import Path
from typing import Protocol

import numpy as np
import torch
import torch.nn.functional as F
from numpy.typing import NDArray
from torch import Tensor

from outrider.drafting.hidden_states.checkpoints import TargetTensors
from outrider.drafting.hidden_states.trees import Guess, TargetDraws
from outrider.engine.attention.base import StepAttention
from outrider.engine.batch import PackedBatch
from outrider.engine.kv_cache.pools import KVPools
from outrider.engine.layers.linear import Linear
from outrider.engine.layers.ops import LlamaOps, Use
from outrider.engine.model.attention_backends import AttentionTraits
from outrider.engine.model.pack import pack_linear
from outrider.features import FeatureSpec

_MAX_POSITIONS = 2**17
"""Beyond those of its own, a module gets so many: the table of their rotations takes memory."""


@dataclass(frozen=True, slots=True)
class Place:
    """The device and dtype that a module computes in, and its fused operations there."""

    dtype: torch.dtype
    device: torch.device
    ops: LlamaOps

    def put(self, tensor: Tensor) -> Tensor:
        return tensor.to(self.device, self.dtype)

    def linear(self, weight: Tensor, bias: Tensor | None = None) -> Linear:
        return pack_linear(self.put(weight), None if bias is None else self.put(bias))


@dataclass(frozen=True)
class HeadSetup:
    """The target that a module drafts for, where it computes, and what the operator asks for."""

    target_folder: Path
    place: Place
    max_model_len: int | None = None
    project: bool = False
    """The scorer is to apply fc, where nothing comes before it: one state is sent for several."""

    @cached_property
    def target(self) -> TargetTensors:
        """The target's tensors, read once they are asked for: after the module's own."""
        return TargetTensors(self.target_folder)

    def num_positions(self, own: int) -> int:
        """Return how many positions a module drafts at that was trained for its `own`.

        Unless the operator asks for another number these are all of its target's.
        """
        return self.max_model_len or max(own, min(self.target.max_positions, _MAX_POSITIONS))


@dataclass(frozen=True, slots=True)
class HeadShape:
    """The sizes of a module's decoder layers, which are all alike."""

    hidden_size: int
    num_heads: int
    num_kv_heads: int
    head_dim: int
    max_model_len: int
    intermediate_size: int = 0  # of layers that `LlamaLayer` runs
    eps: float = 0.0
    latents: tuple[int, int] | None = None  # (kv_lora_rank, qk_rope_head_dim), if it caches those

    @property
    def kv_layer(self) -> tuple[int, int, int]:
        """(kv_heads, key_dim, value_dim) of a layer."""
        if self.latents is not None:
            return (1, *self.latents)
        return (self.num_kv_heads, self.head_dim, self.head_dim)


class BoundLayer(Protocol):
    """A layer with keys and values of its own."""

    def bind(self, pools: KVPools) -> None:
        """Keep keys and values in `pools`; called once, before the first forward."""


class CachedHead:
    """A draft module of decoder layers, with a paged KV cache of its own."""

    features: FeatureSpec
    """The states of the target that the module reads."""
    projection = b""
    """The matrix that `features` announces, as it is sent; empty if there is none."""
    uses: Sequence[Use]
    """The module's products in the order of a round, by which their kernels may be chosen."""
    capturable = True
    """Outside attention, nothing waits for the device."""

    def __init__(
        self, shape: HeadShape, place: Place, layers: Sequence[BoundLayer], embedding: Tensor
    ) -> None:
        """`embedding` [vocab_size, any width] may be of any dtype: only rows are converted."""
        self.vocab_size = len(embedding)  # of the target
        self.max_model_len = shape.max_model_len
        self.state_size = shape.hidden_size
        self.dtype, self.device = place.dtype, place.device
        self.kv_layers = (shape.kv_layer,) * len(layers)
        self._shape, self._ops = shape, place.ops
        self._bound = layers
        self._embedding = embedding.to(place.device)

    def attention_traits(self) -> AttentionTraits:
        """Return the layers' requirements on attention."""
        return AttentionTraits(
            head_dims=frozenset((self._shape.head_dim,)),
            num_heads=self._shape.num_heads,
            num_kv_heads=self._shape.num_kv_heads,
            dtype=self.dtype,
            softcap=False,
            sinks=False,
            latent=self._shape.latents is not None,
        )

    def bind(self, pools: KVPools) -> None:
        """Keep keys and values in `pools`; called once, before the first forward."""
        for layer in self._bound:
            layer.bind(pools)

    def _embed(self, token_ids: Tensor) -> Tensor:
        return F.embedding(token_ids, self._embedding).to(self.dtype)

    def _project(self, weight: Tensor) -> None:
        """Leave `weight` [hidden, captured width] to the scorer: `features` announces it."""
        self.projection = weight.bfloat16().contiguous().view(torch.uint8).numpy().tobytes()
        digest = hashlib.sha256(self.projection).digest()
        self.features = replace(self.features, projection_dim=len(weight), projection_sha256=digest)


class RecurrentHead(CachedHead):
    """One draft module applied again and again: EAGLE, EAGLE-3, MTP.

    Draft row p is the pair (token at p + 1, state at p), at position p of the module's own paged KV
    cache; the row's output predicts the token at p + 2. The true rows of committed positions take
    states from the target (`begin`). Rows past them take the module's own outputs (`feed_back`).
    """

    def begin(self, features: Tensor) -> Tensor:
        """Return true states as a row takes them: [n, features.width] to [n, state_size]."""
        return features.to(self.device, self.dtype)

    def forward(
        self, token_ids: Tensor, states: Tensor, attention: StepAttention, step: int
    ) -> Tensor:
        """Run rows: int64 [n] and [n, state_size] to outputs [n, width of its own].

        Outputs of rows outside `wanted_rows(attention.batch)` may be left out. Keys and values are
        written at `attention.batch.slot_mapping`. `step` is 0 for rows with true states, k for the
        k-th row after them.
        """
        raise NotImplementedError

    def feed_back(self, outputs: Tensor) -> Tensor:
        """Return outputs [m, ...] of `forward` as the next rows' states [m, state_size]."""
        return outputs

    def logits(self, outputs: Tensor) -> Tensor:
        """Return logits over the target's vocabulary [m, vocab]; -inf for unknown tokens."""
        raise NotImplementedError


class OneShotHead(Protocol):
    """Guesses several tokens from one state of the target."""

    features: FeatureSpec  # states of the target that the head reads
    vocab_size: int  # of the target
    max_depth: int  # tokens that the head foresees
    uses: Sequence[Use]  # as of a `RecurrentHead`
    device: torch.device

    def guess(
        self, states: Tensor, tokens: Tensor, draws: TargetDraws, depth: int, width: int
    ) -> Tensor:
        """Return the numbers that trees are chosen from: int32 [n, ...], floats as their bits.

        states: bfloat16 [n, features.width]; tokens int64 [n], which were drawn from them; both on
        `device`, for which nothing waits. The head looks `depth` tokens ahead, 1 to `max_depth`,
        and at the `width` likeliest of each place. Rows do not affect each other.
        """

    def trees(self, guesses: NDArray[np.int32], sizes: Sequence[int]) -> list[Guess]:
        """Return a tree per row, of at most `sizes[i]` nodes; a `width` of 1 makes chains."""

    def begin(self, states: Tensor) -> Tensor:
        """Return states as the first `step` takes them."""

    def step(self, states: Tensor, tokens: Tensor, depth: int) -> tuple[Tensor, Tensor]:
        """Return the next states, and float32 logits [n, vocab].

        For callers who choose every token themselves: `tokens` int64 [n] came `depth` tokens after
        the states.
        """


def wanted_rows(batch: PackedBatch) -> Tensor | None:
    """Return the rows int64 [m] whose outputs are wanted; None: all.

    A prompt's other rows only need keys and values, which are a small part of a layer.
    """
    return None if len(batch.logits_index) == len(batch.input_ids) else batch.logits_index


def spread(known: Tensor, token_ids: Tensor | None, vocab_size: int) -> Tensor:
    """Return logits [n, m] of the tokens int64 [m] as [n, vocab_size], -inf for the others.

    `token_ids` None: these are all, in order. Logits are float32, or of a float64 module float64.
    """
    known = known if known.dtype is torch.float64 else known.float()
    if token_ids is None:
        return known
    logits = known.new_full((len(known), vocab_size), -torch.inf)
    return logits.index_copy_(1, token_ids, known)
