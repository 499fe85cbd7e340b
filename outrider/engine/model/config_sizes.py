"""Read the sizes of the cache from text configs of `transformers`."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any


def num_kv_heads(config: Any) -> int:
    """Return the number of key heads."""
    return int(getattr(config, "num_key_value_heads", None) or config.num_attention_heads)


def head_dim(config: Any) -> int:
    """Return the width of a head."""
    return int(
        getattr(config, "head_dim", None) or config.hidden_size // config.num_attention_heads
    )


def caches_latents(config: Any) -> bool:
    """Return whether multi-head latent attention keeps a latent instead of keys and values."""
    return getattr(config, "kv_lora_rank", None) is not None


def layer_configs(config: Any) -> Sequence[Any]:
    """Return a config per layer; Gemma 4 has wider heads in its full layers."""
    if getattr(config, "is_heterogeneous", False):
        layers: Sequence[Any] = config.per_layer_config
        return layers
    return [config] * int(config.num_hidden_layers)
