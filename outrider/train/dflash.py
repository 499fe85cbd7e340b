"""DFlash, in the layout of `z-lab/*-DFlash-*`: a block of tokens from the target's states."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any, ClassVar

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from outrider.aux_layers import spread_layers
from outrider.train.head import Export, Head, draft_vocabulary_tensors, layer_fields
from outrider.train.layers import BlockShape, RMSNorm, SwiGLU, rotate, shift_rows
from outrider.train.target import Target, TargetBatch


class Blocks:
    """Blocks of `width` tokens that begin at every row at once.

    The block of row p is the token at p + 1 and mask tokens after it. All of it sees the states of
    rows up to p, and itself.
    """

    def __init__(self, length: int, width: int, device: torch.device) -> None:
        row = torch.arange(length, device=device)
        self.width, self.rows = width, row
        self.positions = (row[:, None] + 1 + torch.arange(width, device=device)).flatten()
        self.hidden = (row > row[:, None])[:, None]  # states that a row's slots do not see

    def attend(
        self, query: Tensor, states: tuple[Tensor, Tensor], own: tuple[Tensor, Tensor]
    ) -> Tensor:
        """Return what queries read: [rows, heads, length * width, dim], a block after the other.

        `states` are keys and values [rows, heads, length, dim] of the target's states, `own` those
        of the blocks, shaped as the queries. A block's tokens are few, so they have products of
        their own instead of a mask over all blocks.
        """
        rows, heads, count, dim = query.shape
        length = count // self.width
        query = query * dim**-0.5
        own_key, own_value = (each.view(rows, heads, length, self.width, dim) for each in own)
        seen = (query @ states[0].mT).view(rows, heads, length, self.width, length)
        seen = seen.masked_fill(self.hidden, -torch.inf)
        inside = query.view_as(own_key) @ own_key.mT
        share = torch.cat((seen, inside), -1).float().softmax(-1).to(query.dtype)
        of_states = share[..., :length].reshape(rows, heads, count, length)
        read: Tensor = of_states @ states[1]
        return read + (share[..., length:] @ own_value).reshape(read.shape)


class BlockAttention(nn.Module):
    """Attention of blocks to the target's states and to themselves; queries and keys are normed."""

    def __init__(self, shape: BlockShape) -> None:
        super().__init__()
        self.shape = shape
        size, width = shape.hidden_size, shape.num_heads * shape.head_dim
        self.q_proj = nn.Linear(size, width, bias=False)
        self.k_proj = nn.Linear(size, shape.num_kv_heads * shape.head_dim, bias=False)
        self.v_proj = nn.Linear(size, shape.num_kv_heads * shape.head_dim, bias=False)
        self.o_proj = nn.Linear(width, size, bias=False)
        nn.init.zeros_(self.o_proj.weight)
        self.q_norm = RMSNorm(shape.head_dim, shape.norm_eps)
        self.k_norm = RMSNorm(shape.head_dim, shape.norm_eps)

    def forward(self, x: Tensor, states: Tensor, blocks: Blocks) -> Tensor:
        """Map tokens [rows, length * width, size]; `states` are [rows, length, size]."""
        shape, rows = self.shape, len(x)
        query = self.q_norm(self.q_proj(x).view(rows, x.shape[1], shape.num_heads, -1))
        query = rotate(query.transpose(1, 2), shape.rope_theta, blocks.positions)
        of_states = self._keys_values(states, blocks.rows)
        y = blocks.attend(query, of_states, self._keys_values(x, blocks.positions))
        out: Tensor = self.o_proj(y.transpose(1, 2).reshape(rows, x.shape[1], -1))
        return out

    def _keys_values(self, x: Tensor, positions: Tensor) -> tuple[Tensor, Tensor]:
        """Return keys and values [rows, heads, n, dim], repeated for queries that share them."""
        rows, length, _ = x.shape
        shape, group = self.shape, self.shape.num_heads // self.shape.num_kv_heads
        key = self.k_norm(self.k_proj(x).view(rows, length, shape.num_kv_heads, -1))
        key = rotate(key.transpose(1, 2), shape.rope_theta, positions)
        value = self.v_proj(x).view(rows, length, shape.num_kv_heads, -1).transpose(1, 2)
        return key.repeat_interleave(group, 1), value.repeat_interleave(group, 1)


class BlockLayer(nn.Module):
    """A decoder layer of Qwen3 over blocks."""

    def __init__(self, shape: BlockShape) -> None:
        super().__init__()
        self.input_layernorm = RMSNorm(shape.hidden_size, shape.norm_eps)
        self.self_attn = BlockAttention(shape)
        self.post_attention_layernorm = RMSNorm(shape.hidden_size, shape.norm_eps)
        self.mlp = SwiGLU(shape)

    def forward(self, x: Tensor, states: Tensor, blocks: Blocks) -> Tensor:
        y = x + self.self_attn(self.input_layernorm(x), states, blocks)
        out: Tensor = y + self.mlp(self.post_attention_layernorm(y))
        return out


@dataclass(frozen=True)
class DFlashShape:
    """The sizes of a head."""

    layer: BlockShape
    num_layers: int
    num_steps: int  # guesses of a block


class DFlash(Head):
    """A head with the target's embedding, over states of `spread_layers`.

    If it drafts all tokens, it shares the target's output layer, too, else its own begins as the
    target's rows. Blocks of all lengths up to `num_steps` guesses are trained, since a round may
    want fewer. `sample [rows, n]` are tokens from which the spread of states is measured.
    """

    table_names: ClassVar[tuple[str, ...]] = ("lm_head",)
    from_anchor: ClassVar[bool] = False
    """The block's first token, which is no mask, guesses the next token."""
    state_scale: Tensor

    def __init__(
        self, target: Target, sizes: DFlashShape, draft_ids: Tensor | None, sample: Tensor
    ) -> None:
        super().__init__(draft_ids)
        config, shape, size = target.config, sizes.layer, sizes.layer.hidden_size
        self.vocab_size, self.num_steps = int(config.vocab_size), sizes.num_steps
        self.num_target_layers = int(config.num_hidden_layers)
        self.max_positions = int(config.max_position_embeddings)
        self.layers = spread_layers(self.num_target_layers)
        self.shape = shape
        self.shared_embedding, self.shared_head = target.embedding, target.head
        self.mask_token = mask_token(getattr(config, "pad_token_id", None), target.embedding)
        self.fc = nn.Linear(len(self.layers) * size, size, bias=False)
        self.hidden_norm = RMSNorm(size, shape.norm_eps)
        self.blocks = nn.ModuleList(BlockLayer(shape) for _ in range(sizes.num_layers))
        self.norm = RMSNorm(size, shape.norm_eps)
        if draft_ids is not None:
            self.lm_head = nn.Linear(size, len(draft_ids), bias=False)
            self.lm_head.weight.data.copy_(target.head[draft_ids])
        states = target.read(sample, self.layers).layers
        spread = states.float().pow(2).mean((0, 1)).view(len(self.layers), -1).mean(-1).sqrt()
        # A power of two: dividing `fc` by it when it is written changes no mantissa.
        scale = spread.log2().round().exp2().repeat_interleave(size)
        self.register_buffer("state_scale", scale)

    def unroll(self, batch: TargetBatch, num_steps: int) -> Iterator[Tensor]:
        """Yield what the slots guess; with gradients, those of shorter blocks as well."""
        head = self.shared_head if self.draft_ids is None else self.lm_head.weight
        for guess in self._slots(batch, num_steps):
            yield F.linear(guess, head.to(guess.dtype))

    def _slots(self, batch: TargetBatch, num_steps: int) -> Iterator[Tensor]:
        """Yield the normed outputs [rows, length, size] of the slots that guess, as `unroll`."""
        ids, dtype = batch.token_ids[:, 1:], self.fc.weight.dtype
        rows, length = ids.shape
        count = min(num_steps, self.num_steps)
        if torch.is_grad_enabled():
            count = block_length(batch.token_ids, count)
        states = self.hidden_norm(self.fc((batch.layers[:, :-1] / self.state_scale).to(dtype)))
        first = int(not self.from_anchor)
        masks = ids.new_full((rows, length, count + first - 1), self.mask_token)
        tokens = torch.cat((ids[:, :, None], masks), -1).flatten(1)
        x = F.embedding(tokens, self.shared_embedding).to(dtype)
        blocks = Blocks(length, count + first, ids.device)
        for layer in self.blocks:
            x = layer(x, states, blocks)
        slots = self.norm(x).view(rows, length, count + first, -1)
        for step in range(count):
            yield shift_rows(slots[:, :, first + step], step)

    def export(self) -> Export:
        """Return tensors and config as published DFlash checkpoints have them."""
        tensors = {
            name.replace("blocks.", "layers."): weight.detach()
            for name, weight in self.named_parameters()
        }
        tensors["fc.weight"] = tensors["fc.weight"] / self.state_scale
        config: dict[str, Any] = {
            "architectures": ["DFlashDraftModel"],
            "model_type": "qwen3",
            "num_hidden_layers": len(self.blocks),
            **layer_fields(self.shape, self.max_positions),
            "layer_types": ["full_attention"] * len(self.blocks),
            "tie_word_embeddings": False,
            "vocab_size": self.vocab_size,
            "num_target_layers": self.num_target_layers,
            "block_size": self.num_steps + (not self.from_anchor),
            "dflash_config": {
                "target_layer_ids": [layer - 1 for layer in self.layers],
                "mask_token_id": self.mask_token,
            },
        }
        if self.draft_ids is not None:
            tensors |= draft_vocabulary_tensors(self.draft_ids, self.vocab_size)
            config["draft_vocab_size"] = len(self.draft_ids)
        return Export(tensors, config)


def block_length(token_ids: Tensor, most: int) -> int:
    """Return a length that the tokens decide, so that a resumed run draws the same."""
    draw = int(token_ids.sum()) % (2 * most)
    return most if draw >= most else draw + 1


def mask_token(pad_token: Any, embedding: Tensor) -> int:
    """Return the token that fills slots: padding, or the last one if that is embedded as zero."""
    known = isinstance(pad_token, int) and 0 <= pad_token < len(embedding)
    # Zeros would make all slots alike.
    return int(pad_token) if known and bool(embedding[pad_token].any()) else len(embedding) - 1
