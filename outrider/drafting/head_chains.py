"""A draft module's loop recorded: true rows with the target's states, K draws, K - 1 forwards.

The module's counterpart to graph_chains.py; it has no branches to draft for. What no recorded loop
holds (prompts, long catch-ups, rows within a constraint) goes the eager way.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from outrider.drafting.chain_inputs import ChainInputs, LoopShape
from outrider.drafting.draft_steps import ReadyRow, draft_chains
from outrider.drafting.head_forward import LEAD, HeadForward
from outrider.drafting.heads.base import RecurrentHead
from outrider.drafting.recorded_loops import RecordedLoops, Recording
from outrider.engine.attention import AttentionBackend
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
        """Writes bfloat16 [any, width] each and enqueues the copy; nothing may be copying."""
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
        rows, query_len = len(batch.query_lens), batch.max_query_len
        device = self._device.device
        first = torch.arange(rows, device=device) * query_len
        last = batch.logits_index - first  # of a row's own tokens: [rows]
        begin = (last + 1).cumsum(0) - (last + 1)
        place = torch.minimum(torch.arange(query_len, device=device), last[:, None])
        return self._device.index_select(0, (begin[:, None] + place).flatten())


class HeadChains:
    """Drafts chains with recorded loops of `head`, which is bound to its pools.

    No session may have `scratch_page`. Building it records the loops. Used from one thread.
    """

    def __init__(
        self,
        head: RecurrentHead,
        backend: AttentionBackend,
        recording: Recording,
        *,
        page_size: int,
        scratch_page: int,
        max_model_len: int,
    ) -> None:
        self._head = head
        self._backend = backend
        self._page_size = page_size
        self._draws = recording.draws
        self._inputs = ChainInputs(
            recording.shapes,
            max_model_len=max_model_len,
            page_size=page_size,
            scratch_page=scratch_page,
            device=head.device,
            lead=LEAD,
        )
        most = max(shape.rows * shape.query_len for shape in recording.shapes)
        self._features = FeatureRows(most, head.features.width, head.device)
        self._loops = RecordedLoops(recording, self._inputs, self._loop, _output_shape)

    def draft(
        self, slices: Sequence[RowSlice], features: Sequence[Tensor], ready: Sequence[ReadyRow]
    ) -> list[list[int]]:
        """What `draft_chains` returns, by recorded loops as far as they hold the rows.

        `features` are the states of each slice's tokens, bfloat16 [tokens, width] on the host.
        """

        def load(rows: list[int]) -> None:
            self._features.fill([features[i] for i in rows])

        chains, eager = self._loops.chains(slices, ready, load)
        rest = [*eager, *range(len(ready), len(slices))]
        if rest:
            states = [features[i] for i in rest]
            forward = HeadForward.of_host(self._head, self._backend, self._page_size, states)
            drafts = draft_chains(
                forward, [slices[i] for i in rest], [ready[i] for i in eager], LEAD
            )
            for i, chain in zip(eager, drafts, strict=True):
                chains[i] = chain
        return chains

    def _loop(self, shape: LoopShape) -> Tensor:
        """int32 [rows, tokens, 1]"""
        inputs = self._inputs.batches(shape)
        states = self._features.spread(inputs.catch_up)
        forward = HeadForward(self._head, self._backend, self._page_size, states)
        tokens = self._draws.choose(forward.forward(inputs.catch_up), inputs.sampling)
        drawn = [tokens]
        for step in range(shape.num_steps):
            batch, sampling = inputs.step(tokens, step)
            tokens = self._draws.choose(forward.forward(batch), sampling)
            drawn.append(tokens)
        return torch.stack(drawn, dim=1).to(torch.int32)[:, :, None]


def _output_shape(shape: LoopShape) -> tuple[int, ...]:
    return shape.rows, shape.num_tokens, 1
