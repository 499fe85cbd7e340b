"""Medusa heads (Cai et al., arXiv 2401.10774): each predicts one of the next tokens by itself.

Head i takes the target's last known state x, through residual blocks x + SiLU(A x + b), to logits
for the token i + 1 places after the one that was drawn from x. The heads know nothing of each
other's tokens: how likely a path is, is the product of its tokens' probabilities.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch
import torch.nn.functional as F
from torch import Tensor

from outrider.drafting.guess_trees import Nodes, TargetDraws, best_products
from outrider.engine.linear import Linear, pack_linear
from outrider.features import FeatureSpec


@dataclass(frozen=True, slots=True)
class MedusaWeights:
    """What a checkpoint holds, by head."""

    blocks: tuple[tuple[tuple[Tensor, Tensor | None], ...], ...]
    """[heads][layers] (weight [hidden, hidden], bias [hidden])."""
    lm_heads: tuple[Tensor, ...]
    """[known tokens, hidden] each; one for all heads, or one per head."""
    vocab_size: int
    token_map: Tensor | None = None
    """int64 [known tokens]: which tokens of the target the heads know; None: all."""


class MedusaHead:
    """A `OneShotHead`. Computes in the weights' dtype, on their device."""

    def __init__(self, weights: MedusaWeights) -> None:
        first = weights.lm_heads[0]
        self.features = FeatureSpec(hidden_size=first.shape[1], final_norm=True)
        self.vocab_size = weights.vocab_size
        self.max_depth = len(weights.blocks)
        self.device = first.device
        self._dtype = first.dtype
        self._blocks = [[pack_linear(*layer) for layer in layers] for layers in weights.blocks]
        lm_heads: list[Linear] = [pack_linear(weight, None) for weight in weights.lm_heads]
        self._lm_heads = lm_heads * (self.max_depth // len(lm_heads))
        self._token_map = weights.token_map

    def logits(self, states: Tensor, depth: int) -> Tensor:
        """What head `depth` says: [n, hidden] to float32 [n, vocab], -inf for unknown tokens."""
        x = states
        for layer in self._blocks[depth]:
            x = x + F.silu(layer(x))
        known = self._lm_heads[depth](x).float()
        if self._token_map is None:
            return known
        logits = known.new_full((len(known), self.vocab_size), -torch.inf)
        return logits.index_copy_(1, self._token_map, known)

    def grow(
        self,
        states: Tensor,
        tokens: Tensor,  # noqa: ARG002 - the state says it all
        draws: TargetDraws,
        sizes: Sequence[int],
        width: int,
    ) -> list[Nodes]:
        states = states.to(self._dtype)
        count = min(width, max(sizes))
        ids: list[Tensor] = []
        log_probs: list[Tensor] = []
        for depth in range(min(self.max_depth, max(sizes))):
            found = draws.likeliest(self.logits(states, depth)[:, None], depth, count)
            ids.append(found[0])
            log_probs.append(found[1])
        by_row = zip(
            torch.cat(ids, 1).tolist(), torch.cat(log_probs, 1).tolist(), sizes, strict=True
        )
        return [best_products(*row) for row in by_row]
