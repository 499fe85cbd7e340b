"""One multi-token-prediction module in Qwen3.5's layout (`mtp.*`), for any target.

It shares embedding and head with the target and is applied again and again to its own output.
Norm weights are stored less one. Formula: vLLM's `Qwen3_5MultiTokenPredictor`.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from outrider.train.head import Export, Head, layer_fields
from outrider.train.layers import BlockShape, ChainContext, DecoderLayer, RMSNorm, shift_rows
from outrider.train.target import Target, TargetBatch


class Mtp(Head):
    """Embedding and final-normed state, normed each, joined by `fc`, through one layer."""

    def __init__(self, target: Target, shape: BlockShape) -> None:
        super().__init__()
        eps, size = shape.norm_eps, shape.hidden_size
        self.shape, self.config = shape, target.config
        self.embedding, self.head = target.embedding, target.head
        self.pre_fc_norm_embedding = RMSNorm(size, eps, offset=1.0)
        self.pre_fc_norm_hidden = RMSNorm(size, eps, offset=1.0)
        self.fc = nn.Linear(2 * size, size, bias=False)
        nn.init.eye_(self.fc.weight[:, size:])  # begin with what the target's head understands
        self.layers_0 = DecoderLayer(size, shape, gated=True)
        self.norm = RMSNorm(size, eps, offset=1.0)

    def unroll(self, batch: TargetBatch, num_steps: int) -> Iterator[Tensor]:
        dtype = self.fc.weight.dtype
        embedded = F.embedding(batch.token_ids[:, 1:], self.embedding).to(dtype)
        embedded = self.pre_fc_norm_embedding(embedded)
        state = batch.hidden[:, :-1].to(dtype)
        context, layer = ChainContext(), self.layers_0
        for _ in range(num_steps):
            x = self.fc(torch.cat((embedded, self.pre_fc_norm_hidden(state)), -1))
            out = self.norm(layer(layer.input_layernorm(x), x, context))
            yield F.linear(out, self.head.to(out.dtype))
            state = shift_rows(out)

    def export(self) -> Export:
        """Return tensors under `mtp.`, and a text config of Qwen3.5's."""
        tensors = {
            "mtp." + name.replace("layers_0.", "layers.0."): weight.detach()
            for name, weight in self.named_parameters()
        }
        num_layers, positions = self.config.num_hidden_layers, self.config.max_position_embeddings
        config: dict[str, Any] = {
            "architectures": ["Qwen3_5MTP"],
            "model_type": "qwen3_5_text",
            "num_hidden_layers": num_layers,
            "mtp_num_hidden_layers": 1,
            **layer_fields(self.shape, positions, partial_rotary_factor=1.0),
            "attn_output_gate": True,
            "layer_types": ["full_attention"] * num_layers,
            "tie_word_embeddings": bool(self.config.tie_word_embeddings),
            "vocab_size": int(self.config.vocab_size),
        }
        return Export(tensors, config)
