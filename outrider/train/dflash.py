"""DFlash, in the layout of `z-lab/*-DFlash-*`: a block of tokens from the target's states."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any, ClassVar

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.nn.attention.flex_attention import create_block_mask, flex_attention

from outrider.aux_layers import spread_layers
from outrider.train.head import Export, Head, draft_vocabulary_tensors, layer_fields
from outrider.train.layers import BlockShape, RMSNorm, SwiGLU, rotate, shift_rows
from outrider.train.target import Target, TargetBatch

_TOKENS_PER_ROW = 4
"""Tokens of blocks for each token of text: more would be alike, and cost as much as others."""


class Blocks:
    """Blocks of `width` tokens, one after the rows `begins` each, and what their tokens see.

    The block of row p is the token at p + 1 and mask tokens after it. All of it sees the states of
    rows up to p, and itself.
    """

    def __init__(self, begins: Tensor, length: int, width: int) -> None:
        self.rows = torch.arange(length, device=begins.device)
        last = begins.repeat_interleave(width)  # the last row that a token sees
        self.positions = last + 1 + torch.arange(width, device=begins.device).repeat(len(begins))
        own = torch.full_like(self.rows, -1), torch.full_like(last, length)
        key_row, key_block = torch.cat((self.rows, own[1])), torch.cat((own[0], last))

        def seen(batch: Tensor, head: Tensor, query: Tensor, key: Tensor) -> Tensor:  # noqa: ARG001
            return (key_row[key] <= last[query]) | (key_block[key] == last[query])

        self._mask: Any
        if begins.is_cuda:
            sizes = len(last), len(key_row)
            self._mask = create_block_mask(seen, None, None, *sizes, device=begins.device)
        else:  # there, flex_attention has no gradients
            self._mask = (key_row <= last[:, None]) | (key_block == last[:, None])

    def attend(self, query: Tensor, key: Tensor, value: Tensor) -> Tensor:
        """Return what queries read: [rows, heads, tokens, dim], a block after the other.

        Keys and values [rows, kv_heads, length + tokens, dim] are of states, then of the blocks.
        """
        if query.is_cuda:
            read: Any = flex_attention(query, key, value, block_mask=self._mask, enable_gqa=True)
            return read  # type: ignore[no-any-return]
        return F.scaled_dot_product_attention(
            query, key, value, attn_mask=self._mask, enable_gqa=True
        )


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
        """Map the blocks' tokens [rows, tokens, size]; `states` are [rows, length, size]."""
        shape, rows = self.shape, len(x)
        query = self.q_norm(self.q_proj(x).view(rows, x.shape[1], shape.num_heads, -1))
        query = rotate(query.transpose(1, 2), shape.rope_theta, blocks.positions)
        both = torch.cat((states, x.to(states.dtype)), 1)
        key = self.k_norm(self.k_proj(both).view(rows, both.shape[1], shape.num_kv_heads, -1))
        positions = torch.cat((blocks.rows, blocks.positions))
        key = rotate(key.transpose(1, 2), shape.rope_theta, positions)
        value = self.v_proj(both).view(rows, both.shape[1], shape.num_kv_heads, -1).transpose(1, 2)
        y = blocks.attend(query, key, value).transpose(1, 2)
        out: Tensor = self.o_proj(y.reshape(rows, x.shape[1], -1))
        return out


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
    target's rows. `sample [rows, n]` are tokens from which the spread of states is measured.
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
        if target.device.type == "cuda":
            for layer in self.blocks:
                layer.compile(dynamic=False)
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
        """Yield what the slots guess; with gradients, of some blocks (`draw_blocks`)."""
        head = self.shared_head if self.draft_ids is None else self.lm_head.weight
        for guess in self._slots(batch, num_steps):
            yield F.linear(guess, head.to(guess.dtype))

    def _slots(self, batch: TargetBatch, num_steps: int) -> Iterator[Tensor]:
        """Yield the normed outputs [rows, n, size] of the slots that guess, and set `begins`."""
        ids, dtype = batch.token_ids[:, 1:], self.fc.weight.dtype
        rows, length = ids.shape
        count, first = min(num_steps, self.num_steps), int(not self.from_anchor)
        begins = torch.arange(length)
        self.begins = None
        if torch.is_grad_enabled():
            begins, count = draw_blocks(self.draw, length, count, first)
            self.begins = begins.to(ids.device)
        begins, width = begins.to(ids.device), count + first
        states = self.hidden_norm(self.fc((batch.layers[:, :-1] / self.state_scale).to(dtype)))
        masks = ids.new_full((rows, len(begins), width - 1), self.mask_token)
        tokens = torch.cat((ids[:, begins, None], masks), -1).flatten(1)
        x = F.embedding(tokens, self.shared_embedding).to(dtype)
        blocks = Blocks(begins, length, width)
        for layer in self.blocks:
            x = layer(x, states, blocks)
        slots = self.norm(x).view(rows, len(begins), width, -1)
        for step in range(count):
            yield shift_rows(slots[:, :, first + step], 0 if self.begins is not None else step)

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


def draw_blocks(draw: int, length: int, most: int, first: int) -> tuple[Tensor, int]:
    """Return the rows after which a step's blocks begin, rising, and how many tokens they guess.

    Half of the steps have the longest blocks, `most`, the rest those of a half or a quarter, which
    a round may want. All have about as many tokens, so short blocks begin at more of the rows.
    """
    generator = torch.Generator().manual_seed(draw)
    count = max(1, most >> max(0, int(torch.randint(4, (1,), generator=generator)) - 1))
    num_blocks = min(length, max(1, _TOKENS_PER_ROW * length // (count + first)))
    return torch.randperm(length, generator=generator)[:num_blocks].sort().values, count


def mask_token(pad_token: Any, embedding: Tensor) -> int:
    """Return the token that fills slots: padding, or the last one if that is embedded as zero."""
    known = isinstance(pad_token, int) and 0 <= pad_token < len(embedding)
    # Zeros would make all slots alike.
    return int(pad_token) if known and bool(embedding[pad_token].any()) else len(embedding) - 1
