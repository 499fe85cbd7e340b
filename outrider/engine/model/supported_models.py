"""Refuse models that this engine would not run exactly, by their config and class.

The self-test compares numbers. These checks find what a short test cannot: state outside the KV
cache, attention that depends on a mask we do not build, and rotary embeddings that one long row
changes for the whole batch.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

from torch import nn
from transformers.models.auto.modeling_auto import MODEL_FOR_CAUSAL_LM_MAPPING

from outrider.errors import UnsupportedModelError

_LAYER_TYPES = {"full_attention", "sliding_attention"}
# Their classes for causal language modelling are decoders only where config.json says is_decoder.
_ENCODERS = frozenset(
    {
        *("albert", "bert", "bert-generation", "big_bird", "camembert", "data2vec-text", "electra"),
        *("ernie", "megatron-bert", "rembert", "roberta", "roberta-prelayernorm", "roc_bert"),
        *("roformer", "xlm-roberta", "xlm-roberta-xl", "xmod"),
    }
)
DEFAULT_MAX_MODEL_LEN = 2048  # for a config that names no limit


def check_supported(model: nn.Module) -> None:
    """Raise `UnsupportedModelError` with the reason if the model cannot be served exactly."""
    reason = _class_refusal(model) or _refusal(model.config)
    if reason is not None:
        raise UnsupportedModelError(f"{type(model).__name__} is not supported: {reason}.")


def check_supported_config(config: Any) -> None:
    """Raise `UnsupportedModelError` for what config.json alone says, before weights are read."""
    reason = _refusal(config)
    if reason is None and type(config) not in MODEL_FOR_CAUSAL_LM_MAPPING:
        reason = (
            "transformers has no class of its kind that continues a text (AutoModelForCausalLM)"
        )
    if reason is not None:
        name = next(iter(getattr(config, "architectures", None) or ()), config.model_type)
        raise UnsupportedModelError(f"{name} is not supported: {reason}.")


def _class_refusal(model: Any) -> str | None:
    if getattr(model, "_is_stateful", False):
        return "it keeps recurrent state, which cannot be rolled back when a draft is rejected"
    if not getattr(model, "_supports_attention_backend", False):
        return "its modules do not go through transformers' AttentionInterface"
    return None


def _refusal(config: Any) -> str | None:
    text = config.get_text_config(decoder=True)
    if getattr(config, "is_encoder_decoder", False):
        return "it is an encoder-decoder, and only decoders are served"
    if config.model_type in _ENCODERS and not getattr(text, "is_decoder", False):
        return "it is an encoder: its attention looks at the tokens behind, too"
    both_ways = getattr(text, "use_bidirectional_attention", None) in (True, "all")
    known = hasattr(type(text), "use_bidirectional_attention")  # others do not look at it
    if not getattr(text, "is_causal", True) or (both_ways and known):
        return "its attention is not causal"
    kinds = set(getattr(text, "layer_types", None) or ()) - _LAYER_TYPES
    if kinds:
        return f"it has layers of type {', '.join(sorted(kinds))}; only full and sliding are known"
    chunk = getattr(text, "attention_chunk_size", None)
    if chunk is not None:
        return f"its attention is chunked (attention_chunk_size={chunk})"
    if getattr(text, "num_kv_shared_layers", 0):
        return "some of its layers share the keys and values of others (num_kv_shared_layers)"
    if getattr(text, "index_topk", None) is not None:
        return "it picks keys with an indexer (index_topk), which is not implemented"
    return None


def max_exact_len(model: nn.Module) -> int:
    """Return the longest row, in tokens, whose positions do not depend on the batch.

    Longrope switches its frequencies for the *whole* forward once any row is longer than the
    original context, so such a model is served up to that length. Dynamic rope changes only past
    max_position_embeddings, which bounds every model.
    """
    config: Any = model.config
    text = config.get_text_config(decoder=True)
    limit = int(getattr(text, "max_position_embeddings", None) or DEFAULT_MAX_MODEL_LEN)
    for rope in _ropes(text):
        if rope.get("rope_type") == "longrope":
            original = rope.get("original_max_position_embeddings")
            limit = min(limit, int(original or limit))
    return limit


def _ropes(config: Any) -> Iterator[dict[str, Any]]:
    """Yield the rotary parameters, one set for the model or one per layer type."""
    rope = getattr(config, "rope_parameters", None) or {}
    if "rope_type" in rope:
        yield rope
    else:
        yield from (value for value in rope.values() if isinstance(value, dict))
