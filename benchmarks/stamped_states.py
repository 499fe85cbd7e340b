"""What stamped.py needs for hidden states: a pool of them, and a method that reads them."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, Final

import torch
from torch import Tensor

from outrider.draft_tree import DraftTree
from outrider.drafting.hidden_states.session import FeatureMethod
from outrider.drafting.proposer import NO_PACE, DraftRound, Pace, ProposerTraits, SessionKey
from outrider.engine.kv_cache.hidden_states import HiddenStatePool
from outrider.engine.model.paged_model import PagedModel
from outrider.features import BYTES_PER_VALUE, FeatureSpec

_MAX_ROWS: Final = 4096  # of a round


def make_pool(row_bytes: int, model: PagedModel) -> HiddenStatePool:
    """Of a wide target, for the pages of a narrow one: one row stands for all."""
    pool = HiddenStatePool(_spec(row_bytes), 1, 1, model.device)
    pool.page_size = model.page_size
    pool.rows = pool.rows.expand(model.num_pages * model.page_size, -1)
    return pool


def build(row_bytes: int, *_: Any) -> tuple[StatesProposer, str]:
    """In place of what the command line names."""
    return StatesProposer(row_bytes), ""


class StatesProposer(FeatureMethod):
    """Puts the new rows of a round together on the host, as modules do, and repeats a token.

    A prompt is through in one round, as on a GPU.
    """

    def __init__(self, row_bytes: int) -> None:
        spec = _spec(row_bytes)
        super().__init__(ProposerTraits("ngram", "", 0, 256, 16, 2**20, features=spec))
        self._host = torch.empty(_MAX_ROWS, spec.width, dtype=torch.bfloat16)

    def draft(self, sessions: Sequence[SessionKey], pace: Pace = NO_PACE) -> DraftRound:  # noqa: ARG002
        done = DraftRound()
        fed: list[Tensor] = []
        for state in self._asked(sessions):
            tokens = state.follower.tokens
            fresh = range(state.first, state.num_rows)
            if fresh:
                fed.append(state.rows(fresh.start, fresh.stop))
                state.forget(max(0, min(fresh.stop, len(tokens) - 2)))
            if state.ready:
                chain = (tokens[-1],) * state.follower.wanted
                done.drafts.append((state.key, DraftTree.chain(len(tokens), chain)))
            else:
                done.unfinished.append(state.key)
        if fed:
            torch.cat(fed, out=self._host[: sum(map(len, fed))])
        done.lost.extend(self._take_lost())
        return done


def _spec(row_bytes: int) -> FeatureSpec:
    return FeatureSpec(row_bytes // BYTES_PER_VALUE, final_norm=True)
