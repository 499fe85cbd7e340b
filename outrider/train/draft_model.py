"""A small Llama distilled from the target: the draft model of `--method draft_model`."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any, ClassVar

from torch import Tensor
from transformers import LlamaConfig, LlamaForCausalLM

from outrider.train.head import Export, Head, layer_fields
from outrider.train.layers import BlockShape
from outrider.train.target import Target, TargetBatch


class DraftModel(Head):
    """Reads tokens alone; the output matrix is the embedding."""

    table_names: ClassVar = ("embed_tokens",)

    def __init__(self, target: Target, shape: BlockShape, num_layers: int) -> None:
        super().__init__()
        config = target.config
        self.settings: dict[str, Any] = {
            "architectures": ["LlamaForCausalLM"],
            "num_hidden_layers": num_layers,
            **layer_fields(shape, int(config.max_position_embeddings)),
            "mlp_bias": False,
            "tie_word_embeddings": True,
            "vocab_size": int(config.vocab_size),
            "bos_token_id": config.bos_token_id,
            "eos_token_id": config.eos_token_id,
            "pad_token_id": config.pad_token_id,
        }
        self.causal_lm: Any = LlamaForCausalLM(LlamaConfig(**self.settings))

    def unroll(self, batch: TargetBatch, num_steps: int) -> Iterator[Tensor]:
        """Yield the same guesses for every chain: given the text, they do not differ."""
        logits = self.causal_lm(input_ids=batch.token_ids, use_cache=False).logits[:, 1:]
        for _ in range(num_steps):
            yield logits

    def export(self) -> Export:
        """Return a `LlamaForCausalLM` folder; the caller copies the tokenizer's files."""
        state = self.causal_lm.state_dict()
        tensors = {name: weight for name, weight in state.items() if name != "lm_head.weight"}
        return Export(tensors, {"model_type": "llama", **self.settings})
