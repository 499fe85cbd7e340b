"""Drafts behind a verification on the same device, enqueued before anybody knows its verdict.

A draft goes on from what the target chose. Where both models are on one stream the device has that
the moment the verification ends; the host has it later, and takes as long again to say so. So the
draft loop is enqueued behind the step, and reads from the step's own output where each text ends
and with which tokens (`ChainInputs.follow`). While it runs the host does what the verdict asks for.

It is a bet that the text goes on. Where it has ended or the session is gone the draft is dropped,
where the host has told nothing new it is made anew. Nothing has to be undone: a
loop writes behind what was committed when it began, on pages that were the session's then, and
whoever is given these pages writes to them later on the stream.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import NamedTuple, Protocol, runtime_checkable

from torch import Tensor

from outrider.drafting.draft_state import DraftState
from outrider.drafting.proposer import SessionKey
from outrider.engine.block_pool import BlockPool
from outrider.params import SamplingParams, TokenIds


class TrailRow(NamedTuple):
    """A row of the step in flight, in which a session's text is verified."""

    session: SessionKey
    draft: TokenIds  # a chain, perhaps of none
    wanted: int  # draft tokens after it, at least 1


@runtime_checkable
class Trailer(Protocol):
    """A method that drafts behind a step."""

    def draft_behind(self, rows: Sequence[TrailRow], verdicts: Tensor) -> None:
        """Enqueues drafts for what the step's rows will say, if it can for all of them.

        `verdicts` as `Verdicts.tokens` says it, of these rows. The next `draft` hands them out.
        """
        ...


class TrailLine(NamedTuple):
    """What the cache holds of a session when its draft is enqueued."""

    length: int  # of its text, all in the cache
    num_guesses: int  # after the text
    block_table: Sequence[int]  # covers two tokens more than the guesses, and the draft's


@runtime_checkable
class TrailingDrafter(Protocol):
    """Drafts chains behind a step."""

    def draft_behind(
        self,
        lines: Sequence[TrailLine],
        sampling: Sequence[SamplingParams],
        num_tokens: int,
        verdicts: Tensor,
    ) -> Callable[[], list[list[int]]] | None:
        """Enqueues drafts of `num_tokens` each; what waits for them. None: it cannot.

        Of each line's guesses the verified ones are as many as there are, or one more. It must be
        waited for before anything else is asked of the drafter.
        """
        ...


@dataclass(frozen=True, slots=True)
class Trail:
    """Drafts on their way."""

    wait: Callable[[], list[list[int]]]
    lines: dict[SessionKey, tuple[int, TrailLine]]  # with the place of each

    @staticmethod
    def launch(
        drafter: TrailingDrafter,
        states: Sequence[DraftState],
        num_tokens: int,
        verdicts: Tensor,
    ) -> Trail | None:
        """Behind the step that verifies `states`, in that order; their pages cover the drafts."""
        lines = [
            TrailLine(len(s.follower.tokens), len(s.ahead.line), s.block_table) for s in states
        ]
        sampling = [state.follower.sampling for state in states]
        wait = drafter.draft_behind(lines, sampling, num_tokens, verdicts)
        if wait is None:
            return None
        keys = [state.key for state in states]
        return Trail(wait, dict(zip(keys, enumerate(lines), strict=True)))

    def settle(self, state: DraftState, pool: BlockPool) -> int | None:
        """The place of a session's draft, if it goes on from what was committed since.

        What was guessed before is given up; the whole text is in the cache then.
        """
        place, line = self.lines.get(state.key, (0, None))
        fresh = 0 if line is None else len(state.follower.tokens) - line.length
        if line is None or fresh < 1:
            return None
        state.settle(pool)
        if state.computed != line.length + min(fresh - 1, line.num_guesses):
            return None
        state.computed = len(state.follower.tokens)
        return place


def may_trail(state: DraftState, row: TrailRow) -> bool:
    """Whether a session's next draft can be made behind the step that verifies `row`."""
    line, tokens = state.ahead.line, state.follower.tokens
    return (
        bool(tokens)
        and state.computed == len(tokens)
        and state.mask is None
        and not state.samples
        and state.ahead.candidates is None
        and len(row.draft) <= len(line) + 1
        and list(row.draft[: len(line)]) == line[: len(row.draft)]
    )
