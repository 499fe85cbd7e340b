"""Rank 0's shard of a model, which makes the other ranks run the same calls."""

from __future__ import annotations

from torch import Tensor

from outrider.engine.attention.base import AttentionBackend
from outrider.engine.batch import PackedBatch
from outrider.engine.kv_cache.pools import KVPools
from outrider.engine.model.paged_model import ModelInfo, PagedModel, Step
from outrider.engine.model.parallel.ranks import RankGroup


class LeadingModel(PagedModel):
    """A `PagedModel` whose other shards follow."""

    def __init__(
        self,
        group: RankGroup,
        step: Step,
        pools: KVPools,
        backend: AttentionBackend,
        info: ModelInfo,
    ) -> None:
        super().__init__(step, pools, backend, info)
        self._group = group

    @property
    def capturable(self) -> bool:
        return False  # the other ranks would have to replay the same graph

    @property
    def layered(self) -> bool:
        return False  # only captured steps need it

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
            # The other ranks may have run this forward, or may hang in it.
            self._group.lost(f"The leader's forward failed: {error}")
            raise
