"""Forwards of prompts, and of prompts beside other rows, as recorded work.

Launching the kernels of such a forward one by one takes longer than the forward, and all other
rows wait for it. What is drawn from it is of a size that follows its rows: that runs eagerly.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Protocol

import torch
from torch import Tensor

from outrider.engine.batch import Model, PackedBatch, RowSlice
from outrider.engine.graphs.capture import Record, Work
from outrider.engine.graphs.prefill_inputs import PrefillBucket, PrefillInputs


class LayeredModel(Model, Protocol):
    """A model whose layers can be recorded, and its head be run apart."""

    @property
    def scratch_page(self) -> int:
        """A page that no sequence ever gets."""
        ...

    def hidden(self, batch: PackedBatch) -> Tensor:
        """Write the new keys and values and returns what `head` takes: [tokens, hidden]."""
        ...

    def head(self, hidden: Tensor) -> Tensor:
        """Logits [n, vocab_size] of rows of it [n, hidden]; as `forward` returns them."""
        ...


class PrefillGraphs:
    """Building it records every bucket, the largest first. Used from one thread.

    A bucket is left out again that takes longer, by `seconds`, than one that holds more: cuBLAS has
    no equally good kernel for every size (448 tokens of an 8B took 15 ms on an H200, 512 11.4).
    """

    def __init__(
        self,
        model: LayeredModel,
        buckets: Sequence[PrefillBucket],
        *,
        record: Record,
        seconds: Callable[[Work], float] = lambda work: 0.0,  # noqa: ARG005
        on_captured: Callable[[], None] = lambda: None,
    ) -> None:
        self._model = model
        self._inputs = PrefillInputs(
            buckets,
            max_model_len=model.max_model_len,
            page_size=model.page_size,
            scratch_page=model.scratch_page,
            device=model.device,
        )
        self._hidden: Tensor | None = None  # [tokens, hidden]: one place for all buckets
        self._recorded: dict[PrefillBucket, Work] = {}
        taken: dict[PrefillBucket, float] = {}
        for bucket in sorted(buckets, reverse=True):
            work = self._record(bucket, record)
            on_captured()
            time = seconds(work)
            if all(time <= taken[larger] for larger in taken if larger.rows >= bucket.rows):
                self._recorded[bucket], taken[bucket] = work, time
        self._buckets = sorted(self._recorded)

    @torch.inference_mode()
    def logits(self, rows: Sequence[RowSlice]) -> Tensor | None:
        """What the model's `forward` returns for these rows; None if no bucket holds them."""
        index = self._run(rows)
        if index is None:
            return None
        assert self._hidden is not None
        chosen = index.to(self._hidden.device, non_blocking=True)
        return self._model.head(self._hidden.index_select(0, chosen))

    @torch.inference_mode()
    def feed(self, rows: Sequence[RowSlice]) -> bool:
        """Only writes keys and values, and waits for that; False if no bucket holds the rows."""
        if self._run(rows) is None:
            return False
        assert self._hidden is not None
        self._hidden[:1, :1].tolist()
        return True

    def _run(self, rows: Sequence[RowSlice]) -> Tensor | None:
        """Leaves what comes of the rows in `_hidden`; returns which tokens of it get logits."""
        if any(row.parents for row in rows):
            return None
        tokens = sum([len(row.token_ids) for row in rows])
        for bucket in self._buckets:
            if bucket.tokens >= tokens and bucket.rows >= len(rows):
                index = self._inputs.fill(rows, bucket)
                self._recorded[bucket]()
                return index
        return None

    def _record(self, bucket: PrefillBucket, record: Record) -> Work:
        self._inputs.fill((), bucket)
        batch = self._inputs.batch(bucket)

        @torch.inference_mode()
        def work() -> None:
            hidden = self._model.hidden(batch)
            if self._hidden is None:  # the largest one's, when it runs for the first time
                self._hidden = torch.empty_like(hidden)
            self._hidden[: bucket.tokens].copy_(hidden)

        return record(work)
