"""Llama layers of draft modules, in few operations, as `engine.model.llama` runs the target's."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from types import MappingProxyType
from typing import Any

import torch
from huggingface_hub.errors import StrictDataclassError
from torch import Tensor
from transformers import LlamaConfig
from transformers.models.llama.modeling_llama import LlamaRotaryEmbedding

from outrider.drafting.hidden_states.checkpoints import Checkpoint, TensorSource
from outrider.drafting.hidden_states.heads.base import (
    HeadSetup,
    HeadShape,
    Place,
    RecurrentHead,
    wanted_rows,
)
from outrider.drafting.hidden_states.heads.format import HeadFormat
from outrider.engine.attention.base import AttentionParams, StepAttention
from outrider.engine.kv_cache.pools import KVPools, LayerPool
from outrider.engine.layers.linear import Linear
from outrider.engine.layers.ops import Use
from outrider.errors import ConfigError

Rotary = Callable[[Tensor, Tensor], tuple[Tensor, Tensor]]
"""Maps a tensor in the wanted dtype and positions [1, n] to cosines and sines [1, n, rotated]."""

_ROPE_TYPES = {"default", "linear", "llama3", "yarn"}  # the same rotation at any text length
_SETTINGS = (
    *("hidden_size", "intermediate_size", "num_attention_heads", "num_key_value_heads"),
    *("head_dim", "rms_norm_eps", "max_position_embeddings", "hidden_act"),
    *("num_hidden_layers", "rope_theta", "rope_scaling", "rope_parameters"),
)


class LlamaLayer:
    """Layer `index` of a module, without its input norms, in which the formats differ."""

    def __init__(
        self,
        source: TensorSource,
        prefix: str,
        shape: HeadShape,
        place: Place,
        *,
        index: int,
        input_width: int,
        window: int | None = None,
    ) -> None:
        """Read the tensors after `prefix`. Raises `ConfigError`.

        Queries, keys and values are made of inputs `input_width` wide. A query sees `window` keys.
        """

        def product(parts: Sequence[tuple[str, int]], width: int) -> Linear:
            weights = [place.put(source.tensor(f"{p}.weight", n, width)) for p, n in parts]
            biases = [
                place.put(source.tensor(f"{p}.bias", n)) for p, n in parts if f"{p}.bias" in source
            ]
            if biases and len(biases) < len(parts):
                raise ConfigError(f"{source.folder}: some biases of {parts[0][0]} are missing.")
            return place.linear(torch.cat(weights), torch.cat(biases) if biases else None)

        attention, mlp = f"{prefix}self_attn.", f"{prefix}mlp."
        hidden, inner, dim = shape.hidden_size, shape.intermediate_size, shape.head_dim
        counts = {"q": shape.num_heads, "k": shape.num_kv_heads, "v": shape.num_kv_heads}
        self.qkv = product(
            [(f"{attention}{name}_proj", count * dim) for name, count in counts.items()],
            input_width,
        )
        self._qk_norm: Tensor | None = None
        if f"{attention}q_norm.weight" in source:
            norms = [
                place.put(source.tensor(f"{attention}{n}_norm.weight", dim)).expand(counts[n], -1)
                for n in "qk"
            ]
            self._qk_norm = torch.cat(norms).contiguous()
        self._o = product([(f"{attention}o_proj", hidden)], shape.num_heads * dim)
        name = f"{prefix}post_attention_layernorm.weight"
        self._post_norm = place.put(source.tensor(name, hidden))
        self._gate_up = product([(f"{mlp}gate_proj", inner), (f"{mlp}up_proj", inner)], hidden)
        self._down = product([(f"{mlp}down_proj", hidden)], inner)
        self._ops, self._shape, self._index = place.ops, shape, index
        self._params = AttentionParams(scaling=dim**-0.5, sliding_window=window)
        self._pool: LayerPool | None = None

    @property
    def pool(self) -> LayerPool:
        """The layer's keys and values; `bind` comes first."""
        assert self._pool is not None, "bind() comes first"
        return self._pool

    def uses(self, input_norm: Tensor | None) -> tuple[Use, ...]:
        """Return the products; queries, keys and values are made with `input_norm`, or alone."""
        return (
            Use(self.qkv, input_norm, alone=input_norm is None),
            Use(self._o),
            Use(self._gate_up, self._post_norm, gated=True),
            Use(self._down),
        )

    def bind(self, pools: KVPools) -> None:
        self._pool = pools.allocate(self._index, *self._shape.kv_layer)

    def __call__(
        self,
        qkv: Tensor,
        residual: Tensor,
        rope: Tensor,
        attention: StepAttention,
        gate: Tensor | None = None,
        rows: Tensor | None = None,
    ) -> Tensor:
        """Map the products [n, ...] to hidden states [n, hidden]; may overwrite both inputs.

        `gate` [n, heads * dim] multiplies the output of attention. With `rows` int64 [m] only these
        go on after attention: `gate` and the result are [m, ...].
        """
        eps = self._shape.eps
        if self._qk_norm is not None:
            self._ops.qk_norm_(qkv, self._qk_norm, eps)
        heads = self._ops.attend_new(qkv, rope, attention, self.pool, self._params).flatten(1)
        if rows is not None:
            heads, residual = heads.index_select(0, rows), residual.index_select(0, rows)
        x = self._o.add(heads if gate is None else heads * gate, residual)
        return self._ops.mlp(x, self._post_norm, eps, self._gate_up, self._down)


class LlamaStack:
    """The layers of a checkpoint, their rotary table, and the norms before all but the first."""

    def __init__(
        self,
        checkpoint: Checkpoint,
        settings: dict[str, Any],
        prefixes: Sequence[str],
        setup: HeadSetup,
        *,
        input_states: int = 1,
        windows: Mapping[int, int] = MappingProxyType({}),
    ) -> None:
        """Read one layer per prefix; the first one's input is `input_states` states wide.

        `windows` are the keys that queries of sliding layers see, by layer. `settings` are those of
        a Llama config: where they are silent, Llama's defaults hold, also of `rope_theta`. Raises
        `ConfigError`.
        """
        place = setup.place
        config = _llama_config(settings, str(checkpoint.folder))
        self.shape = HeadShape(
            hidden_size=config.hidden_size,
            num_heads=config.num_attention_heads,
            num_kv_heads=config.num_key_value_heads,
            head_dim=config.head_dim,
            max_model_len=setup.num_positions(config.max_position_embeddings),
            intermediate_size=config.intermediate_size,
            eps=config.rms_norm_eps,
        )
        rotary = LlamaRotaryEmbedding(config).to(place.device)
        self.rope = rope_table(rotary, self.shape, place)[0]
        self.layers: list[LlamaLayer] = []
        self.norms: list[Tensor] = []
        hidden = self.shape.hidden_size
        for i, prefix in enumerate(prefixes):
            width = hidden if i else input_states * hidden
            layer = LlamaLayer(
                checkpoint,
                prefix,
                self.shape,
                place,
                index=i,
                input_width=width,
                window=windows.get(i),
            )
            self.layers.append(layer)
            if i:
                name = f"{prefix}input_layernorm.weight"
                self.norms.append(place.put(checkpoint.tensor(name, hidden)))


def read_stack(
    found: HeadFormat,
    setup: HeadSetup,
    *,
    input_states: int = 1,
    windows: Mapping[int, int] = MappingProxyType({}),
) -> LlamaStack:
    """Read a module's layers, as `LlamaStack` says.

    Raises `ConfigError`, also for a module that was trained for a target of another width.
    """
    checkpoint = found.checkpoint
    stack = LlamaStack(
        checkpoint,
        found.layer_config,
        found.layer_prefixes,
        setup,
        input_states=input_states,
        windows=windows,
    )
    expected = checkpoint.config.get("target_hidden_size") or stack.shape.hidden_size
    setup.target.check_trained_for(checkpoint.folder, expected)
    return stack


class LlamaHead(RecurrentHead):
    """A `RecurrentHead` of Llama layers; a subclass defines their input and output."""

    def __init__(self, stack: LlamaStack, place: Place, embedding: Tensor) -> None:
        super().__init__(stack.shape, place, stack.layers, embedding)
        self._layers, self._norms, self._rope = stack.layers, stack.norms, stack.rope
        # The first layer's input comes ready.
        pairs = zip((None, *self._norms), self._layers, strict=True)
        self._layer_uses = [use for norm, layer in pairs for use in layer.uses(norm)]

    def _run_layers(self, qkv: Tensor, x: Tensor, attention: StepAttention) -> Tensor:
        """Map the first layer's products and residual [n, ...] to outputs of `wanted_rows`."""
        rope = self._rope.index_select(0, attention.batch.positions)
        first, last, rows = self._layers[0], self._layers[-1], wanted_rows(attention.batch)
        x = first(qkv, x, rope, attention, rows=rows if first is last else None)
        for norm, layer in zip(self._norms, self._layers[1:], strict=True):
            qkv = self._ops.norm_linear(x, norm, self._shape.eps, layer.qkv)
            x = layer(qkv, x, rope, attention, rows=rows if layer is last else None)
        return x


def rope_table(rotary: Rotary, shape: HeadShape, place: Place) -> tuple[Tensor, int]:
    """Return a table [max_model_len, 2, 2, head_dim / 2], and how much of a head is rotated.

    The table holds the cosines of both halves, then the sines as -sin, sin, as
    `LlamaOps.rotate_and_store` reads them. Numbers that are not rotated have 1 and 0.
    """
    positions = torch.arange(shape.max_model_len, device=place.device)[None]
    like = torch.empty(1, dtype=place.dtype, device=place.device)
    with torch.inference_mode():
        cos, sin = (each[0] for each in rotary(like, positions))
    half, rotated = shape.head_dim // 2, cos.shape[-1] // 2
    table = torch.zeros(shape.max_model_len, 2, 2, half, dtype=place.dtype, device=place.device)
    table[:, 0] = 1
    table[:, 0, :, :rotated] = cos[:, None, :rotated]
    table[:, 1, 0, :rotated] = -sin[:, :rotated]
    table[:, 1, 1, :rotated] = sin[:, :rotated]
    return table, 2 * rotated


def _llama_config(settings: dict[str, Any], where: str) -> LlamaConfig:
    """Return a Llama config from the settings that matter. Raises `ConfigError`."""
    try:
        config = LlamaConfig(**{k: v for k, v in settings.items() if k in _SETTINGS})
    except (StrictDataclassError, ArithmeticError, KeyError, TypeError, ValueError) as error:
        raise ConfigError(f"config.json in {where}: {error}") from error
    rope: dict[str, Any] = config.rope_parameters
    if config.max_position_embeddings < 1:
        longest = config.max_position_embeddings
        raise ConfigError(f"{where}: {longest} positions are none to draft at.")
    if config.hidden_act != "silu":
        raise ConfigError(f"{where}: hidden_act {config.hidden_act!r} is not supported.")
    if rope.get("rope_type", "default") not in _ROPE_TYPES:
        raise ConfigError(f"{where}: rope_type {rope['rope_type']!r} is not supported.")
    return config
