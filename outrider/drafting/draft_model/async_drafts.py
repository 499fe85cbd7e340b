"""Drafts behind a verification on the same device, enqueued before anybody knows its verdict.

A draft goes on from what the target chose. Where both models are on one stream the device has that
the moment the verification ends; the host has it later, and takes as long again to say so. So the
draft loop is enqueued behind the step, and reads from the step's own output where each text ends
and with which tokens (`ChainInputs.follow`). While it runs the host does what the verdict asks for.

It is a bet that the text goes on. Where it has ended or the session is gone the draft is dropped,
where the host has told nothing new it is made anew. Nothing has to be undone: a loop writes behind
what was committed when it began, on pages that were the session's then, and whoever is given these
pages writes to them later on the stream.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import NamedTuple, Protocol, runtime_checkable

from torch import Tensor

from outrider.draft_port import DeviceDrafts
from outrider.draft_tree import DraftTree
from outrider.drafting.draft_model.session import DraftState
from outrider.drafting.proposer import SessionKey
from outrider.engine.graphs.staging import picked
from outrider.engine.kv_cache.block_pool import BlockPool
from outrider.params import SamplingParams


class AsyncRow(NamedTuple):
    """A row of the step in flight, in which a session's text is verified."""

    session: SessionKey
    place: int  # in the verdicts
    num_verified: int  # of the draft that was made for it last
    wanted: int  # draft tokens after it, at least 1


@runtime_checkable
class AsyncProposer(Protocol):
    """A method that drafts behind a step."""

    def launch_after_verify(self, rows: Sequence[AsyncRow], verify_output: Tensor) -> None:
        """Enqueues drafts for what the step's rows will say, if it can for most of them.

        `verify_output` as `Verdicts.tokens` says it. The next `draft` hands them out.
        """
        ...

    def can_launch_after_verify(self, sessions: Sequence[SessionKey]) -> DeviceDrafts | None:
        """Where the device will have what the next `draft` says of `sessions`, to which what was
        committed has been told; None: not of all of them.
        """
        ...


class AsyncLine(NamedTuple):
    """What the cache holds of a session when its draft is enqueued."""

    length: int  # of its text, all in the cache
    num_guesses: int  # after the text
    block_table: Sequence[int]  # covers two tokens more than the guesses, and the draft's


class AsyncLoop(NamedTuple):
    """Chains on their way."""

    tokens: Tensor  # int32 [at least lines, num_tokens]: on the device, for work enqueued behind
    wait: Callable[[], list[list[int]]]  # on the host; once


@runtime_checkable
class AsyncDrafter(Protocol):
    """Drafts chains behind a step."""

    def launch_after_verify(
        self,
        lines: Sequence[AsyncLine],
        sampling: Sequence[SamplingParams],
        num_tokens: int,
        verify_output: Tensor,
    ) -> AsyncLoop | None:
        """Enqueues drafts of `num_tokens` each, by the lines' own `verify_output`. None: it cannot.

        Of each line's guesses the verified ones are as many as there are, or one more. It must be
        waited for before anything else is asked of the drafter.
        """
        ...


@dataclass(frozen=True, slots=True)
class _AsyncDraft:
    """Drafts on their way."""

    drafted: AsyncLoop
    lines: dict[SessionKey, tuple[int, AsyncLine]]  # with the place of each

    def place(self, state: DraftState) -> int | None:
        """Of a session's draft, if one is wanted and goes on from what was committed since."""
        place, line = self.lines.get(state.key, (0, None))
        length = len(state.follower.tokens)
        if line is None or length <= line.length or not state.follower.wanted:
            return None
        kept = min(length - 1 - line.length, line.num_guesses)
        known = min(state.computed, length - 1)
        return place if known == line.length + kept else None


class AsyncDrafts:
    """The drafts that one method has behind the step in flight, over the pages of `pool`."""

    def __init__(self, drafter: AsyncDrafter, pool: BlockPool) -> None:
        self._drafter = drafter
        self._pool = pool
        self._trail: _AsyncDraft | None = None

    @property
    def launched(self) -> bool:
        """Whether some are on their way, or there and not taken."""
        return self._trail is not None

    def launch(
        self, trailing: Sequence[tuple[DraftState, AsyncRow]], verify_output: Tensor, page_size: int
    ) -> None:
        """Enqueue drafts of sessions, if pages and a loop are free."""
        assert self._trail is None, "they are taken first"
        lines = [
            AsyncLine(len(s.follower.tokens), len(s.ahead.line), s.block_table) for s, _ in trailing
        ]
        num_tokens = max([row.wanted for _, row in trailing])
        for line, (state, _) in zip(lines, trailing, strict=True):
            num_rows = line.length + line.num_guesses + 2 + num_tokens - 1
            if not state.cover(self._pool, num_rows, page_size):
                return
        sampling = [state.follower.sampling for state, _ in trailing]
        theirs = picked(verify_output, [row.place for _, row in trailing])
        drafted = self._drafter.launch_after_verify(lines, sampling, num_tokens, theirs)
        if drafted is not None:
            keys = [state.key for state, _ in trailing]
            self._trail = _AsyncDraft(drafted, dict(zip(keys, enumerate(lines), strict=True)))

    def late(self, states: Sequence[DraftState]) -> DeviceDrafts | None:
        """Where the device will have what `take` gives to all of `states`; None: not to all."""
        trail = self._trail
        if trail is None:
            return None
        places = {state.key: trail.place(state) for state in states}
        found = {key: place for key, place in places.items() if place is not None}
        if len(found) < len(states):
            return None
        most = trail.drafted.tokens.shape[1]
        lengths = {state.key: min(most, state.follower.wanted) for state in states}
        return DeviceDrafts(trail.drafted.tokens, found, lengths)

    def take(self, states: Sequence[DraftState]) -> dict[DraftState, DraftTree]:
        """Wait for the drafts, and hands out those of `states`, of which the cache has them."""
        trail, self._trail = self._trail, None
        if trail is None:
            return {}
        chains = trail.drafted.wait()
        drafts: dict[DraftState, DraftTree] = {}
        for state in states:
            place = trail.place(state)
            if place is not None:
                chain = chains[place][: state.follower.wanted]
                state.settle(self._pool)
                state.computed = length = len(state.follower.tokens)
                state.ahead.line, state.patient = chain[:-1], False
                drafts[state] = state.push(DraftTree.chain(length, chain))
        return drafts


def may_launch_after_verify(state: DraftState, row: AsyncRow) -> bool:
    """Whether a session's next draft can be made behind the step that verifies `row`."""
    tokens = state.follower.tokens
    return (
        bool(tokens)
        and state.computed == len(tokens)
        and state.mask is None
        and not state.samples
        and state.ahead.candidates is None
        and row.num_verified <= len(state.ahead.line) + 1
    )
