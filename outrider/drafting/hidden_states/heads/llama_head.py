"""What the draft modules made of Llama layers share: EAGLE and EAGLE-3."""

from __future__ import annotations

from collections.abc import Sequence

import torch
import torch.nn.functional as F
from torch import Tensor

from outrider.drafting.hidden_states.heads.base import wanted_rows
from outrider.drafting.hidden_states.heads.llama_layers import LlamaLayer, LlamaShape, Place
from outrider.engine.attention.base import StepAttention
from outrider.engine.kv_cache.pools import KVPools
from outrider.engine.layers.ops import LlamaOps, Use
from outrider.engine.model.attention_backends import AttentionTraits


class LlamaHead:
    """Layers, embedding and rotary table; a subclass says how a row goes through them."""

    capturable = True

    def __init__(
        self,
        shape: LlamaShape,
        place: Place,
        ops: LlamaOps,
        layers: list[LlamaLayer],
        norms: Sequence[Tensor],
        embedding: Tensor,
    ) -> None:
        """`norms` are those before the layers after the first.

        `embedding` [vocab_size, any width], in any dtype: only rows of it are converted.
        """
        self.vocab_size = len(embedding)
        self.max_model_len = shape.max_model_len
        self.state_size = shape.hidden_size
        self.dtype, self.device = place.dtype, place.device
        self.kv_layers = ((shape.num_kv_heads, shape.head_dim, shape.head_dim),) * len(layers)
        self._shape = shape
        self._ops = ops
        self._layers = layers
        self._norms = norms
        self._embedding = embedding.to(place.device)
        self._rope = shape.rope_table(place)

    def feed_back(self, outputs: Tensor) -> Tensor:
        return outputs

    def _layer_uses(self) -> list[Use]:
        """Of all layers; the first one has its input ready."""
        pairs = zip((None, *self._norms), self._layers, strict=True)
        return [use for norm, layer in pairs for use in layer.uses(norm)]

    def attention_traits(self) -> AttentionTraits:
        return self._shape.attention_traits(self.dtype)

    def bind(self, pools: KVPools) -> None:
        for i, layer in enumerate(self._layers):
            layer.bind(pools, i)

    def _run_layers(self, qkv: Tensor, x: Tensor, attention: StepAttention) -> Tensor:
        """From the first layer's products and residual [n, ...] to the last one's outputs [m, ...].

        m are the `wanted_rows`.
        """
        rope = self._rope.index_select(0, attention.batch.positions)
        first, last, rows = self._layers[0], self._layers[-1], wanted_rows(attention.batch)
        x = first(qkv, x, rope, attention, rows=rows if first is last else None)
        for norm, layer in zip(self._norms, self._layers[1:], strict=True):
            qkv = self._ops.norm_linear(x, norm, self._shape.eps, layer.qkv)
            x = layer(qkv, x, rope, attention, rows=rows if layer is last else None)
        return x

    def _embed(self, token_ids: Tensor) -> Tensor:
        return F.embedding(token_ids, self._embedding).to(self.dtype)

    def _scores(self, logits: Tensor) -> Tensor:
        """A float64 module keeps its precision, as a float64 model does."""
        return logits if logits.dtype is torch.float64 else logits.float()
