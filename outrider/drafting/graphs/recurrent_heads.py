"""A draft module's loop recorded: true rows with the target's states, K draws, K - 1 forwards.

The module's counterpart to graph_chains.py, for chains and for trees; it has no branches to draft
for. What no recorded loop holds (rows within a constraint) goes the eager way.

A tree is made as draft_trees makes it, but for what the device cannot leave out: every level feeds
`width` nodes, also those that cannot lead into the draft. The K best of all are the same.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import partial

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from outrider.drafting.draft_model.chains import ReadyRow
from outrider.drafting.graphs.loop_inputs import LoopBatches, LoopInputs, LoopShape
from outrider.drafting.graphs.loops import Capture, CapturedLoops, Draft, Numbered, chains
from outrider.drafting.hidden_states.eager import HeadDrafter
from outrider.drafting.hidden_states.forward import LEAD, HeadForward
from outrider.drafting.hidden_states.heads.base import RecurrentHead
from outrider.drafting.hidden_states.trees import Nodes, TargetDraws
from outrider.engine.attention.base import AttentionBackend
from outrider.engine.batch import PackedBatch, RowSlice


class FeatureRows:
    """The target's states of the rows that a loop feeds, one after the other.

    On the host (pinned for CUDA) and on the device: only true rows cross, not what fills up.
    """

    def __init__(self, num_rows: int, width: int, device: torch.device) -> None:
        pinned = device.type == "cuda"
        self._host = torch.zeros(num_rows, width, dtype=torch.bfloat16, pin_memory=pinned)
        self._device = torch.zeros(num_rows, width, dtype=torch.bfloat16, device=device)

    def fill(self, rows: Sequence[Tensor]) -> None:
        """Write bfloat16 [any, width] each and enqueues the copy; nothing may be copying."""
        end = sum(map(len, rows))
        torch.cat(list(rows), out=self._host[:end])
        self._device[:end].copy_(self._host[:end], non_blocking=True)

    def first(self, count: int) -> Tensor:
        """Of rows that feed one token each: bfloat16 [count, width]. May be recorded."""
        return self._device[:count]

    def spread(self, batch: PackedBatch) -> Tensor:
        """Those of a recorded catch-up's tokens: bfloat16 [tokens, width]. May be recorded.

        What fills a row up has the states of the row's last token.
        """
        last = batch.logits_index - batch.cu_seqlens_q[:-1]  # of a row's own tokens: [rows]
        counts = last + 1
        begin = counts.cumsum(0) - counts
        places = torch.arange(batch.max_query_len, device=self._device.device)
        place = torch.minimum(places, last[:, None])
        return self._device.index_select(0, (begin[:, None] + place).flatten())


class RecurrentLoops(HeadDrafter):
    """Chains and trees by recorded loops, as far as they hold the rows; else as its base class.

    No session may have `scratch_page`. Building it records the loops. Used from one thread.
    """

    def __init__(
        self,
        head: RecurrentHead,
        backend: AttentionBackend,
        recording: Capture,
        *,
        page_size: int,
        scratch_page: int,
        max_model_len: int,
    ) -> None:
        super().__init__(head, backend, page_size)
        self._draws = recording.draws
        self._inputs = LoopInputs(
            recording.shapes,
            max_model_len=max_model_len,
            page_size=page_size,
            scratch_page=scratch_page,
            device=head.device,
            lead=LEAD,
        )
        most = max(shape.rows * shape.query_len for shape in recording.shapes)
        self._features = FeatureRows(most, head.features.width, head.device)
        self._loops = CapturedLoops(recording, self._inputs, self._loop, _output_shape)

    def chains(
        self, slices: Sequence[RowSlice], features: Sequence[Tensor], ready: Sequence[ReadyRow]
    ) -> list[list[int]]:
        return self._drafts(slices, features, ready, chains, super().chains)

    def trees(
        self,
        slices: Sequence[RowSlice],
        features: Sequence[Tensor],
        ready: Sequence[ReadyRow],
        width: int,
    ) -> list[Nodes]:
        """`width` is that of the loops."""
        eager = partial(super().trees, width=width)
        return self._drafts(slices, features, ready, _trees, eager)

    def _drafts(
        self,
        slices: Sequence[RowSlice],
        features: Sequence[Tensor],
        ready: Sequence[ReadyRow],
        read: Callable[[NDArray[np.int32], Sequence[int]], list[Draft]],
        draft: Callable[[list[RowSlice], list[Tensor], list[ReadyRow]], list[Draft]],
    ) -> list[Draft]:
        catch_up = super().chains

        def feed(long: Numbered) -> None:
            states = [features[i][: len(row.token_ids)] for i, row in long.items()]
            catch_up([*long.values()], states, ())

        def states(rows: Numbered) -> list[Tensor]:
            return [features[i][-len(row.token_ids) :] for i, row in rows.items()]

        def load(rows: Numbered) -> None:
            self._features.fill(states(rows))

        def eager(rows: Numbered) -> list[Draft]:
            return draft([*rows.values()], states(rows), [ready[i] for i in rows])

        return self._loops.drafts(slices, ready, read, feed, eager, load)

    def _loop(self, shape: LoopShape) -> Tensor:
        inputs = self._inputs.batches(shape)
        states = self._features.spread(inputs.catch_up)
        forward = HeadForward(self._head, self._backend, self._page_size, states)
        return (self._chain if shape.width == 1 else self._tree)(forward, inputs, shape)

    def _chain(self, forward: HeadForward, inputs: LoopBatches, shape: LoopShape) -> Tensor:
        """int32 [rows, tokens, 1]"""
        tokens = self._draws.choose(forward.forward(inputs.catch_up), inputs.rows.sampling)
        drawn = [tokens]
        for step in range(shape.num_steps):
            batch, sampling = inputs.step(tokens, step)
            tokens = self._draws.choose(forward.forward(batch), sampling)
            drawn.append(tokens)
        return torch.stack(drawn, dim=1).to(torch.int32)[:, :, None]

    def _tree(self, forward: HeadForward, inputs: LoopBatches, shape: LoopShape) -> Tensor:
        """int32 [rows, nodes, 3]: tokens, parents, scores; the best nodes first."""
        rows, width, device = shape.rows, shape.width, self._head.device
        draws = TargetDraws(inputs.rows.sampling, self._draws.noised)
        row = torch.arange(rows, device=device)[:, None]
        ids, scores = draws.likeliest(forward.forward(inputs.catch_up)[:, None], 0, width)
        tokens, scores = ids[:, 0], scores[:, 0]  # of the latest level's nodes: [rows, width]
        level = torch.arange(width, device=device).expand(rows, -1)  # their numbers
        one = torch.ones_like(level)
        visible = one << level  # bits, by the order of feeding: a node sees itself and those above
        sources = row.expand(-1, width)
        found = [(tokens, torch.full_like(tokens, -1), scores)]
        num_nodes = width
        for step in range(shape.num_steps):
            batch = inputs.level(tokens, visible, step)
            logits = forward.forward(batch, sources.flatten()).view(rows, width, -1)
            ids, gains = draws.likeliest(logits, step + 1, width)
            all_ids, all_scores = ids.flatten(1), (scores[:, :, None] + gains).flatten(1)
            found.append((all_ids, level[:, :, None].expand(-1, -1, width).flatten(1), all_scores))
            best = all_scores.sort(dim=1, descending=True, stable=True).indices[:, :width]
            parents = best // width
            tokens, scores = all_ids.gather(1, best), all_scores.gather(1, best)
            level = best + num_nodes
            num_nodes += width * width
            sources = row * width + parents
            if step + 1 < shape.num_steps:
                slots = torch.arange(width, device=device) + (step + 1) * width
                visible = visible.gather(1, parents) | (one << slots)
        everything = [torch.cat(parts, dim=1) for parts in zip(*found, strict=True)]
        return _best(everything, shape.num_tokens)


def _best(everything: Sequence[Tensor], count: int) -> Tensor:
    """The nodes of highest score: tokens, parents and scores [rows, any] to what `_tree` returns.

    Of equal ones the first, so that a parent comes before its children.
    """
    tokens, parents, scores = everything
    best = scores.sort(dim=1, descending=True, stable=True).indices[:, :count]
    above = parents.gather(1, best)
    places = (best[:, None] == above[:, :, None]).to(torch.int32).argmax(dim=2)
    places = torch.where(above < 0, -1, places)
    ints = (tokens.gather(1, best).to(torch.int32), places.to(torch.int32))
    return torch.stack((*ints, scores.gather(1, best).view(torch.int32)), dim=2)


def _trees(drafted: NDArray[np.int32], wanted: Sequence[int]) -> list[Nodes]:
    """Of what a loop of trees left, int32 [rows, nodes, 3], each row's best nodes."""
    return [_nodes(row, n) for row, n in zip(drafted, wanted, strict=True)]


def _nodes(drafted: NDArray[np.int32], wanted: int) -> Nodes:
    """The best `wanted` of the nodes that a loop left, int32 [nodes, 3]."""
    tokens, parents, scores = drafted[:wanted].T
    count = int((np.ascontiguousarray(scores).view(np.float32) > -np.inf).sum())
    return tokens[:count].tolist(), parents[:count].tolist()


def _output_shape(shape: LoopShape) -> tuple[int, ...]:
    return shape.rows, shape.num_tokens, 1 if shape.width == 1 else 3
