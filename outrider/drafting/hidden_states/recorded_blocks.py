"""A block drafter's round of one session on a CPU, whose kernels are recorded once.

At a few rows a kernel takes as long as Python takes to call it with new tensors.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from outrider.drafting.drafters import DraftInput
from outrider.drafting.hidden_states.block_attention import BlockAttention
from outrider.drafting.hidden_states.heads.block import BlockHead
from outrider.drafting.hidden_states.heads.dflash import DFlashHead
from outrider.engine.attention.base import AttentionBackend, StepAttention
from outrider.engine.batch import PackedBatch, RowSlice, pack
from outrider.engine.cpu.attention import NumbaAttention
from outrider.engine.cpu.int8 import rounded
from outrider.engine.cpu.team import Recording

_SHORTEST = 256  # slots that the attention of short texts has room for


class RecordedBlocks:
    """Runs `head` for a session alone that catches up with few tokens, else not at all."""

    def __init__(self, head: DFlashHead, backend: AttentionBackend, page_size: int) -> None:
        self._head, self._backend, self._page_size = head, backend, page_size
        self._most = most = head.num_slots(head.max_depth) + 1  # tokens to catch up, or slots
        # The tokens to catch up end, and the block begins, in the middle.
        self._slots = torch.zeros(2 * most, dtype=torch.int64)
        self._rope = torch.empty(2 * most, *head.rope.shape[1:], dtype=head.dtype)
        # By NumPy, which copies little in less time.
        self._slot_numbers = self._slots.numpy()
        self._ropes = [each.view(torch.int16).numpy() for each in (self._rope, head.rope)]
        self._features = torch.empty(most, head.features.width, dtype=head.dtype)
        self._x = torch.empty(most, head.state_size, dtype=head.dtype)
        self._embedded = head.embed(torch.full((most,), head.mask_token))
        self._table = torch.zeros(1, -(-head.max_model_len // page_size), dtype=torch.int32)
        self._pages = self._table.numpy()[0]
        self._writes: dict[int, Recording] = {}
        self._blocks: dict[tuple[int, int], _Block] = {}

    @staticmethod
    def of(head: BlockHead, backend: AttentionBackend, page_size: int) -> RecordedBlocks | None:
        """Return one if a forward consists of compiled kernels, attention included."""
        if not isinstance(head, DFlashHead) or head.windows:
            return None
        attention = backend(pack([RowSlice([0], 0, [0], 0)], page_size, head.device))
        compiled = all(rounded(use.linear) is not None for use in head.uses)
        if not compiled or not isinstance(attention, NumbaAttention):
            return None
        return RecordedBlocks(head, backend, page_size)

    @torch.inference_mode()
    def run(self, rows: Sequence[DraftInput]) -> Tensor | None:
        """Do as `BlockHead.run`; None if it does not run these rows. The next run overwrites it."""
        row, head, most = rows[0], self._head, self._most
        count, start, end = len(row.slice.token_ids), row.slice.start, row.end
        width = head.num_slots(min(row.wanted, head.max_depth))
        stop = end + width
        alone = len(rows) == 1 and row.wanted > 0
        if not alone or count > most or stop > head.max_model_len or row.features is None:
            return None
        size, pages = self._page_size, row.slice.block_table
        places = slice(most - count, most + width)
        slots = [pages[p // size] * size + p % size for p in range(start, stop)]
        self._slot_numbers[places] = slots
        self._ropes[0][places] = self._ropes[1][start:stop]
        used = -(-stop // size)
        self._pages[:used] = pages[:used]
        self._features[:count].copy_(row.features)
        if count not in self._writes:
            self._writes[count] = self._record_write(count)
        self._writes[count].run()
        self._embedded[0] = head.embed(torch.tensor(row.slice.token_ids[-1:]))[0]
        self._x[:width].copy_(self._embedded[:width])
        longest = min(max(_SHORTEST, 1 << (stop - 1).bit_length()), head.max_model_len)
        if (width, longest) not in self._blocks:
            self._blocks[width, longest] = self._record_block(width, longest)
        return head.guessing(self._blocks[width, longest].run(end)[None])

    def _record_write(self, count: int) -> Recording:
        places = slice(self._most - count, self._most)
        with Recording() as recording:
            features, rope = self._features[:count], self._rope[places]
            self._head.write(features, rope, self._slots[places])
        return recording

    def _record_block(self, width: int, longest: int) -> _Block:
        places = slice(self._most, self._most + width)
        batch = PackedBatch(
            input_ids=torch.zeros(width, dtype=torch.int64),
            positions=torch.zeros(width, dtype=torch.int64),
            slot_mapping=self._slots[places],
            cu_seqlens_q=torch.tensor([0, width], dtype=torch.int32),
            seq_lens=torch.tensor([longest], dtype=torch.int32),
            block_table=self._table,
            logits_index=torch.arange(width),
            query_lens=(width,),
            context_lens=(longest,),
            page_size=self._page_size,
            recorded=True,
        )
        made: list[NumbaAttention] = []

        def backend(each: PackedBatch) -> StepAttention:
            found = self._backend(each)
            assert isinstance(found, NumbaAttention)
            made.append(found)
            return found

        attention = BlockAttention(batch, [width], backend)
        for causal in set(self._head.causal):  # what makes them computes
            attention.of(causal=causal, window=None)
        with Recording() as recording:
            outputs = self._head.run_block(self._x[:width], self._rope[places], attention)
        return _Block(recording, made, longest - width, outputs)


class _Block:
    """The recorded layers of a block."""

    def __init__(
        self, recording: Recording, attention: list[NumbaAttention], place: int, outputs: Tensor
    ) -> None:
        """`place` is the first slot in the recorded row, and `outputs` [slots, hidden] theirs."""
        self._recording, self._attention = recording, attention
        self._place, self._outputs = place, outputs

    def run(self, place: int) -> Tensor:
        """Run the block at another place."""
        for each in self._attention:
            each.slide(place - self._place)
        self._place = place
        self._recording.run()
        return self._outputs
