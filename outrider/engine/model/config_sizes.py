"""What a token takes in the cache, as text configs of `transformers` say it.

Some leave out what follows from the rest.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any


def num_kv_heads(config: Any) -> int:
    return int(getattr(config, "num_key_value_heads", None) or config.num_attention_heads)


def head_dim(config: Any) -> int:
    return int(
        getattr(config, "head_dim", None) or config.hidden_size // config.num_attention_heads
    )


def caches_latents(config: Any) -> bool:
    """Of multi-head latent attention, which keeps one latent instead of heads' keys and values."""
    return getattr(config, "kv_lora_rank", None) is not None


def layer_configs(config: Any) -> Sequence[Any]:
    """Each layer's: Gemma 4 has wider heads in full layers."""
    if getattr(config, "is_heterogeneous", False):
        layers: Sequence[Any] = config.per_layer_config
        return layers
    return [config] * int(config.num_hidden_layers)
