"""Chains of slots whose logits are biased by the tokens before, compiled by Numba.

A step is a small product and a draw: as operations of torch, dispatching them takes longer.
"""

from __future__ import annotations

import numpy as np
import torch
from torch import Tensor

from outrider.drafting.cpu.llama_kernels import biased_chains, rounded_chains
from outrider.engine.cpu.int8 import rounded
from outrider.engine.cpu.team import Kernel
from outrider.engine.layers.linear import Linear
from outrider.engine.sampling.sample import SamplingBatch

_LAYOUT = "24q"


class BiasedChains:
    """Draws chains of a head of `vocab_size` tokens, of which it knows those of `ids` (None: all).

    `embedding` [vocab_size, rank] times `bias` [known, rank] is what is added to logits. `joint`
    are weight [3 * rank, 2 * rank + hidden] and bias of a state that goes along a chain (None:
    only the token before counts). All are float32 or all bfloat16, on a CPU.
    """

    def __init__(
        self,
        embedding: Tensor,
        bias: Tensor,
        joint: tuple[Tensor, Tensor] | None,
        ids: Tensor | None,
        *,
        linear: Linear,
    ) -> None:
        """`linear` is the product with `bias`, whose weight may be rounded later."""
        self._linear, self._ids = linear, ids
        self._embedding, self._bias = embedding.contiguous(), bias.contiguous()
        self._joint = None if joint is None else (joint[0].contiguous(), joint[1])
        self._kernels: dict[bool, Kernel] = {}  # by whether the weight is rounded

    def draw(
        self,
        normed: Tensor,
        known: Tensor,
        tokens: Tensor,
        batch: SamplingBatch | None,
        confidence: tuple[Tensor, Tensor],
    ) -> Tensor:
        """Return what `guess_paths` does with a width of 1, and log confidences: [n, 4, depth].

        `normed` [n, depth, hidden] are the slots' outputs, `known` [n, depth, known] their logits
        without the bias, `tokens` int64 [n] those before, and `batch` the draws at the first place;
        None: all greedy. `confidence` are float32 weight [1, hidden or hidden + rank] and bias [1].
        """
        weight = rounded(self._linear)
        is_rounded = weight is not None
        if is_rounded not in self._kernels:
            entry = rounded_chains if is_rounded else biased_chains
            self._kernels[is_rounded] = Kernel(entry, _LAYOUT, normed.dtype)
        n, depth, hidden = normed.shape
        normed, known = normed.contiguous(), known.contiguous()
        vocab_size, rank = self._embedding.shape
        chains = torch.empty(n, 4, depth, dtype=torch.int32)
        if batch is None:
            greedy = torch.zeros(n, dtype=torch.int64)
            params = [greedy] * 6
        else:
            keys = torch.from_numpy(batch.seed.numpy().astype(np.uint32))
            params = [batch.position, batch.temperature, batch.top_k]
            params += [batch.top_p, batch.min_p, keys]
        parts = (self._bias, None) if weight is None else (weight.numbers, weight.scales)
        tensors = (
            self._embedding,
            *parts,
            *(self._joint or (None, None)),
            self._ids,
            *confidence,
            known,
            normed,
            tokens,
            *params,
            chains,
        )
        addresses = [0 if each is None else each.data_ptr() for each in tensors]
        sizes = (vocab_size, known.shape[-1], rank, hidden, depth, confidence[0].numel())
        self._kernels[is_rounded](False, n, *addresses, *sizes)
        return chains
