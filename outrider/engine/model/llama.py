"""A fused step for the Llama family: few operations per layer, the same logits.

q, k and v are one product, and so are gate and up. The residual is added inside a product. A few
fused operations (`LlamaOps`) lie between the products.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, replace
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from outrider.engine.attention.base import AttentionParams, StepAttention
from outrider.engine.kv_cache.pools import KVPools, LayerPool
from outrider.engine.layers.linear import Linear
from outrider.engine.layers.ops import LlamaOps, Use
from outrider.engine.layers.quantized import QuantizedModule, QuantizedWeight
from outrider.engine.model.config_sizes import head_dim, num_kv_heads
from outrider.engine.model.pack import pack_linear, pack_output_layer, pack_quantized


@dataclass(frozen=True, slots=True)
class LayerParts:
    """The weights of a layer, and its keys and values."""

    input_norm: Tensor  # [hidden]
    qkv: Linear
    qk_norm: Tensor | None  # [heads + kv_heads, head_dim]: Qwen3's norm of every q and k head
    o: Linear
    post_norm: Tensor  # [hidden]
    gate_up: Linear
    down: Linear
    pool: LayerPool
    params: AttentionParams


_FITTING = {"LlamaForCausalLM", "MistralForCausalLM", "Qwen2ForCausalLM", "Qwen3ForCausalLM"}


def fits(model: nn.Module) -> bool:
    """Return whether `FusedLlama` computes exactly this model."""
    config: Any = model.config
    rope: Any = config.rope_parameters if hasattr(config, "rope_parameters") else None
    return (
        type(model).__name__ in _FITTING
        and config.hidden_act == "silu"
        and rope is not None
        and rope.get("rope_type") in {"default", "linear", "llama3"}
        and rope.get("partial_rotary_factor", 1.0) == 1.0
    )


def _sliding_window(attention: Any) -> int | None:
    """Return the layer's window: on the layer, or in the config for Mistral, or none.

    Llama ignores a `sliding_window` in its config.
    """
    holder = attention.config if type(attention).__name__ == "MistralAttention" else attention
    window: int | None = getattr(holder, "sliding_window", None)
    return window


def _concatenated(dtype: torch.dtype, *modules: Any) -> Linear:
    """Concatenate the outputs of layers with one input, and take their weights from them."""
    bias = None if modules[0].bias is None else torch.cat([module.bias for module in modules])
    small = [module for module in modules if isinstance(module, QuantizedModule)]
    if len(small) == len(modules):
        taken = [module.take() for module in small]
        joined = taken[0] if len(taken) == 1 else QuantizedWeight.concatenated(taken)
        return pack_quantized(joined, bias, dtype)
    weights = [_take(module, dtype) for module in modules]
    return pack_linear(weights[0] if len(weights) == 1 else torch.cat(weights), bias)


def _take(module: Any, dtype: torch.dtype) -> Tensor:
    """Return a layer's weight, which the layer gives up, so that no second copy stays."""
    if isinstance(module, QuantizedModule):
        return module.take().dequantise(dtype)
    weight: Tensor = module.weight
    module.weight = None
    return weight


class FusedLlama:
    """The layers of a loaded model of the Llama family, over the pools that it allocates."""

    def __init__(self, model: nn.Module, pools: KVPools, ops: LlamaOps, max_model_len: int) -> None:
        parts: Any = model
        config = parts.config
        base = parts.model
        self._ops = ops
        self._features = pools.features
        self._heads = config.num_attention_heads
        self._kv_heads = num_kv_heads(config)
        self._head_dim = head_dim(config)
        self.eps = config.rms_norm_eps
        self.embedding: Tensor = base.embed_tokens.weight.detach()
        self.norm: Tensor = base.norm.weight.detach()
        last, dtype = parts.lm_head, self.norm.dtype
        self.output_layer: Linear
        if isinstance(last, QuantizedModule):
            self.output_layer = pack_output_layer(last.take(), last.bias, dtype)
        else:
            self.output_layer = _concatenated(dtype, last)
        self._uses: list[Use] = []
        self.rope = self._make_rope(base.rotary_emb, max_model_len)
        self.layers = [
            self._layer(layer, pools.allocate(i, self._kv_heads, self._head_dim, self._head_dim))
            for i, layer in enumerate(base.layers)
        ]
        ops.tune([*self._uses, Use(self.output_layer, self.norm)])

    def _layer(self, layer: Any, pool: LayerPool) -> LayerParts:
        attention, mlp = layer.self_attn, layer.mlp
        q, k, v = attention.q_proj, attention.k_proj, attention.v_proj
        gate, up = mlp.gate_proj, mlp.up_proj
        qk_norm = None
        if hasattr(attention, "q_norm"):
            qk_norm = torch.cat(
                (
                    attention.q_norm.weight.expand(self._heads, -1),
                    attention.k_norm.weight.expand(self._kv_heads, -1),
                )
            ).detach()
        input_norm = layer.input_layernorm.weight.detach()
        post_norm = layer.post_attention_layernorm.weight.detach()
        dtype = input_norm.dtype
        qkv, gate_up = _concatenated(dtype, q, k, v), _concatenated(dtype, gate, up)
        o, down = (_concatenated(dtype, each) for each in (attention.o_proj, mlp.down_proj))
        self._uses += [Use(qkv, input_norm), Use(o), Use(gate_up, post_norm, True), Use(down)]
        return LayerParts(
            input_norm=input_norm,
            qkv=qkv,
            qk_norm=qk_norm,
            o=o,
            post_norm=post_norm,
            gate_up=gate_up,
            down=down,
            pool=pool,
            params=AttentionParams(
                scaling=attention.scaling, sliding_window=_sliding_window(attention)
            ),
        )

    def _make_rope(self, rotary: nn.Module, max_model_len: int) -> Tensor:
        """Return [positions, 2, 2, head_dim / 2]: the cosines of both halves, then -sin, sin."""
        positions = torch.arange(max_model_len, device=self.embedding.device)[None]
        with torch.inference_mode():
            cos, sin = rotary(self.embedding[:1], positions)
        half = self._head_dim // 2
        cos, sin = cos[0].view(-1, 2, half), sin[0].view(-1, 2, half)
        sin = torch.stack((-sin[:, 0], sin[:, 1]), dim=1)
        return torch.stack((cos, sin), dim=1).contiguous()

    @contextmanager
    def windows_at_most(self, length: int) -> Iterator[None]:
        """Shorten sliding windows to `length` keys within the context."""
        before = self.layers
        self.layers = [
            replace(layer, params=replace(layer.params, sliding_window=min(window, length)))
            if (window := layer.params.sliding_window) is not None
            else layer
            for layer in before
        ]
        try:
            yield
        finally:
            self.layers = before

    def forward(self, attention: StepAttention, out: Tensor | None = None) -> Tensor:
        """Return logits [num_logits, vocab_size] in the model's dtype, in `out` if given."""
        x, index = self.hidden(attention), attention.batch.logits_index
        return self.head(x if len(index) == len(x) else x.index_select(0, index), out)

    def hidden(self, attention: StepAttention) -> Tensor:
        """Return the outputs of the last layer, not normed yet: [tokens, hidden]."""
        batch, ops, eps = attention.batch, self._ops, self.eps
        x = F.embedding(batch.input_ids, self.embedding)
        rope = self.rope.index_select(0, batch.positions)
        features = self._features
        for i, layer in enumerate(self.layers):
            if features is not None:
                features.enter(i, batch.slot_mapping, x)
            qkv = ops.norm_linear(x, layer.input_norm, eps, layer.qkv)
            if layer.qk_norm is not None:
                ops.qk_norm_(qkv, layer.qk_norm, eps)
            heads = ops.attend_new(qkv, rope, attention, layer.pool, layer.params)
            x = layer.o.add(heads.flatten(1), x)
            x = ops.mlp(x, layer.post_norm, eps, layer.gate_up, layer.down)
        if features is not None:
            features.enter(len(self.layers), batch.slot_mapping, x)
            if features.spec.final_norm:
                features.final(batch.slot_mapping, ops.rms_norm(x, self.norm, eps))
        return x

    def head(self, hidden: Tensor, out: Tensor | None = None) -> Tensor:
        """Return logits [n, vocab_size] of `hidden` [n, hidden], in `out` if given."""
        return self._ops.norm_linear(hidden, self.norm, self.eps, self.output_layer, out)
