"""A small Llama on one CPU core: chains for a few rows, compiled by Numba.

It shares the paged cache with the `PagedModel` of the same weights, which runs prompts and larger
batches.
"""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import nn
from transformers import AutoConfig, AutoModelForCausalLM

from outrider.drafting.confidence import confidences_of
from outrider.drafting.cpu.llama_kernels import Draws, Fed, draft
from outrider.drafting.cpu.llama_weights import Floats, Weights, read_weights
from outrider.drafting.drafters import Chain, DraftInput
from outrider.engine.batch import RowSlice
from outrider.engine.kv_cache.pools import HeadMajorPool, KVPools
from outrider.engine.model.llama import fits
from outrider.engine.sampling.coupled import seed_keys
from outrider.models.weight_files import quantised_as

_MAX_WEIGHTS = 64_000_000


class LlamaChains:
    """A `ChainDrafter` over `pools` (float32, on CPU) of a `PagedModel` of the same weights."""

    max_tokens = 16

    def __init__(self, weights: Weights, pools: KVPools) -> None:
        self._weights = weights
        self._page_size = pools.page_size
        self._pools = tuple(_by_page(pools, layer) for layer in range(len(weights.qkv)))

    @staticmethod
    def load(folder: Path, pools: KVPools, max_model_len: int) -> LlamaChains | None:
        """Read the checkpoint in `folder`; None if this class does not run it exactly."""
        config = AutoConfig.from_pretrained(folder)
        if quantised_as(folder) is not None:  # these kernels read plain numbers
            return None
        with torch.device("meta"):
            model: nn.Module = AutoModelForCausalLM.from_config(config)
        if not can_run(model, max_model_len) or pools.page_size % 4:
            return None
        try:
            weights = read_weights(folder, model, max_model_len)
        except KeyError:  # tensors under other names, which only `transformers` can map
            return None
        return LlamaChains(weights, pools)

    def feed(self, slices: Sequence[RowSlice]) -> bool:  # noqa: ARG002
        """Feed nothing, since a prompt is no faster here."""
        return False

    def draft(self, inputs: Sequence[DraftInput]) -> list[Chain]:
        """Feed the rows' tokens and draft their chains, as `draft_chains` does."""
        slices = [row.slice for row in inputs]
        tokens = [token for row in slices for token in row.token_ids]
        positions = [row.start + i for row in slices for i in range(len(row.token_ids))]
        rows = [i for i, row in enumerate(slices) for _ in row.token_ids]
        lengths = [row.end + row.wanted - 1 for row in inputs]
        tables = np.zeros((len(slices), -(-max(lengths) // self._page_size)), np.int64)
        for table, row in zip(tables, slices, strict=True):
            pages = row.block_table[: len(table)]
            table[: len(pages)] = pages
        params = [row.sampling for row in inputs]
        chains, gaps = draft(
            self._weights,
            self._pools,
            Fed(
                np.asarray(tokens, np.int64),
                np.asarray(positions, np.int64),
                np.asarray(rows, np.int64),
                tables,
            ),
            np.asarray([row.wanted for row in inputs], np.int64),
            Draws(
                np.asarray([each.temperature for each in params], np.float32),
                np.asarray([each.top_k for each in params], np.int64),
                np.asarray([each.top_p for each in params], np.float32),
                np.asarray([each.min_p for each in params], np.float32),
                seed_keys([each.seed for each in params]).numpy().astype(np.uint32),
            ),
        )
        wanted = [row.wanted for row in inputs]
        return [
            (chain[:k].tolist(), confidences_of(row_gaps[:k]))
            for chain, row_gaps, k in zip(chains, gaps, wanted, strict=True)
        ]


def can_run(model: nn.Module, max_model_len: int) -> bool:
    """Return whether `LlamaChains` computes exactly this model, and is worth it."""
    parts: Any = model
    if not fits(model) or hasattr(parts.config, "quantization_config"):
        return False
    window = getattr(parts.config, "sliding_window", None)
    layers = parts.model.layers
    qk_norm = hasattr(layers[0].self_attn, "q_norm")
    biased = any(
        linear.bias is not None
        for layer in layers
        for linear in (layer.self_attn.o_proj, layer.mlp.gate_proj, layer.mlp.down_proj)
    )
    unlimited = window is None or window >= max_model_len
    small = sum(weight.numel() for weight in model.parameters()) <= _MAX_WEIGHTS
    return unlimited and not qk_norm and not biased and parts.lm_head.bias is None and small


def _by_page(pools: KVPools, layer: int) -> Floats:
    """Return the layer's own memory: [2 * kv_heads, num_pages, page_size, dim], keys first."""
    pool = pools.layer(layer)
    assert isinstance(pool, HeadMajorPool), "this runs on CPU"
    assert pool.joint is not None, "keys and values of a Llama are equally wide"
    shape = (2 * pool.shape[0], pools.num_pages, pools.page_size, -1)
    array: Floats = pool.joint.view(shape).numpy()
    return array
