"""Multi-token prediction heads: DeepSeek's, Qwen's and RTP-LLM's differ only in how they are kept.

DeepSeek-V3's report, section 2.2: x = W [norm_e(e(t_{p+1})); norm_h(h_p)], one decoder layer, a
norm, and the target's own head; h_p is the target's state at p after its final norm.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from enum import StrEnum
from typing import Protocol

import torch
import torch.nn.functional as F
from torch import Tensor

from outrider.drafting.hidden_states.heads.base import spread, wanted_rows
from outrider.engine.attention.base import StepAttention
from outrider.engine.kv_cache.pools import KVPools
from outrider.engine.layers.ops import Use
from outrider.engine.model.attention_backends import AttentionTraits
from outrider.engine.model.pack import pack_linear
from outrider.features import FeatureSpec


class FeedBack(StrEnum):
    """What the head takes in place of a target's state for rows past the committed text."""

    POST_NORM = "post_norm"  # what the head's logits are made of
    RAW = "raw"  # the decoder layer's output


class MtpModule(Protocol):
    """One prediction module, with keys and values of its own."""

    @property
    def capturable(self) -> bool:
        """As of a `RecurrentHead`."""
        ...

    @property
    def uses(self) -> Sequence[Use]:
        """As of a `RecurrentHead`."""
        ...

    def bind(self, pools: KVPools) -> None:
        """Called once, before the first forward: where its keys and values are to be kept."""
        ...

    def forward(
        self, embedded: Tensor, states: Tensor, attention: StepAttention, rows: Tensor | None
    ) -> Tensor:
        """Rows of embeddings and states [n, H] to the decoder layer's output [m, H].

        `rows` int64 [m] are those whose output is wanted; None: all.
        """
        ...

    def norm(self, outputs: Tensor) -> Tensor:
        """The last norm, of `forward`'s outputs [n, H]."""
        ...


@dataclass(frozen=True, slots=True)
class MtpShape:
    """Sizes of a module."""

    hidden_size: int
    num_heads: int
    num_kv_heads: int
    head_dim: int
    max_model_len: int
    latents: tuple[int, int] | None = None  # (kv_lora_rank, qk_rope_head_dim), if it keeps those

    @property
    def kv_layer(self) -> tuple[int, int, int]:
        """(kv_heads, key_dim, value_dim)"""
        if self.latents is not None:
            return (1, *self.latents)
        return (self.num_kv_heads, self.head_dim, self.head_dim)


@dataclass(frozen=True, slots=True)
class Vocabulary:
    """How tokens get into the head and out of it."""

    embedding: Tensor  # [vocab_size, H]
    head: Tensor  # [vocab_size, H], or a row for each of `draft_ids`
    draft_ids: Tensor | None = None  # int64 [draft_vocab_size]: the target's ids of the head's rows


class MtpHead:
    """Implements `RecurrentHead`.

    Of n modules, step k draws from module k mod n. Every module runs over every row: its keys and
    values have to be there when its turn comes, and those of true rows are made from the target's
    states in all modules (which were trained on the output of the module before: an estimate of
    the same state).
    """

    projection = b""

    def __init__(
        self,
        modules: Sequence[MtpModule],
        shape: MtpShape,
        vocabulary: Vocabulary,
        feed_back: FeedBack = FeedBack.POST_NORM,
    ) -> None:
        self._modules = modules
        self._shape = shape
        self._embedding = vocabulary.embedding
        self._head = pack_linear(vocabulary.head, None)
        self._draft_ids = vocabulary.draft_ids
        self._raw = feed_back is FeedBack.RAW
        self.dtype, self.device = vocabulary.head.dtype, vocabulary.head.device
        self.vocab_size = len(vocabulary.embedding)
        self.state_size = shape.hidden_size
        self.max_model_len = shape.max_model_len
        self.kv_layers = (shape.kv_layer,) * len(modules)
        self.features = FeatureSpec(hidden_size=shape.hidden_size, final_norm=True)
        self.capturable = all(module.capturable for module in modules)
        of_modules = [use for module in modules for use in module.uses]
        self.uses = (*of_modules, Use(self._head, alone=True))

    def attention_traits(self) -> AttentionTraits:
        return AttentionTraits(
            head_dims=frozenset({self._shape.head_dim}),
            num_heads=self._shape.num_heads,
            num_kv_heads=self._shape.num_kv_heads,
            dtype=self.dtype,
            softcap=False,
            sinks=False,
            latent=self._shape.latents is not None,
        )

    def bind(self, pools: KVPools) -> None:
        for module in self._modules:
            module.bind(pools)

    def begin(self, features: Tensor) -> Tensor:
        return features.to(self.device, self.dtype)

    @torch.inference_mode()
    def forward(
        self, token_ids: Tensor, states: Tensor, attention: StepAttention, step: int
    ) -> Tensor:
        """Output [m, H], normed; with raw feedback [m, 2 H]: normed, then not normed.

        They are those of `wanted_rows`.
        """
        embedded = F.embedding(token_ids, self._embedding).to(self.dtype)
        rows = wanted_rows(attention.batch)
        outputs = [module.forward(embedded, states, attention, rows) for module in self._modules]
        turn = step % len(self._modules)
        normed = self._modules[turn].norm(outputs[turn])
        return torch.cat((normed, outputs[turn]), dim=-1) if self._raw else normed

    def feed_back(self, outputs: Tensor) -> Tensor:
        return outputs[:, -self.state_size :]

    @torch.inference_mode()
    def logits(self, outputs: Tensor) -> Tensor:
        known = self._head(outputs[:, : self.state_size].contiguous()).float()
        return spread(known, self._draft_ids, self.vocab_size)
