"""Multi-token prediction heads: DeepSeek's, Qwen's and RTP-LLM's differ only in how they are kept.

DeepSeek-V3's report, section 2.2: x = W [norm_e(e(t_{p+1})); norm_h(h_p)], one decoder layer, a
norm, and the target's own head; h_p is the target's state at p after its final norm. The decoder
layers are those of `transformers`, over paged keys and values (or latents).
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from enum import StrEnum
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from outrider.engine.attention import PagedStep, StepAttention
from outrider.engine.backends import AttentionTraits
from outrider.engine.kv_cache import KVPools, PagedCache
from outrider.engine.linear import pack_linear, prepack_linears
from outrider.features import FeatureSpec


class FeedBack(StrEnum):
    """What the head takes in place of a target's state for rows past the committed text."""

    POST_NORM = "post_norm"  # what the head's logits are made of
    RAW = "raw"  # the decoder layer's output


class MtpModule(nn.Module):
    """One prediction module: x = eh_proj [enorm(e); hnorm(h)], `block`, `norm`."""

    def __init__(self, block: nn.Module, hidden_size: int, eps: float) -> None:
        super().__init__()
        parts: Any = block
        norm_class = type(parts.input_layernorm)  # with its family's convention for the weight
        self.enorm = norm_class(hidden_size, eps=eps)
        self.hnorm = norm_class(hidden_size, eps=eps)
        self.eh_proj = nn.Linear(2 * hidden_size, hidden_size, bias=False)
        self.block = block
        self.norm = norm_class(hidden_size, eps=eps)

    def forward(self, embedded: Tensor, states: Tensor, **layer: Any) -> Tensor:
        """Rows [1, n, H] of embeddings and states to the block's output [1, n, H], not normed."""
        joined = torch.cat((self.enorm(embedded), self.hnorm(states)), dim=-1)
        output: Tensor = self.block(self.eh_proj(joined), **layer)
        return output


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

    def __init__(
        self,
        modules: Sequence[MtpModule],
        rotary: nn.Module,
        config: Any,
        vocabulary: Vocabulary,
        feed_back: FeedBack = FeedBack.POST_NORM,
    ) -> None:
        self._config = config
        self._modules = [module.eval().requires_grad_(False) for module in modules]
        self._rotary = rotary
        self._embedding = vocabulary.embedding
        self._head = pack_linear(vocabulary.head, None)
        self._draft_ids = vocabulary.draft_ids
        self._raw = feed_back is FeedBack.RAW
        self._latent = getattr(config, "kv_lora_rank", None) is not None
        self._cache: PagedCache | None = None
        self._pool_of: Any = None
        self.dtype = vocabulary.embedding.dtype
        self.device = vocabulary.embedding.device
        self.vocab_size = len(vocabulary.embedding)
        self.state_size = int(config.hidden_size)
        self.max_model_len = int(config.max_position_embeddings)
        self.features = FeatureSpec(hidden_size=self.state_size, final_norm=True)
        self.projection = b""
        for module in self._modules:
            prepack_linears(module)

    @property
    def kv_layers(self) -> tuple[tuple[int, int, int], ...]:
        config = self._config
        if self._latent:
            shape = (1, int(config.kv_lora_rank), int(config.qk_rope_head_dim))
        else:
            shape = (int(config.num_key_value_heads), self._head_dim, self._head_dim)
        return (shape,) * len(self._modules)

    @property
    def _head_dim(self) -> int:
        config = self._config
        head_dim = getattr(config, "head_dim", None)
        return int(head_dim or config.hidden_size // config.num_attention_heads)

    def attention_traits(self, page_size: int) -> AttentionTraits:
        return AttentionTraits(
            head_dims=frozenset({self._head_dim}),
            num_heads=int(self._config.num_attention_heads),
            num_kv_heads=int(self._config.num_key_value_heads),
            page_size=page_size,
            dtype=self.dtype,
            softcap=False,
            sinks=False,
            latent=self._latent,
        )

    def bind(self, pools: KVPools) -> None:
        self._cache = PagedCache(pools, latent=self._latent)
        self._pool_of = None if self._latent else pools.layer

    def begin(self, features: Tensor) -> Tensor:
        return features.to(self.device, self.dtype)

    @torch.inference_mode()
    def forward(
        self, token_ids: Tensor, states: Tensor, attention: StepAttention, step: int
    ) -> Tensor:
        """Outputs [n, H], normed; with raw feedback [n, 2 H]: normed, then not normed."""
        assert self._cache is not None, "bind() comes first"
        self._cache.begin(attention)
        embedded = F.embedding(token_ids, self._embedding)[None]
        positions = attention.batch.positions[None]
        layer = {
            "attention_mask": None,
            "position_ids": positions,
            "position_embeddings": self._rotary(embedded, positions),
            "past_key_values": self._cache,
            "use_cache": True,
            "paged": PagedStep(attention, self._pool_of),
        }
        outputs = [module(embedded, states[None], **layer) for module in self._modules]
        turn = step % len(self._modules)
        normed: Tensor = self._modules[turn].norm(outputs[turn])[0]
        return torch.cat((normed, outputs[turn][0]), dim=-1) if self._raw else normed

    def feed_back(self, outputs: Tensor) -> Tensor:
        return outputs[:, -self.state_size :]

    @torch.inference_mode()
    def logits(self, outputs: Tensor) -> Tensor:
        logits = self._head(outputs[:, : self.state_size].contiguous()).float()
        if self._draft_ids is None:
            return logits
        full = logits.new_full((len(logits), self.vocab_size), float("-inf"))
        return full.index_copy_(1, self._draft_ids, logits)
