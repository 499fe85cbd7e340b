"""Captured forwards of prompts, and of prompts beside other rows.

A launch of all kernels of such a forward takes longer than the forward, and all other rows wait for
it. Sampling depends on the number of rows, so it runs eagerly.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

import torch
from torch import Tensor

from outrider.engine.batch import RowSlice
from outrider.engine.graphs.buckets import CapturedBuckets
from outrider.engine.graphs.capture import Capture, Work
from outrider.engine.graphs.prefill_inputs import PrefillBucket, PrefillInputs
from outrider.engine.graphs.staging import PageLayout
from outrider.engine.model.paged_model import PagedModel
from outrider.engine.runner import FillIn


class PrefillGraphs:
    """Captures every bucket, and replays one per forward. Used from one thread.

    A bucket that takes longer, by `seconds`, than one that holds more is left out: cuBLAS has no
    equally good kernel for every size.
    """

    def __init__(
        self,
        model: PagedModel,
        buckets: Sequence[PrefillBucket],
        *,
        capture: Capture,
        seconds: Callable[[Work], float] = lambda work: 0.0,  # noqa: ARG005
        on_captured: Callable[[], None] = lambda: None,
    ) -> None:
        self._model = model
        layout = PageLayout(model.max_model_len, model.page_size, model.scratch_page, model.device)
        self._layout, self._inputs = layout, PrefillInputs(buckets, layout)
        self._hidden: Tensor | None = None  # [tokens, hidden], shared by all buckets
        taken: dict[PrefillBucket, float] = {}

        def captured(bucket: PrefillBucket) -> Work | None:
            work = capture(self._work(bucket))
            on_captured()
            time = seconds(work)
            kind = [each for each in taken if each.trees == bucket.trees]
            if any(taken[larger] < time for larger in kind if larger.rows >= bucket.rows):
                return None
            taken[bucket] = time
            return work

        self._buckets = CapturedBuckets(buckets, captured, lambda b: (b.tokens, b.rows, b.trees))

    @torch.inference_mode()
    def logits(self, rows: Sequence[RowSlice], fill_in: FillIn | None = None) -> Tensor | None:
        """Return what the model's `forward` returns for these rows; None if no bucket fits."""
        index = self._run(rows, fill_in)
        if index is None:
            return None
        assert self._hidden is not None
        chosen = index.to(self._hidden.device, non_blocking=True)
        return self._model.head(self._hidden.index_select(0, chosen))

    @torch.inference_mode()
    def feed(self, rows: Sequence[RowSlice]) -> bool:
        """Write keys and values and wait for the device; False if no bucket holds the rows."""
        if self._run(rows) is None:
            return False
        assert self._hidden is not None
        self._hidden[:1, :1].tolist()
        return True

    def _run(self, rows: Sequence[RowSlice], fill_in: FillIn | None = None) -> Tensor | None:
        """Leave the rows' states in `_hidden` and return which of their tokens get logits."""
        tokens = sum([len(row.token_ids) for row in rows])
        if not self._layout.holds(rows):
            return None
        trees = any(row.parents for row in rows)
        bucket = self._buckets.find(
            lambda each: each.tokens >= tokens and each.rows >= len(rows) and each.trees == trees
        )
        if bucket is None:
            return None
        index = self._inputs.fill(rows, bucket)
        if fill_in is not None:
            fill_in(self._inputs.input_ids)  # behind their copy
        self._buckets[bucket]()
        return index

    def _work(self, bucket: PrefillBucket) -> Work:
        self._inputs.fill((), bucket)
        batch = self._inputs.batch(bucket)

        @torch.inference_mode()
        def work() -> None:
            hidden = self._model.hidden(batch)
            if self._hidden is None:  # in the first run, of whichever bucket
                most = len(self._inputs.input_ids)
                self._hidden = hidden.new_empty(most, *hidden.shape[1:])
            self._hidden[: bucket.tokens].copy_(hidden)

        return work
