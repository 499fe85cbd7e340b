"""Trees of the K guesses of highest score.

A node's score is the estimated probability that the target's text reaches it: the product of its
tokens' probabilities from the root on. It never grows on the way down, so the K best nodes are a
tree (Li et al., "EAGLE-2", arXiv 2406.16858, rerank by this score, too).
"""

from __future__ import annotations

import heapq
import math
from collections.abc import Callable, Sequence
from typing import Final, NamedTuple

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from outrider.draft_port import DeviceNodes
from outrider.draft_tree import DraftTree, chain_parents
from outrider.drafting.confidence import by_row, confidences_of_log_probs
from outrider.drafting.graphs.beams import Beam
from outrider.drafting.graphs.loops import DraftSampler
from outrider.drafting.hidden_states.earlier_text import EarlierText
from outrider.drafting.likeliest import BiasedLogits, cut_to_likeliest, dense, likeliest
from outrider.engine.sampling.sample import SamplingBatch
from outrider.params import SamplingParams

Nodes = tuple[list[int], list[int], list[float]]
"""Tokens and parents, as `DraftTree` has them: parents come first, siblings by preference; and the
log probability of each token, given those before it."""

PathStep = Callable[[Tensor, Tensor, int], tuple[Tensor, Tensor | BiasedLogits]]
"""Takes states [m, ...] and tokens int64 [m] of paths, n rows of them, and a place; returns the
next states and logits of what follows: [m, vocab]."""

_BY_TORCH: Final = DraftSampler()
_MAX_SCORES: Final = 2**25  # of one forward: float32, with as much again for noise


class Guess(NamedTuple):
    """A draft of a module, without the text that it continues."""

    tokens: list[int]
    parents: Sequence[int]  # as `DraftTree` has them
    confidences: bytes = b""  # of the tokens, if they are told

    @staticmethod
    def chain(tokens: list[int], confidences: bytes = b"") -> Guess:
        """Return a draft with one path."""
        return Guess(tokens, chain_parents(len(tokens)), confidences)

    def tree(self, base_len: int) -> DraftTree:
        """Return the draft after `base_len` tokens."""
        tokens, parents, confidences = self
        return DraftTree(base_len, tuple(tokens), tuple(parents), (), confidences)


def max_trees(width: int, vocab_size: int) -> int:
    """Return how many trees of up to `width` places a level are grown at once, to bound memory."""
    return max(1, _MAX_SCORES // (width * vocab_size))


class TargetDraws:
    """Probabilities of the target's draws, where its logits are guessed and its noise is known.

    The target draws argmax(logits + T * noise). With logits that are off by Gumbel noise of scale 1
    (what a head trained by cross-entropy believes) it draws a token with the probability
    softmax(guessed logits + T * noise): at T = 0 that is what the head says, and at any T the first
    token is what `engine.sampling.sample` draws from the guessed logits.
    """

    def __init__(
        self,
        batch: SamplingBatch | None,
        sampler: DraftSampler = _BY_TORCH,
        texts: EarlierText | None = None,
    ) -> None:
        """Take a row each, at the position that depth 0 is drawn at; None: all greedy.

        `texts` are those that the draws follow, if paths are to be compared with them.
        """
        self.batch = batch
        self.sampler = sampler
        self.texts = texts

    @classmethod
    def of(
        cls,
        sampling: Sequence[SamplingParams],
        lengths: Sequence[int],
        device: torch.device,
        texts: EarlierText | None = None,
    ) -> TargetDraws:
        """Return the draws after texts of these lengths."""
        if all(params.greedy for params in sampling):
            return cls(None, texts=texts)
        return cls(SamplingBatch.build(sampling, lengths, device), texts=texts)

    def likeliest(
        self, logits: Tensor | BiasedLogits, depth: int, count: int
    ) -> tuple[Tensor, Tensor]:
        """Return the `count` likeliest tokens at `depth` and their log probabilities.

        As the function `likeliest`, after cuts by top_k, top_p and min_p.
        """
        batch = self.batch
        if batch is None:
            return likeliest(logits, None, depth, count)
        if batch.any_sorted or batch.any_min_p:
            logits = _cut(dense(logits).float(), batch)
        return self.sampler.likeliest(logits, batch, depth, count)


def _cut(logits: Tensor, batch: SamplingBatch) -> Tensor:
    """Return `logits` [n, m, vocab] with cut tokens at -inf; greedy rows cut nothing."""
    n, m, vocab_size = logits.shape
    places = batch.repeated(m, batch.position.repeat_interleave(m))
    cut = cut_to_likeliest(logits.reshape(n * m, vocab_size), places).view(logits.shape)
    return torch.where((batch.temperature == 0.0)[:, None, None], logits, cut)


def best_products(
    token_ids: Sequence[Sequence[int]], log_probs: Sequence[Sequence[float]], num_nodes: int
) -> Nodes:
    """Return the `num_nodes` best of all paths, best first, if tokens do not depend on each other.

    `token_ids[d]` are the candidates at depth d, the likeliest first.
    """
    tokens: list[int] = []
    parents: list[int] = []
    chances: list[float] = []
    # (negated score, a number to tell equals, depth, rank among the siblings, parent)
    heap = [(-log_probs[0][0], 0, 0, 0, -1)]
    pushed = 0
    while heap and len(tokens) < num_nodes:
        cost, _, depth, rank, parent = heapq.heappop(heap)
        node = len(tokens)
        tokens.append(token_ids[depth][rank])
        parents.append(parent)
        here = log_probs[depth]
        chances.append(here[rank])
        if rank + 1 < len(here) and here[rank + 1] > -math.inf:
            pushed += 1
            sibling_cost = cost + here[rank] - here[rank + 1]
            heapq.heappush(heap, (sibling_cost, pushed, depth, rank + 1, parent))
        if depth + 1 < len(log_probs):
            pushed += 1
            heapq.heappush(heap, (cost - log_probs[depth + 1][0], pushed, depth + 1, 0, node))
    return tokens, parents, chances


def guess_places(places: Tensor, draws: TargetDraws, width: int) -> Tensor:
    """Return the likeliest tokens of each place and their log probabilities.

    `places` are logits [n, depth, vocab] of tokens that do not depend on each other; the result is
    int32 [n, 2, depth, width], floats as their bits.
    """
    if draws.batch is None:  # without noise, which differs by place
        ids, log_probs = draws.likeliest(places, 0, width)
    else:
        by_place = enumerate(places.unbind(1))
        found = [draws.likeliest(each[:, None], place, width) for place, each in by_place]
        ids, log_probs = (torch.cat(parts, dim=1) for parts in zip(*found, strict=True))
    return torch.stack((ids.to(torch.int32), log_probs.view(torch.int32)), dim=1)


def guess_paths(
    step: PathStep, states: Tensor, tokens: Tensor, draws: TargetDraws, depth: int, width: int
) -> Tensor:
    """Follow paths in a beam: int32 [n, 3, nodes], the tokens, parents and scores of all.

    It begins with the texts' last `tokens`, int64 [n], of one path each.
    """
    n = len(tokens)
    if width == 1:
        return _guess_chains(step, states, tokens, draws, depth)
    texts, beam = draws.texts, Beam.roots(tokens)
    before = None if texts is None else texts.before[:, None]  # the token before the last, by row
    nodes: list[Tensor] = []  # [n, 3, new] by depth
    num_nodes = 0
    for place in range(depth):
        states, logits = step(states, beam.tokens.flatten(), place)
        if texts is not None and before is not None:
            logits = dense(logits)
            by_path = logits.view(n, -1, logits.shape[-1])
            logits = texts.raised(by_path, before, beam.tokens, place)
        found, log_probs = draws.likeliest(_by_row(logits, n), place, width)
        ends_with = beam.tokens.flatten()
        beam, new = draws.sampler.grow_beam(beam, found, log_probs, width, num_nodes)
        nodes.append(new)
        num_nodes += new.shape[2]
        if before is not None:
            before = ends_with[beam.sources]
        if states.numel():
            states = states[beam.sources.flatten()]
    return torch.cat(nodes, dim=2)


def _guess_chains(
    step: PathStep, states: Tensor, tokens: Tensor, draws: TargetDraws, depth: int
) -> Tensor:
    """Do as `guess_paths` with a beam of one path, which needs no order."""
    found: list[Tensor] = []
    log_probs: list[Tensor] = []
    for place in range(depth):
        states, logits = step(states, tokens, place)
        ids, chance = draws.likeliest(_by_row(logits, len(tokens)), place, 1)
        tokens = ids[:, 0, 0]
        found.append(tokens)
        log_probs.append(chance[:, 0, 0])
    ids = torch.stack(found, dim=1).to(torch.int32)
    parents = torch.arange(-1, depth - 1, dtype=torch.int32, device=ids.device).expand_as(ids)
    scores = torch.stack(log_probs, dim=1).cumsum(dim=1)
    return torch.stack((ids, parents, scores.view(torch.int32)), dim=1)


def _by_row(logits: Tensor | BiasedLogits, n: int) -> Tensor | BiasedLogits:
    """Return the logits of paths of n rows as `likeliest` takes them."""
    return logits if isinstance(logits, BiasedLogits) else logits.view(n, -1, logits.shape[-1])


def nodes_on_device(nodes: Tensor, count: int, max_depth: int | None = None) -> DeviceNodes:
    """Return the first `count` of what `best_nodes` left on a device; one node each is a chain."""
    tokens, parents = nodes[:, 0, :count], nodes[:, 1, :count]
    return DeviceNodes(tokens, None if count == 1 else parents, max_depth)


def trees_of_places(guesses: NDArray[np.int32], sizes: Sequence[int]) -> list[Guess]:
    """Return the best products of what `guess_places` returned, a tree per row."""
    ids, log_probs = guesses[:, 0].tolist(), guesses[:, 1].view(np.float32).tolist()
    return _told([best_products(*row) for row in zip(ids, log_probs, sizes, strict=True)])


def trees_of_paths(guesses: NDArray[np.int32], sizes: Sequence[int]) -> list[Guess]:
    """Return the best nodes of what `guess_paths` returned, a tree per row."""
    return _told(
        [
            best_nodes(tokens, parents, scores.view(np.float32), size)
            for (tokens, parents, scores, *_), size in zip(guesses, sizes, strict=True)
        ]
    )


def _told(trees: Sequence[Nodes]) -> list[Guess]:
    chances = np.array([chance for *_, chances in trees for chance in chances])
    told = by_row(confidences_of_log_probs(chances), [len(tokens) for tokens, *_ in trees])
    return [Guess(*nodes[:2], each) for nodes, each in zip(trees, told, strict=True)]


def best_nodes(
    token_ids: NDArray[np.integer],
    parents: NDArray[np.integer],
    scores: NDArray[np.float32],
    num_nodes: int,
) -> Nodes:
    """Return the `num_nodes` of highest score of a tree, best first, given all nodes [m].

    No child may score higher than its parent, and a parent comes before its children.
    """
    order = np.argsort(-scores, kind="stable")[:num_nodes]
    chosen = [int(node) for node in order if scores[node] > -math.inf]
    place = {node: i for i, node in enumerate(chosen)} | {-1: -1}
    above = [int(parents[node]) for node in chosen]
    before = np.where(parents[chosen] < 0, 0.0, scores[above])
    return (
        [int(token_ids[node]) for node in chosen],
        [place[parent] for parent in above],
        np.minimum(scores[chosen] - before, 0.0).tolist(),  # a score is a rounded sum
    )
