"""What a draft module is fed of a session in one round."""

from __future__ import annotations

from dataclasses import dataclass

from torch import Tensor

from outrider.drafting.draft_model.chains import ReadyRow
from outrider.drafting.hidden_states.session import FeatureSession
from outrider.drafting.session_pages import PageCache
from outrider.engine.batch import RowSlice
from outrider.engine.sampling.constraint import ConstraintEditor


@dataclass(frozen=True, slots=True)
class HeadRow:
    """A session's part in one round."""

    state: FeatureSession
    cache: PageCache
    num_rows: int  # true rows fed
    wanted: int  # draft tokens; 0: the prompt is not through yet
    mask: ConstraintEditor | None  # stands after the committed text; used up
    chain: bool  # the draft has one path
    num_guessed: int  # rows fed past the true ones at most

    @property
    def end(self) -> int:
        return self.cache.computed + self.num_rows

    @property
    def sampled(self) -> bool:
        """The draft is drawn with noise of its own."""
        return self.state.samples and self.wanted > 0

    @property
    def length(self) -> int:
        return self.state.follower.length

    def slice(self) -> RowSlice:
        start = self.cache.computed
        tokens = self.state.follower.tokens[start + 1 : self.end + 1]
        return RowSlice(tokens, start, self.cache.block_table, 1)

    def features(self) -> Tensor:
        """The states of the slice's tokens: bfloat16 [num_rows, width] on the host."""
        return self.state.rows(self.cache.computed, self.end)

    def ready(self) -> ReadyRow:
        """For a row that drafts."""
        return ReadyRow(self.length, self.wanted, self.state.follower.sampling, self.mask)


def inputs_of(rows: list[HeadRow]) -> tuple[list[RowSlice], list[Tensor], list[ReadyRow]]:
    """What a `HeadDrafter` takes."""
    ready = [row.ready() for row in rows if row.wanted]
    return [row.slice() for row in rows], [row.features() for row in rows], ready
