"""Forwards of prompts, and of prompts beside other rows, as recorded work.

Launching the kernels of such a forward one by one takes longer than the forward, and all other
rows wait for it. What is drawn from it is of a size that follows its rows: that runs eagerly.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Protocol

import torch
from torch import Tensor

from outrider.engine.batch import PackedBatch, RowSlice
from outrider.engine.cuda.graphs import Record, Work
from outrider.engine.ragged_step import RaggedBucket, RaggedInputs


class LayeredModel(Protocol):
    """A model whose layers can be recorded, and its head be run apart."""

    @property
    def page_size(self) -> int: ...

    @property
    def max_model_len(self) -> int: ...

    @property
    def scratch_page(self) -> int:
        """A page that no sequence ever gets."""
        ...

    @property
    def device(self) -> torch.device: ...

    def hidden(self, batch: PackedBatch) -> Tensor:
        """Writes the new keys and values and returns what `head` takes: [tokens, hidden]."""
        ...

    def head(self, hidden: Tensor) -> Tensor:
        """Logits [n, vocab_size] of rows of it [n, hidden]; as `Model.forward` returns them."""
        ...


class RaggedForwards:
    """Building it records every bucket, the largest first. Used from one thread."""

    def __init__(
        self,
        model: LayeredModel,
        buckets: Sequence[RaggedBucket],
        *,
        record: Record,
        on_recorded: Callable[[], None] = lambda: None,
    ) -> None:
        self._model = model
        self._inputs = RaggedInputs(
            buckets,
            max_model_len=model.max_model_len,
            page_size=model.page_size,
            scratch_page=model.scratch_page,
            device=model.device,
        )
        self._buckets = sorted(buckets)
        self._hidden: Tensor | None = None  # [tokens, hidden]: one place for all buckets
        self._recorded: dict[RaggedBucket, Work] = {}
        for bucket in reversed(self._buckets):
            self._recorded[bucket] = self._record(bucket, record)
            on_recorded()

    @torch.inference_mode()
    def logits(self, rows: Sequence[RowSlice]) -> Tensor | None:
        """What the model's `forward` returns for these rows; None if no bucket holds them."""
        hidden = self._run(rows)
        if hidden is None:
            return None
        ends = torch.tensor([len(row.token_ids) for row in rows]).cumsum(0).tolist()
        index = [
            place
            for row, end in zip(rows, ends, strict=True)
            for place in range(end - row.num_logits, end)
        ]
        chosen = torch.tensor(index, dtype=torch.int64).to(hidden.device, non_blocking=True)
        return self._model.head(hidden.index_select(0, chosen))

    @torch.inference_mode()
    def feed(self, rows: Sequence[RowSlice]) -> bool:
        """Only writes keys and values, and waits for that; False if no bucket holds the rows."""
        hidden = self._run(rows)
        if hidden is None:
            return False
        hidden[:1, :1].tolist()
        return True

    def _run(self, rows: Sequence[RowSlice]) -> Tensor | None:
        if any(row.parents for row in rows):
            return None
        tokens = sum([len(row.token_ids) for row in rows])
        for bucket in self._buckets:
            if bucket.tokens >= tokens and bucket.rows >= len(rows):
                self._inputs.fill(rows, bucket)
                self._recorded[bucket]()
                return self._hidden
        return None

    def _record(self, bucket: RaggedBucket, record: Record) -> Work:
        self._inputs.fill((), bucket)
        batch = self._inputs.batch(bucket)

        @torch.inference_mode()
        def work() -> None:
            hidden = self._model.hidden(batch)
            if self._hidden is None:  # the largest one's, when it runs for the first time
                self._hidden = torch.empty_like(hidden)
            self._hidden[: bucket.tokens].copy_(hidden)

        return record(work)
