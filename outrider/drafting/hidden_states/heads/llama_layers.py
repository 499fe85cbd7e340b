"""Llama layers of draft modules, in few operations, as `engine.llama` runs the target's."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
from huggingface_hub.errors import StrictDataclassError
from torch import Tensor
from transformers import LlamaConfig
from transformers.models.llama.modeling_llama import LlamaRotaryEmbedding

from outrider.drafting.hidden_states.checkpoints import TensorSource
from outrider.engine.attention.base import AttentionParams, StepAttention
from outrider.engine.kv_cache.pools import KVPools, LayerPool
from outrider.engine.layers.linear import Linear
from outrider.engine.layers.ops import LlamaOps, Use
from outrider.engine.model.attention_backends import AttentionTraits
from outrider.engine.model.pack import pack_linear
from outrider.errors import ConfigError

_ROPE_TYPES = {"default", "linear", "llama3", "yarn"}  # the same turns at any length of the text


@dataclass(frozen=True, slots=True)
class Place:
    """Where a module computes, and in what."""

    dtype: torch.dtype
    device: torch.device

    def put(self, tensor: Tensor) -> Tensor:
        return tensor.to(self.device, self.dtype)


@dataclass(frozen=True, slots=True)
class LlamaShape:
    """Sizes of all layers, and their rotary table."""

    hidden_size: int
    intermediate_size: int
    num_heads: int
    num_kv_heads: int
    head_dim: int
    eps: float
    max_model_len: int
    config: LlamaConfig

    @staticmethod
    def of(folder_config: dict[str, Any], where: str, max_model_len: int | None) -> LlamaShape:
        """From the settings of a Llama config, which `where` names; raises `ConfigError`.

        What is not set has Llama's defaults: `rope_theta` is 10000, whatever the target's is.
        """
        try:
            config = LlamaConfig(**{k: v for k, v in folder_config.items() if k in _SETTINGS})
        except (StrictDataclassError, ArithmeticError, KeyError, TypeError, ValueError) as error:
            raise ConfigError(f"config.json in {where}: {error}") from error
        rope: dict[str, Any] = config.rope_parameters
        longest = max_model_len or config.max_position_embeddings
        if longest < 1:
            raise ConfigError(f"{where}: {longest} positions are none to draft at.")
        if config.hidden_act != "silu":
            raise ConfigError(f"{where}: hidden_act {config.hidden_act!r} is not supported.")
        if rope.get("rope_type", "default") not in _ROPE_TYPES:
            raise ConfigError(f"{where}: rope_type {rope['rope_type']!r} is not supported.")
        return LlamaShape(
            hidden_size=config.hidden_size,
            intermediate_size=config.intermediate_size,
            num_heads=config.num_attention_heads,
            num_kv_heads=config.num_key_value_heads,
            head_dim=config.head_dim,
            eps=config.rms_norm_eps,
            max_model_len=longest,
            config=config,
        )

    def rope_table(self, place: Place) -> Tensor:
        """[max_model_len, 2, 2, head_dim / 2]: cosines for both halves, then sines as -sin, sin."""
        like = torch.empty(1, dtype=place.dtype, device=place.device)
        positions = torch.arange(self.max_model_len, device=place.device)[None]
        with torch.inference_mode():
            cos, sin = LlamaRotaryEmbedding(self.config).to(place.device)(like, positions)
        cos, sin = (each[0].view(self.max_model_len, 2, self.head_dim // 2) for each in (cos, sin))
        return torch.stack((cos, torch.stack((-sin[:, 0], sin[:, 1]), dim=1)), dim=1).contiguous()

    def attention_traits(self, dtype: torch.dtype) -> AttentionTraits:
        return AttentionTraits(
            head_dims=frozenset((self.head_dim,)),
            num_heads=self.num_heads,
            num_kv_heads=self.num_kv_heads,
            dtype=dtype,
            softcap=False,
            sinks=False,
            latent=False,
        )


_SETTINGS = (
    *("hidden_size", "intermediate_size", "num_attention_heads", "num_key_value_heads"),
    *("head_dim", "rms_norm_eps", "max_position_embeddings", "hidden_act"),
    *("num_hidden_layers", "rope_theta", "rope_scaling", "rope_parameters"),
)


class LlamaLayer:
    """One layer of a checkpoint, without its input norms: they are what the formats differ in."""

    def __init__(
        self,
        checkpoint: TensorSource,
        prefix: str,
        shape: LlamaShape,
        place: Place,
        ops: LlamaOps,
        *,
        input_width: int,
    ) -> None:
        """`input_width`: of what queries, keys and values are made of. Raises `ConfigError`."""

        def product(parts: Sequence[tuple[str, int]], width: int) -> Linear:
            weights = [place.put(checkpoint.tensor(f"{p}.weight", n, width)) for p, n in parts]
            biases = [
                place.put(checkpoint.tensor(f"{p}.bias", n))
                for p, n in parts
                if f"{p}.bias" in checkpoint
            ]
            if biases and len(biases) < len(parts):
                raise ConfigError(f"{checkpoint.folder}: some biases of {parts[0][0]} are missing.")
            return pack_linear(torch.cat(weights), torch.cat(biases) if biases else None)

        attention, mlp, hidden = f"{prefix}self_attn.", f"{prefix}mlp.", shape.hidden_size
        queries, keys = shape.num_heads * shape.head_dim, shape.num_kv_heads * shape.head_dim
        self.qkv = product(
            [(f"{attention}{n}_proj", w) for n, w in (("q", queries), ("k", keys), ("v", keys))],
            input_width,
        )
        self._qk_norm: Tensor | None = None
        if f"{attention}q_norm.weight" in checkpoint:
            norms = [
                place.put(checkpoint.tensor(f"{attention}{n}_norm.weight", shape.head_dim))
                for n in "qk"
            ]
            counts = (shape.num_heads, shape.num_kv_heads)
            self._qk_norm = torch.cat(
                [norm.expand(count, -1) for norm, count in zip(norms, counts, strict=True)]
            ).contiguous()
        self._o = product([(f"{attention}o_proj", hidden)], queries)
        name = f"{prefix}post_attention_layernorm.weight"
        self._post_norm = place.put(checkpoint.tensor(name, hidden))
        inner = shape.intermediate_size
        self._gate_up = product([(f"{mlp}gate_proj", inner), (f"{mlp}up_proj", inner)], hidden)
        self._down = product([(f"{mlp}down_proj", hidden)], inner)
        self._ops = ops
        self._eps = shape.eps
        self._params = AttentionParams(scaling=shape.head_dim**-0.5)
        self._shape = shape
        self._pool: LayerPool | None = None

    def uses(self, input_norm: Tensor | None) -> tuple[Use, ...]:
        """Its products; queries, keys and values are made with `input_norm`, or alone."""
        return (
            Use(self.qkv, input_norm, alone=input_norm is None),
            Use(self._o),
            Use(self._gate_up, self._post_norm, gated=True),
            Use(self._down),
        )

    def bind(self, pools: KVPools, index: int) -> None:
        """Keep its keys and values there, as layer `index`."""
        dim = self._shape.head_dim
        self._pool = pools.allocate(index, self._shape.num_kv_heads, dim, dim)

    def __call__(
        self,
        qkv: Tensor,
        residual: Tensor,
        rope: Tensor,
        attention: StepAttention,
        gate: Tensor | None = None,
        rows: Tensor | None = None,
    ) -> Tensor:
        """From its products [n, ...] to hidden states [n, hidden]; may overwrite both inputs.

        `gate` [n, heads * dim] multiplies what attention puts out. With `rows` int64 [m] only these
        go on after attention: `gate` and the result are [m, ...].
        """
        assert self._pool is not None, "bind() comes first"
        if self._qk_norm is not None:
            self._ops.qk_norm_(qkv, self._qk_norm, self._eps)
        heads = self._ops.attend_new(qkv, rope, attention, self._pool, self._params).flatten(1)
        if rows is not None:
            heads, residual = heads.index_select(0, rows), residual.index_select(0, rows)
        x = self._o.add(heads if gate is None else heads * gate, residual)
        gated = self._ops.norm_gated(x, self._post_norm, self._eps, self._gate_up)
        return self._down.add(gated, x)
