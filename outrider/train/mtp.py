"""One multi-token-prediction module in Qwen3.5's layout (`mtp.*`), for any target.

It shares embedding and head with the target and is applied again and again to its own output.
Norm weights are stored less one. Formula: vLLM's `Qwen3_5MultiTokenPredictor`.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any, ClassVar

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from outrider.train.head import Export, layer_fields
from outrider.train.layers import (
    BlockShape,
    ChainAttention,
    ChainContext,
    RMSNorm,
    SwiGLU,
    shift_rows,
)
from outrider.train.target import Target, TargetBatch


class GatedLayer(nn.Module):
    """A full-attention layer of Qwen3.5."""

    def __init__(self, shape: BlockShape) -> None:
        super().__init__()
        size, eps = shape.hidden_size, shape.norm_eps
        self.input_layernorm = RMSNorm(size, eps, offset=1.0)
        self.self_attn = ChainAttention(size, shape, gated=True)
        self.post_attention_layernorm = RMSNorm(size, eps, offset=1.0)
        self.mlp = SwiGLU(shape)

    def forward(self, x: Tensor, context: ChainContext) -> Tensor:
        """Pre-norm residual layer."""
        x = x + self.self_attn(self.input_layernorm(x), context)
        out: Tensor = x + self.mlp(self.post_attention_layernorm(x))
        return out


class Mtp(nn.Module):
    """Embedding and final-normed state, normed each, joined by `fc`, through one layer."""

    table_names: ClassVar = ()
    layers: ClassVar[tuple[int, ...]] = ()
    draft_ids: ClassVar = None

    def __init__(self, target: Target, shape: BlockShape) -> None:
        super().__init__()
        config, eps, size = target.config, shape.norm_eps, shape.hidden_size
        self.shape = shape
        self.vocab_size = int(config.vocab_size)
        self.num_target_layers = int(config.num_hidden_layers)
        self.max_positions = int(config.max_position_embeddings)
        self.tied = bool(config.tie_word_embeddings)
        self.embedding, self.head = target.embedding, target.head
        self.pre_fc_norm_embedding = RMSNorm(size, eps, offset=1.0)
        self.pre_fc_norm_hidden = RMSNorm(size, eps, offset=1.0)
        self.fc = nn.Linear(2 * size, size, bias=False)
        nn.init.eye_(self.fc.weight[:, size:])  # begin with what the target's head understands
        self.layers_0 = GatedLayer(shape)
        self.norm = RMSNorm(size, eps, offset=1.0)

    def unroll(self, batch: TargetBatch, num_steps: int) -> Iterator[Tensor]:
        """See `head.Head`."""
        dtype = self.fc.weight.dtype
        embedded = F.embedding(batch.token_ids[:, 1:], self.embedding).to(dtype)
        embedded = self.pre_fc_norm_embedding(embedded)
        state = batch.hidden[:, :-1].to(dtype)
        context = ChainContext()
        for _ in range(num_steps):
            x = self.fc(torch.cat((embedded, self.pre_fc_norm_hidden(state)), -1))
            out = self.norm(self.layers_0(x, context))
            yield F.linear(out, self.head.to(out.dtype))
            state = shift_rows(out)

    def export(self) -> Export:
        """Tensors under `mtp.`, and a text config of Qwen3.5's that says what they are."""
        names = {name: weight.detach() for name, weight in self.named_parameters()}
        tensors = {
            "mtp." + name.replace("layers_0.", "layers.0."): weight
            for name, weight in names.items()
        }
        shape = self.shape
        config: dict[str, Any] = {
            "architectures": ["Qwen3_5MTP"],
            "model_type": "qwen3_5_text",
            "num_hidden_layers": self.num_target_layers,
            "mtp_num_hidden_layers": 1,
            **layer_fields(shape, self.max_positions, partial_rotary_factor=1.0),
            "attn_output_gate": True,
            "layer_types": ["full_attention"] * self.num_target_layers,
            "tie_word_embeddings": self.tied,
            "vocab_size": self.vocab_size,
            "dtype": "bfloat16",
        }
        return Export("model.safetensors", tensors, config)
