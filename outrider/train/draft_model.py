"""A small Llama distilled from the target: the draft model of `--method draft_model`."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any, ClassVar

from torch import Tensor, nn
from transformers import LlamaConfig, LlamaForCausalLM

from outrider.train.head import Export, rope_fields
from outrider.train.layers import BlockShape
from outrider.train.target import Target, TargetBatch


class DraftModel(nn.Module):
    """Reads tokens alone; the output matrix is the embedding."""

    table_names: ClassVar = ("embed_tokens",)
    layers: ClassVar[tuple[int, ...]] = ()
    draft_ids: ClassVar = None

    def __init__(self, target: Target, shape: BlockShape, num_layers: int) -> None:
        super().__init__()
        config = target.config
        self.settings: dict[str, Any] = {
            "architectures": ["LlamaForCausalLM"],
            "hidden_size": shape.hidden_size,
            "intermediate_size": shape.intermediate_size,
            "num_hidden_layers": num_layers,
            "num_attention_heads": shape.num_heads,
            "num_key_value_heads": shape.num_kv_heads,
            "head_dim": shape.head_dim,
            "hidden_act": "silu",
            "rms_norm_eps": shape.norm_eps,
            "max_position_embeddings": int(config.max_position_embeddings),
            **rope_fields(shape.rope_theta),
            "attention_bias": False,
            "mlp_bias": False,
            "tie_word_embeddings": True,
            "vocab_size": int(config.vocab_size),
            "bos_token_id": config.bos_token_id,
            "eos_token_id": config.eos_token_id,
            "pad_token_id": config.pad_token_id,
        }
        self.causal_lm: Any = LlamaForCausalLM(LlamaConfig(**self.settings))

    def unroll(self, batch: TargetBatch, num_steps: int) -> Iterator[Tensor]:
        """See `head.Head`: given the text, a guess is the same in every chain."""
        logits = self.causal_lm(input_ids=batch.token_ids, use_cache=False).logits[:, 1:]
        for _ in range(num_steps):
            yield logits

    def export(self) -> Export:
        """A `LlamaForCausalLM` folder; the tokenizer's files are the caller's to copy."""
        state = self.causal_lm.state_dict()
        tensors = {name: weight for name, weight in state.items() if name != "lm_head.weight"}
        config = {"model_type": "llama", **self.settings, "dtype": "bfloat16"}
        return Export("model.safetensors", tensors, config)
