"""DFlash (z-lab): fills a block of mask tokens from the target's states in one forward.

The target's states of a position, joined by one product and normed, are what every layer makes the
position's keys and values of: the module's cache is a function of the target's states alone. A
block is the last committed token followed by mask tokens; it attends to the cache and, in layers
that are not causal, to all of itself. A slot's output guesses the token at its position.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import ClassVar, Self

import torch
from torch import Tensor

from outrider.drafting.drafters import DraftInput, features_on
from outrider.drafting.graphs.batches import LoopBatches
from outrider.drafting.hidden_states.block_attention import BlockAttention
from outrider.drafting.hidden_states.checkpoints import Checkpoint
from outrider.drafting.hidden_states.heads.base import HeadSetup, HeadShape, Place, spread
from outrider.drafting.hidden_states.heads.block import BlockHead
from outrider.drafting.hidden_states.heads.dflash_format import DFlashFormat
from outrider.drafting.hidden_states.heads.llama import read_stack
from outrider.engine.attention.base import AttentionBackend
from outrider.engine.batch import PackedBatch, RowSlice, pack
from outrider.engine.kv_cache.pools import LayerPool
from outrider.engine.layers.linear import Linear
from outrider.engine.layers.ops import Use
from outrider.features import FeatureSpec


class DFlashHead(BlockHead):
    """A module of DFlash."""

    format: ClassVar[type[DFlashFormat]] = DFlashFormat

    @classmethod
    def read(cls, folder: Path, setup: HeadSetup) -> Self:
        """Read a checkpoint of the class's `format`. Raises `ConfigError`."""
        found = cls.format(folder)
        head = cls(found, setup)
        found.checkpoint.check_all_taken()
        return head

    def __init__(self, found: DFlashFormat, setup: HeadSetup) -> None:
        target, place = setup.target, setup.place
        stack = read_stack(found, setup, windows=found.windows)
        hidden, checkpoint = stack.shape.hidden_size, found.checkpoint
        embedding = found.shared("embed_tokens.weight", target, hidden)
        super().__init__(stack.shape, place, stack.layers, embedding)

        def norm(name: str) -> Tensor:
            return place.put(checkpoint.tensor(name, hidden))

        first = norm(f"{found.layer_prefixes[0]}input_layernorm.weight")
        self._layers, self._norms = stack.layers, (first, *stack.norms)
        self.windows, self.rope = found.windows, stack.rope
        self.causal: Sequence[bool] = found.causal
        self._context_norm = norm(found.name("hidden_norm.weight"))
        self._norm = norm(found.name("norm.weight"))
        self._context = _Context(checkpoint, found.layer_prefixes, stack.shape, place)
        self.max_depth, self._from_anchor = found.max_depth, found.from_anchor
        # Kernels are compiled for each number of heads, and to them a slot is heads.
        self.pads = place.device.type == "cuda"
        self.mask_token = found.mask_token(self.vocab_size)
        self._scale, self._multiplier = found.embedding_scale, found.output_multiplier
        self._softcap = found.softcap
        # What sees the whole block within a window is computed with a mask that waits.
        self.capturable = all(self.causal[i] for i in self.windows)
        layers = found.layers(target)
        self.features = FeatureSpec(hidden_size=target.hidden_size, layers=layers)
        name = found.name("fc.weight")
        weight = checkpoint.tensor(name, hidden, len(layers) * target.hidden_size)
        self._fc: Linear | None = None
        if setup.project:
            self._project(weight)
        else:
            self._fc = place.linear(weight)
        head = found.shared("lm_head.weight", target, hidden)
        ids = found.draft_vocabulary(len(head), target.vocab_size)
        self._target_ids = None if ids is None else ids.to(place.device)
        self._head, self._num_known = place.linear(head), len(head)
        pairs = zip(self._norms, self._layers, strict=True)
        self.uses = (
            *(() if self._fc is None else (Use(self._fc, alone=True),)),
            Use(self._context.product, self._context_norm),
            *(use for norm, layer in pairs for use in layer.uses(norm)),
            Use(self._head, self._norm),
        )

    def num_slots(self, depth: int) -> int:
        return depth if self._from_anchor else depth + 1

    def num_fed(self, depth: int) -> int:
        return self.num_slots(self.max_depth if self.pads else depth)

    def run(
        self, rows: Sequence[DraftInput], backend: AttentionBackend, page_size: int
    ) -> Tensor | None:
        context = pack([row.slice for row in rows], page_size, self.device)
        self._write_rows(features_on(self.device, rows), context)
        ready = [row for row in rows if row.wanted]
        if not ready:
            return None
        sizes = [self.num_slots(min(row.wanted, self.max_depth)) for row in ready]
        width = self.num_fed(min(max(row.wanted for row in ready), self.max_depth))
        masks = [self.mask_token] * (width - 1)
        batch = pack(
            [
                RowSlice([row.slice.token_ids[-1], *masks], row.end, row.slice.block_table, 0)
                for row in ready
            ],
            page_size,
            self.device,
        )
        # Padding may reach past the last position.
        batch = replace(batch, positions=batch.positions.clamp(max=self.max_model_len - 1))
        return self._run_rows(batch, BlockAttention(batch, sizes, backend))

    def outputs(
        self, features: Tensor, tokens: Tensor, batches: LoopBatches, backend: AttentionBackend
    ) -> Tensor:
        self._write_rows(features, batches.catch_up)
        width = len(batches.fed)
        masks = tokens.new_full((len(tokens), width - 1), self.mask_token)
        batch = batches.block(torch.cat((tokens[:, None], masks), dim=1))
        return self._run_rows(batch, BlockAttention(batch, [width] * len(tokens), backend))

    def logits(self, outputs: Tensor) -> Tensor:
        return spread(self._known_logits(outputs), self._target_ids, self.vocab_size)

    def _known_logits(self, outputs: Tensor) -> Tensor:
        """Return logits of the tokens that the module knows: [m, known]."""
        outputs = outputs.contiguous()  # of a slot among others
        known = self._ops.norm_linear(outputs, self._norm, self._shape.eps, self._head)
        if self._multiplier != 1.0:
            known = known * self._multiplier
        if self._softcap:
            known = torch.tanh(known / self._softcap) * self._softcap
        return known

    def _write_rows(self, features: Tensor, batch: PackedBatch) -> None:
        rope = self.rope.index_select(0, batch.positions)
        self.write(features.to(self.dtype), rope, batch.slot_mapping)

    def write(self, features: Tensor, rope: Tensor, slots: Tensor) -> None:
        """Write context rows [n, features.width], with their rows of `rope`, to `slots`."""
        x = features if self._fc is None else self._fc(features)
        pools = [layer.pool for layer in self._layers]
        self._context.write(x, self._context_norm, rope, slots, pools)

    def _run_rows(self, batch: PackedBatch, attention: BlockAttention) -> Tensor:
        """Return the last layer's outputs of the slots that guess: [rows, depth, hidden]."""
        rope = self.rope.index_select(0, batch.positions)
        x = self.run_block(self.embed(batch.input_ids), rope, attention)
        return self.guessing(x.view(len(batch.query_lens), -1, x.shape[-1]))

    def embed(self, tokens: Tensor) -> Tensor:
        """Return what the first layer takes of a block's tokens [n]: [n, hidden]."""
        x = self._embed(tokens)
        return x if self._scale == 1.0 else x * self._scale

    def run_block(self, x: Tensor, rope: Tensor, attention: BlockAttention) -> Tensor:
        """Map blocks' embeddings [n, hidden], which may be overwritten, to the last outputs."""
        for i, (norm, layer) in enumerate(zip(self._norms, self._layers, strict=True)):
            qkv = self._ops.norm_linear(x, norm, self._shape.eps, layer.qkv)
            of_layer = attention.of(causal=self.causal[i], window=self.windows.get(i))
            x = layer(qkv, x, rope, of_layer)
        return x

    def guessing(self, outputs: Tensor) -> Tensor:
        """Return the outputs [rows, slots, hidden] of the slots that guess."""
        return outputs[:, not self._from_anchor :]


class _Context:
    """Makes keys and values of all layers from context rows, by one product.

    The weights are a copy of those that make the blocks' own keys and values: a few hundredths of
    the module's size.
    """

    def __init__(
        self, checkpoint: Checkpoint, prefixes: Sequence[str], shape: HeadShape, place: Place
    ) -> None:
        width, dim = shape.num_kv_heads * shape.head_dim, shape.head_dim
        names = [f"{prefix}self_attn.{kind}" for kind in "kv" for prefix in prefixes]
        weights = [checkpoint.tensor(f"{n}_proj.weight", width, shape.hidden_size) for n in names]
        bias: Tensor | None = None
        if f"{names[0]}_proj.bias" in checkpoint:
            bias = torch.cat([checkpoint.tensor(f"{n}_proj.bias", width) for n in names])
        self.product = place.linear(torch.cat(weights), bias)
        self._norms: Tensor | None = None  # [layers * kv_heads, dim]
        if f"{names[0]}_norm.weight" in checkpoint:
            norms = [checkpoint.tensor(f"{n}_norm.weight", dim) for n in names[: len(prefixes)]]
            repeated = torch.stack(norms).repeat_interleave(shape.num_kv_heads, dim=0)
            self._norms = place.put(repeated)
        self._ops, self._shape = place.ops, shape

    def write(
        self, x: Tensor, norm: Tensor, rope: Tensor, slots: Tensor, pools: Sequence[LayerPool]
    ) -> None:
        """Write context rows [n, hidden], times `norm` once normed, to the layers' `pools`.

        `rope` are the positions' rows of the rotary table.
        """
        keys_values = self._ops.norm_linear(x, norm, self._shape.eps, self.product)
        if self._norms is not None:
            self._ops.qk_norm_(keys_values, self._norms, self._shape.eps)
        self._ops.store_context(keys_values, rope, slots, pools)
