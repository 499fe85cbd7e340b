"""Beams of paths, of which all nodes are kept, and the best nodes of all."""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor


class Beam(NamedTuple):
    """The m paths of each of n rows that go on."""

    tokens: Tensor  # int64 [n, m]: their last ones
    scores: Tensor  # float32 [n, m]: log probabilities
    nodes: Tensor  # int64 [n, m]: the numbers of their last nodes; -1: the root
    sources: Tensor  # int64 [n, m]: their paths among the n * m of the beam before

    @staticmethod
    def roots(tokens: Tensor) -> Beam:
        """Return a path for each row, which ends with one of tokens int64 [n]."""
        first = tokens[:, None]
        numbers = torch.arange(len(tokens), device=tokens.device)[:, None]
        zeros = torch.zeros_like(first, dtype=torch.float32)
        return Beam(first, zeros, torch.full_like(first, -1), numbers)


def grow_beam(
    beam: Beam, found: Tensor, log_probs: Tensor, width: int, num_nodes: int
) -> tuple[Beam, Tensor]:
    """Return the best `width` continuations, and all as nodes: int32 [n, 3, m * count].

    `found` and `log_probs` [n, m, count] follow each path. Nodes are tokens, numbers of parents and
    the bits of scores; their own numbers begin with `num_nodes`.
    """
    n, m, count = found.shape
    scores = (beam.scores[:, :, None] + log_probs).flatten(1)
    found = found.flatten(1)
    parents = beam.nodes.repeat_interleave(count, dim=1)
    ints = (found.to(torch.int32), parents.to(torch.int32), scores.view(torch.int32))
    best = scores.topk(min(width, m * count), dim=-1)
    firsts = torch.arange(0, n * m, m, device=found.device)[:, None]
    places = best.indices
    grown = Beam(found.gather(1, places), best.values, places + num_nodes, firsts + places // count)
    return grown, torch.stack(ints, dim=1)


def best_nodes(nodes: Tensor, count: int) -> Tensor:
    """Return the `count` nodes of highest score, best first, of int32 [n, 3, any]: the same.

    Parents are places among them. Of equal scores the first, so that a parent comes before its
    children, which must not score higher. Nodes of score -inf become copies of the first one.
    """
    tokens, parents, bits = nodes.unbind(1)
    best = bits.view(torch.float32).sort(dim=1, descending=True, stable=True).indices[:, :count]
    above = parents.gather(1, best)
    places = (best[:, None] == above[:, :, None]).to(torch.int32).argmax(dim=2)
    places = torch.where(above < 0, -1, places).to(torch.int32)
    chosen = torch.stack((tokens.gather(1, best), places), dim=1)
    bits = bits.gather(1, best)
    never = bits.view(torch.float32) == -torch.inf
    chosen = torch.where(never[:, None], chosen[:, :, :1], chosen)
    return torch.cat((chosen, bits[:, None]), dim=1)
