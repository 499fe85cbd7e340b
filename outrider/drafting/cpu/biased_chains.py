"""Chains of slots whose logits are biased by the tokens before, compiled by Numba.

A step is a small product and a draw: as operations of torch, dispatching them takes longer.
"""

from __future__ import annotations

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from outrider.drafting.cpu.llama_kernels import Biases, Draws, biased_chains
from outrider.drafting.cpu.llama_weights import Matrix
from outrider.engine.cpu.int8 import rounded
from outrider.engine.cpu.scalars import Version
from outrider.engine.layers.linear import Linear
from outrider.engine.sampling.coupled import SamplingBatch


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
        self._linear = linear
        weight, offset = joint or (bias.new_empty(0, 0), bias.new_empty(0))
        self._biases = Biases(
            _matrix(embedding),
            _matrix(bias),
            np.empty(0, np.float32),
            _matrix(weight),
            _matrix(offset),
            np.empty(0, np.int64) if ids is None else ids.numpy(),
            Version(),
        )

    def draw(
        self, normed: Tensor, known: Tensor, tokens: Tensor, batch: SamplingBatch | None
    ) -> Tensor:
        """Return what `guess_paths` draws with a width of 1: int64 [n, depth].

        `normed` [n, depth, hidden] are the slots' outputs, `known` [n, depth, known] their logits
        without the bias, `tokens` int64 [n] those before, and `batch` the draws at the first place;
        None: all greedy.
        """
        weight = rounded(self._linear)
        if weight is not None and not len(self._biases.scales):
            numbers = weight.numbers.view(torch.int32).flatten().numpy()
            self._biases = self._biases._replace(product=numbers, scales=weight.scales.numpy())
        n = len(known)
        if batch is None:
            zeros, ints = np.zeros(n, np.float32), np.zeros(n, np.int64)
            draws = Draws(zeros, ints, zeros, zeros, np.zeros((n, 2), np.uint32))
            position = ints
        else:
            draws = Draws(
                batch.temperature.numpy(),
                batch.top_k.numpy(),
                batch.top_p.numpy(),
                batch.min_p.numpy(),
                batch.seed.numpy().astype(np.uint32),
            )
            position = batch.position.numpy()
        chains: NDArray[np.int64] = biased_chains(
            _matrix(known), _matrix(normed), self._biases, tokens.numpy(), position, draws
        )
        return torch.from_numpy(chains)


def _matrix(weight: Tensor) -> Matrix:
    weight = weight.detach().contiguous()
    if weight.dtype is torch.bfloat16:
        weight = weight.view(torch.uint16)
    matrix: Matrix = weight.numpy()
    return matrix
