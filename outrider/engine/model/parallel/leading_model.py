"""Rank 0's shard of a model: every call that touches a device is made on the other ranks, too."""

from __future__ import annotations

from typing import Any

from torch import Tensor

from outrider.engine.batch import PackedBatch
from outrider.engine.model.paged_model import PagedModel
from outrider.engine.model.parallel.ranks import RankGroup


class LeadingModel(PagedModel):
    """A `PagedModel` whose other shards follow. Takes what that takes, after the group."""

    def __init__(self, group: RankGroup, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        self._group = group

    @property
    def capturable(self) -> bool:
        return False  # the other ranks would have to replay the same recording

    @property
    def layered(self) -> bool:
        return False  # of use for recordings only

    def resize(self, num_pages: int) -> None:
        self._group.call("resize", num_pages)
        super().resize(num_pages)

    def copy_pages(self, source: Tensor, target: Tensor) -> None:
        self._group.call("copy_pages", source, target)
        super().copy_pages(source, target)

    def move_slots(self, source: Tensor, target: Tensor) -> None:
        self._group.call("move_slots", source, target)
        super().move_slots(source, target)

    def logits(self, batch: PackedBatch, out: Tensor | None = None) -> Tensor:
        self._group.call("logits", batch)
        try:
            return super().logits(batch, out)
        except Exception as error:
            # The others have run it, or hang in the middle of it: nobody knows.
            self._group.lost(f"The leader's forward failed: {error}")
            raise
