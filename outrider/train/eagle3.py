"""EAGLE-3 (arXiv 2503.01840), in the layout of `yuhuili/EAGLE3-*`."""

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


class Midlayer(nn.Module):
    """The one decoder layer; attention reads embedding and state side by side."""

    def __init__(self, shape: BlockShape) -> None:
        super().__init__()
        size, eps = shape.hidden_size, shape.norm_eps
        self.input_layernorm = RMSNorm(size, eps)
        self.hidden_norm = RMSNorm(size, eps)
        self.self_attn = ChainAttention(2 * size, shape)
        self.post_attention_layernorm = RMSNorm(size, eps)
        self.mlp = SwiGLU(shape)

    def forward(self, embedded: Tensor, state: Tensor, context: ChainContext) -> Tensor:
        """The state of the next row, not normed."""
        both = torch.cat((self.input_layernorm(embedded), self.hidden_norm(state)), -1)
        y = state + self.self_attn(both, context)
        out: Tensor = y + self.mlp(self.post_attention_layernorm(y))
        return out


class Eagle3(nn.Module):
    """A head over the target's low, middle and high states, with its own head matrix.

    Narrower than the target, it has an embedding of its own (`target_hidden_size` in its config).
    `draft_ids` are the target tokens that it can draft, ascending; None: all.
    """

    table_names: ClassVar = ("embed_tokens", "lm_head")
    draft_ids: Tensor | None

    def __init__(self, target: Target, shape: BlockShape, draft_ids: Tensor | None) -> None:
        super().__init__()
        config = target.config
        self.target_size, self.vocab_size = int(config.hidden_size), int(config.vocab_size)
        count = int(config.num_hidden_layers)
        self.layers = (2, count // 2, count - 3)
        self.shape = shape
        self.register_buffer("draft_ids", draft_ids)  # saved: rows of the head mean nothing without
        self.max_positions = int(config.max_position_embeddings)
        size = shape.hidden_size
        self.fc = nn.Linear(3 * self.target_size, size, bias=False)
        self.midlayer = Midlayer(shape)
        self.norm = RMSNorm(size, shape.norm_eps)
        self.lm_head = nn.Linear(
            size, self.vocab_size if draft_ids is None else len(draft_ids), bias=False
        )
        self.shared_embedding = target.embedding
        if size != self.target_size:
            self.embed_tokens = nn.Embedding(self.vocab_size, size)
            self.embed_tokens.weight.data.copy_(principal_part(target.embedding, size))

    def unroll(self, batch: TargetBatch, num_steps: int) -> Iterator[Tensor]:
        """See `head.Head`."""
        ids = batch.token_ids[:, 1:]
        embedded = self.embed_tokens(ids) if self.owns_embedding else self._shared(ids)
        state = self.fc(batch.layers[:, :-1].to(self.fc.weight.dtype))
        context = ChainContext()
        for _ in range(num_steps):
            out = self.midlayer(embedded, state, context)
            yield self.lm_head(self.norm(out))
            state = shift_rows(out)

    def _shared(self, ids: Tensor) -> Tensor:
        return F.embedding(ids, self.shared_embedding).to(self.fc.weight.dtype)

    @property
    def owns_embedding(self) -> bool:
        """Whether the checkpoint holds an embedding."""
        return self.shape.hidden_size != self.target_size

    def export(self) -> Export:
        """Tensors and config as published EAGLE-3 checkpoints have them."""
        tensors = {name: weight.detach() for name, weight in self.named_parameters()}
        shape, draft_size = self.shape, self.lm_head.out_features
        config: dict[str, Any] = {
            "architectures": ["LlamaForCausalLMEagle3"],
            "model_type": "llama",
            "num_hidden_layers": 1,
            **layer_fields(shape, self.max_positions),
            "mlp_bias": False,
            "tie_word_embeddings": False,
            "vocab_size": self.vocab_size,
            "draft_vocab_size": draft_size,
            "target_hidden_size": self.target_size,
            "eagle_config": {
                "use_aux_hidden_state": True,
                "eagle_aux_hidden_state_layer_ids": list(self.layers),
            },
            "dtype": "bfloat16",
        }
        if self.draft_ids is not None:
            ids = self.draft_ids.cpu()
            member = torch.zeros(self.vocab_size, dtype=torch.bool)
            member[ids] = True
            tensors |= {"d2t": ids - torch.arange(len(ids)), "t2d": member}
        return Export("model.safetensors", tensors, config)


def principal_part(table: Tensor, size: int) -> Tensor:
    """The rows' first `size` principal components, scaled to the rows' spread: a start."""
    rows = table.float()
    values, vectors = torch.linalg.eigh(rows.mT @ rows)
    order = values.argsort(descending=True)[:size]
    part = rows @ vectors[:, order]
    scaled: Tensor = part * (rows.std() / part.std())
    return scaled
