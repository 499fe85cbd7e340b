"""EAGLE-3 (arXiv 2503.01840), in the layout of `yuhuili/EAGLE3-*`."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any, ClassVar

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from outrider.aux_layers import KEY, trained_layers
from outrider.train.head import Export, Head, draft_vocabulary_tensors, layer_fields
from outrider.train.layers import BlockShape, ChainContext, DecoderLayer, RMSNorm, shift_rows
from outrider.train.target import Target, TargetBatch


class Midlayer(DecoderLayer):
    """The one decoder layer; attention reads embedding and state side by side."""

    def __init__(self, shape: BlockShape) -> None:
        super().__init__(2 * shape.hidden_size, shape)
        self.hidden_norm = RMSNorm(shape.hidden_size, shape.norm_eps)


class Eagle3(Head):
    """A head over the target's low, middle and high states.

    A head as wide as the target shares the target's embedding. If such a head drafts all tokens, it
    also shares the target's output matrix, else its own begins as the target's rows. A narrower
    head has both of its own (`target_hidden_size` in its config). `sample [rows, n]` are tokens
    from which the spread of states is measured.
    """

    table_names: ClassVar = ("embed_tokens", "lm_head")
    state_scale: Tensor

    def __init__(
        self, target: Target, shape: BlockShape, draft_ids: Tensor | None, sample: Tensor
    ) -> None:
        super().__init__(draft_ids)
        config = target.config
        self.target_size, self.vocab_size = int(config.hidden_size), int(config.vocab_size)
        self.layers = trained_layers(int(config.num_hidden_layers))
        self.shape = shape
        self.max_positions = int(config.max_position_embeddings)
        size = shape.hidden_size
        self.owns_embedding = size != self.target_size
        self.shares_head = size == self.target_size and draft_ids is None
        self.fc = nn.Linear(3 * self.target_size, size, bias=False)
        self.midlayer = Midlayer(shape)
        self.norm = RMSNorm(size, shape.norm_eps)
        self.shared_embedding, self.shared_head = target.embedding, target.head
        if self.owns_embedding:
            self.embed_tokens = nn.Embedding(self.vocab_size, size)
            self.embed_tokens.weight.data.copy_(principal_part(target.embedding, size))
        if not self.shares_head:
            count = self.vocab_size if draft_ids is None else len(draft_ids)
            self.lm_head = nn.Linear(size, count, bias=False)
        self._begin(target.read(sample, self.layers))

    @torch.no_grad()
    def _begin(self, batch: TargetBatch) -> None:
        """Scale the states to a spread near 1 for Muon, and begin with the highest state."""
        spread = batch.layers.float().pow(2).mean((0, 1)).view(3, -1).mean(-1).sqrt()
        # A power of two: dividing `fc` by it when it is written changes no mantissa.
        scale = spread.log2().round().exp2().repeat_interleave(self.target_size)
        self.register_buffer("state_scale", scale)
        if self.owns_embedding:
            return
        # The nearest that a factor per channel makes it to what the target's head understands.
        high = batch.layers.float()[..., -self.target_size :] / scale[-self.target_size :]
        factor = (high * batch.hidden.float()).mean((0, 1)) / high.pow(2).mean((0, 1))
        self.fc.weight.data[:, -self.target_size :] += torch.diag(factor).to(self.fc.weight)
        if not self.shares_head:
            self.lm_head.weight.data.copy_(self.shared_head[self.draft_ids])

    def unroll(self, batch: TargetBatch, num_steps: int) -> Iterator[Tensor]:
        ids, dtype = batch.token_ids[:, 1:], self.fc.weight.dtype
        if self.owns_embedding:
            embedded = self.embed_tokens(ids)
        else:
            embedded = F.embedding(ids, self.shared_embedding).to(dtype)
        state = self.fc((batch.layers[:, :-1] / self.state_scale).to(dtype))
        context, layer = ChainContext(), self.midlayer
        for _ in range(num_steps):
            both = torch.cat((layer.input_layernorm(embedded), layer.hidden_norm(state)), -1)
            out = layer(both, state, context)
            normed = self.norm(out)
            if self.shares_head:
                yield F.linear(normed, self.shared_head.to(normed.dtype))
            else:
                yield self.lm_head(normed)
            state = shift_rows(out)

    def export(self) -> Export:
        """Return tensors and config as published EAGLE-3 checkpoints have them."""
        tensors = {name: weight.detach() for name, weight in self.named_parameters()}
        tensors["fc.weight"] = tensors["fc.weight"] / self.state_scale
        config: dict[str, Any] = {
            "architectures": ["LlamaForCausalLMEagle3"],
            "model_type": "llama",
            "num_hidden_layers": 1,
            **layer_fields(self.shape, self.max_positions),
            "mlp_bias": False,
            "tie_word_embeddings": False,
            "vocab_size": self.vocab_size,
            # Without a head in the file there is none: readers then share the target's.
            **({} if self.shares_head else {"draft_vocab_size": self.lm_head.out_features}),
            "target_hidden_size": self.target_size,
            # vLLM's newer runner (0.23) reads the layers here, and others below.
            KEY: list(self.layers),
            "eagle_config": {"use_aux_hidden_state": True, KEY: list(self.layers)},
        }
        if self.draft_ids is not None:
            tensors |= draft_vocabulary_tensors(self.draft_ids, self.vocab_size)
        return Export(tensors, config)


def principal_part(table: Tensor, size: int) -> Tensor:
    """Return the rows' first `size` principal components, scaled to the rows' spread."""
    rows = table.float()
    values, vectors = torch.linalg.eigh(rows.mT @ rows)
    order = values.argsort(descending=True)[:size]
    part = rows @ vectors[:, order]
    scaled: Tensor = part * (rows.std() / part.std())
    return scaled
