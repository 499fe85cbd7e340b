"""A small Llama on one CPU core: chains for a few rows, compiled by Numba.

It shares the paged cache with the `PagedModel` of the same weights, which runs prompts and larger
batches.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import torch

from outrider.drafting.confidence import confidences_of
from outrider.drafting.cpu.llama_kernels import Draws, Fed, draft
from outrider.drafting.cpu.llama_weights import Floats, Weights, copy_weights
from outrider.drafting.drafters import Chain, DraftInput
from outrider.engine.batch import RowSlice
from outrider.engine.kv_cache.pools import HeadMajorPool, KVPools
from outrider.engine.layers.linear import PackedLinear
from outrider.engine.model.llama import FusedLlama
from outrider.engine.model.paged_model import PagedModel
from outrider.engine.sampling.noise import seed_keys

_MAX_WEIGHTS = 64_000_000


class LlamaChains:
    """A `ChainDrafter` over `pools` (float32, on CPU) of a `PagedModel` of the same weights."""

    max_tokens = 16

    def __init__(self, weights: Weights, pools: KVPools) -> None:
        self._weights = weights
        self._page_size = pools.page_size
        self._pools = _by_page(pools)

    @staticmethod
    def of(model: PagedModel) -> LlamaChains | None:
        """Return one over the pages of `model`; None if this class does not run it exactly."""
        network = model.network
        if not isinstance(network, FusedLlama) or not can_run(network, model.max_model_len):
            return None
        if model.page_size % 4:
            return None
        return LlamaChains(copy_weights(network), model.pools)

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


def can_run(network: FusedLlama, max_model_len: int) -> bool:
    """Return whether `LlamaChains` computes exactly this model, and is worth it."""
    if network.embedding.dtype is not torch.float32 or network.embedding.device.type != "cpu":
        return False
    layers = network.layers
    others = [each for layer in layers for each in (layer.o, layer.gate_up, layer.down)]
    linears = (*(layer.qkv for layer in layers), *others, network.output_layer)
    packed = [each for each in linears if isinstance(each, PackedLinear)]
    windows = [layer.params.sliding_window for layer in layers]
    return (
        len(packed) == len(linears)
        and all(each.int8 is None for each in packed)
        and all(each.bias is None for each in packed[len(layers) :])
        and all(layer.qk_norm is None for layer in layers)
        and all(window is None or window >= max_model_len for window in windows)
        and sum(each.in_features * each.out_features for each in packed) <= _MAX_WEIGHTS
    )


def _by_page(pools: KVPools) -> Floats:
    """Return the memory: [layers, 2 * kv_heads, num_pages, page_size, dim], keys first."""
    assert isinstance(pools.layer(0), HeadMajorPool), "this runs on CPU"
    assert pools.joint is not None, "the layers of a Llama share one tensor"
    num_layers, _, _, _, dim = pools.joint.shape
    shape = (num_layers, -1, pools.num_pages, pools.page_size, dim)
    array: Floats = pools.joint.view(shape).numpy()
    return array
