"""A small Llama on one CPU core, one row and one token at a time, in NumPy.

At batch 1 a forward of a draft model is reading its weights once, and on CPU the dispatch of
torch's operators costs more than that. Matrix-vector products and a handful of NumPy calls take a
third of the time, with the same float32 logits up to rounding. More rows than one are torch's to
run; both share the paged cache.
"""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor, nn
from transformers import AutoModelForCausalLM

from outrider.drafting.draft_steps import ReadyRow
from outrider.engine.batch import RowSlice
from outrider.engine.kv_cache import HeadMajorPool, KVPools
from outrider.engine.llama import fits
from outrider.engine.sampling import SamplingBatch, sample

Array = NDArray[np.float32]

_MAX_WEIGHTS = 16_000_000
"""Beyond, the products outweigh the dispatch, and packed bfloat16 reads half as much."""


@dataclass(frozen=True, slots=True)
class _Layer:
    input_norm: Array  # [hidden]
    qkv: Array  # [(heads + 2 * kv_heads) * dim, hidden]
    qkv_bias: Array | None
    o: Array  # [hidden, heads * dim]
    post_norm: Array
    gate_up: Array  # [2 * intermediate, hidden]
    down: Array  # [hidden, intermediate]
    pages: Array  # [2 * kv_heads, num_pages, page_size, dim]: the pool itself, keys first


class GemvLlama:
    """Drafts for one row over `pools`, which a `PagedModel` of the same weights shares.

    Build it with `load`; float32 on CPU only.
    """

    def __init__(self, model: nn.Module, pools: KVPools, max_model_len: int) -> None:
        parts: Any = model
        config, base = parts.config, parts.model
        self._heads: int = config.num_attention_heads
        self._kv_heads: int = config.num_key_value_heads
        self._dim: int = getattr(config, "head_dim", None) or config.hidden_size // self._heads
        self._scale = np.float32(self._dim**-0.5)
        self._eps: float = config.rms_norm_eps
        self._page_size = pools.page_size
        self._embedding = _array(base.embed_tokens.weight)
        self._norm = _array(base.norm.weight)
        self._head = _array(parts.lm_head.weight)
        positions = torch.arange(max_model_len)[None]
        with torch.inference_mode():
            cos, sin = base.rotary_emb(base.embed_tokens.weight[:1], positions)
        half = self._dim // 2
        self._cos = _array(cos[0, :, :half])  # [positions, dim / 2]; the halves are equal
        self._sin = _array(sin[0, :, :half])
        self._layers = [self._layer(layer, pools, i) for i, layer in enumerate(base.layers)]

    @staticmethod
    def load(folder: Path, pools: KVPools, max_model_len: int) -> GemvLlama | None:
        """The checkpoint in `folder`, or None if it is not one that this class runs exactly."""
        model: nn.Module = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32).eval()
        return GemvLlama(model, pools, max_model_len) if can_run(model, max_model_len) else None

    def draft(self, row: RowSlice, ready: ReadyRow) -> list[int]:
        """Feeds the row's tokens and drafts a chain, as `draft_chains` does for many rows."""
        pages = np.asarray(row.block_table, np.int64)
        position = row.start
        for token in row.token_ids[:-1]:
            self._feed(token, position, pages)
            position += 1
        params = None
        if not ready.sampling.greedy:
            params = [ready.sampling]
        chain: list[int] = []
        token = row.token_ids[-1]
        while True:
            logits = self._head @ self._feed(token, position, pages)
            position += 1
            if params is None:
                token = int(logits.argmax())
            else:
                batch = SamplingBatch.build(params, [position])
                token = int(sample(torch.from_numpy(logits)[None], batch))
            chain.append(token)
            if len(chain) == ready.wanted:
                return chain

    def _feed(self, token: int, position: int, pages: NDArray[np.int64]) -> Array:
        """The normed last hidden state [hidden]; writes the token's keys and values."""
        heads, kv_heads, dim = self._heads, self._kv_heads, self._dim
        half, num_turned = dim // 2, (heads + kv_heads) * dim  # queries and keys turn
        page, offset = divmod(position, self._page_size)
        used = pages[: page + 1]
        length = position + 1
        cos, sin = self._cos[position], self._sin[position]
        x = self._embedding[token]
        for layer in self._layers:
            qkv = layer.qkv @ self._rms_norm(x, layer.input_norm)
            if layer.qkv_bias is not None:
                qkv += layer.qkv_bias
            turning = qkv[:num_turned].reshape(-1, 2, half)
            first, second = turning[:, 0], turning[:, 1]
            turned = first * cos - second * sin
            turning[:, 1] = second * cos + first * sin
            turning[:, 0] = turned
            layer.pages[:, used[page], offset] = qkv[heads * dim :].reshape(-1, dim)
            rows = layer.pages.take(used, axis=1).reshape(2 * kv_heads, -1, dim)[:, :length]
            keys, values = rows[:kv_heads], rows[kv_heads:]
            query = qkv[: heads * dim].reshape(kv_heads, -1, dim)
            weights = np.matmul(query, keys.transpose(0, 2, 1))  # [kv_heads, group, length]
            weights *= self._scale
            weights -= weights.max(axis=-1, keepdims=True)
            np.exp(weights, out=weights)
            weights /= weights.sum(axis=-1, keepdims=True)
            x = x + layer.o @ np.matmul(weights, values).reshape(-1)
            gate_up = layer.gate_up @ self._rms_norm(x, layer.post_norm)
            gate, up = gate_up[: len(gate_up) // 2], gate_up[len(gate_up) // 2 :]
            up *= gate
            gate *= 0.5  # silu(g) = g * (1 + tanh(g / 2)) / 2: no exponent that overflows
            np.tanh(gate, out=gate)
            gate += 1.0
            gate *= up
            gate *= 0.5
            x += layer.down @ gate
        return self._rms_norm(x, self._norm)

    def _rms_norm(self, x: Array, weight: Array) -> Array:
        normed: Array = weight * np.float32((float(x.dot(x)) / len(x) + self._eps) ** -0.5)
        normed *= x
        return normed

    def _layer(self, layer: Any, pools: KVPools, index: int) -> _Layer:
        attention, mlp = layer.self_attn, layer.mlp
        projections = (attention.q_proj, attention.k_proj, attention.v_proj)
        bias = None
        if projections[0].bias is not None:
            bias = _array(torch.cat([projection.bias for projection in projections]))
        pool = pools.layer(index)
        assert isinstance(pool, HeadMajorPool), "this runs on CPU"
        joint = pool.joint
        assert joint is not None, "keys and values of a Llama are equally wide"
        return _Layer(
            input_norm=_array(layer.input_layernorm.weight),
            qkv=_array(torch.cat([projection.weight for projection in projections])),
            qkv_bias=bias,
            o=_array(attention.o_proj.weight),
            post_norm=_array(layer.post_attention_layernorm.weight),
            gate_up=_array(torch.cat((mlp.gate_proj.weight, mlp.up_proj.weight))),
            down=_array(mlp.down_proj.weight),
            pages=joint.view(len(joint), pools.num_pages, pools.page_size, -1).numpy(),
        )


def can_run(model: nn.Module, max_model_len: int) -> bool:
    """Whether `GemvLlama` computes exactly this model, and is worth it."""
    if not fits(model):
        return False
    parts: Any = model
    window = getattr(parts.config, "sliding_window", None)
    layers = parts.model.layers
    biased = any(
        linear.bias is not None
        for layer in layers
        for linear in (layer.self_attn.o_proj, layer.mlp.gate_proj, layer.mlp.down_proj)
    )
    unlimited = window is None or window >= max_model_len
    small = sum(weight.numel() for weight in model.parameters()) <= _MAX_WEIGHTS
    return unlimited and not biased and parts.lm_head.bias is None and small


def _array(weight: Tensor) -> Array:
    array: Array = weight.detach().to(torch.float32).contiguous().numpy()
    return array
