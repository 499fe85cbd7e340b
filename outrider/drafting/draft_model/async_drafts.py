"""Async drafts: loops enqueued behind a verification step on the same device.

A draft goes on from what the target chose. Where both models are on one stream the device knows
that when the verification ends, and the host knows it later. So the draft loop is enqueued behind
the step, and reads from the step's output where each text ends and with which tokens
(`LoopInputs.follow`). Meanwhile the host processes the output.

An async draft is a bet that the text goes on. Where it has ended or the session is gone the draft
is dropped; where the text went on otherwise it is made anew. Nothing has to be undone: a loop
writes behind what was committed when it began, on pages that were the session's then, and later
owners of these pages write to them later on the stream.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import NamedTuple, Protocol, runtime_checkable

from torch import Tensor

from outrider.draft_port import DeviceDrafts
from outrider.draft_tree import DraftTree
from outrider.drafting.draft_model.session import DraftState
from outrider.drafting.drafters import AsyncDrafter, AsyncLine, AsyncLoop
from outrider.drafting.proposer import SessionKey
from outrider.engine.graphs.staging import select_rows
from outrider.engine.kv_cache.block_pool import BlockPool


class AsyncRow(NamedTuple):
    """A row of the step in flight, in which a session's text is verified."""

    session: SessionKey
    place: int  # in the step's output
    num_verified: int  # tokens of the session's latest draft
    wanted: int  # draft tokens after it, at least 1


@runtime_checkable
class AsyncProposer(Protocol):
    """A method that drafts behind a step."""

    def launch_after_verify(self, rows: Sequence[AsyncRow], verify_output: Tensor) -> None:
        """Enqueue drafts that go on from the step's output, if most of the rows can have one.

        `verify_output` is `VerifyOutput.tokens`. The next `draft` hands the drafts out.
        """

    def can_launch_after_verify(self, sessions: Sequence[SessionKey]) -> DeviceDrafts | None:
        """Return the place on the device of the drafts that the next `draft` returns.

        The commits of `sessions` have been made. None unless all of them have such a draft.
        """


@dataclass(frozen=True, slots=True)
class _Launched:
    """A loop in progress."""

    loop: AsyncLoop
    lines: dict[SessionKey, tuple[int, AsyncLine]]  # with the place of each

    def place(self, state: DraftState) -> int | None:
        """Return the place of a session's draft, if it is wanted and fits the commits since."""
        place, line = self.lines.get(state.key, (0, None))
        length = len(state.follower.tokens)
        if line is None or length <= line.length or not state.follower.wanted:
            return None
        kept = min(length - 1 - line.length, line.num_guesses)
        known = min(state.computed, length - 1)
        return place if known == line.length + kept else None


class AsyncDrafts:
    """A method's drafts behind the step in flight, over the pages of `pool`."""

    def __init__(self, drafter: AsyncDrafter, pool: BlockPool, page_size: int) -> None:
        self._drafter = drafter
        self._pool = pool
        self._page_size = page_size
        self._launched: _Launched | None = None

    @property
    def in_flight(self) -> bool:
        """Whether a loop was launched and not taken."""
        return self._launched is not None

    def launch(self, pairs: Sequence[tuple[DraftState, AsyncRow]], verify_output: Tensor) -> None:
        """Enqueue drafts of sessions, if pages and a loop are free."""
        assert not self.in_flight, "they are taken first"
        lines = [
            AsyncLine(len(s.follower.tokens), len(s.ahead.line), s.block_table) for s, _ in pairs
        ]
        num_tokens = max([row.wanted for _, row in pairs])
        for line, (state, _) in zip(lines, pairs, strict=True):
            num_rows = line.length + line.num_guesses + 2 + num_tokens - 1
            if not state.cover(self._pool, num_rows, self._page_size):
                return
        sampling = [state.follower.sampling for state, _ in pairs]
        output = select_rows(verify_output, [row.place for _, row in pairs])
        loop = self._drafter.launch_after_verify(lines, sampling, num_tokens, output)
        if loop is not None:
            keys = [state.key for state, _ in pairs]
            self._launched = _Launched(loop, dict(zip(keys, enumerate(lines), strict=True)))

    def on_device(self, states: Sequence[DraftState]) -> DeviceDrafts | None:
        """Return the place on the device of what `take` returns; None unless it has all."""
        launched = self._launched
        if launched is None:
            return None
        places = {state.key: launched.place(state) for state in states}
        found = {key: place for key, place in places.items() if place is not None}
        if len(found) < len(states):
            return None
        most = launched.loop.tokens.shape[1]
        lengths = {state.key: min(most, state.follower.wanted) for state in states}
        return DeviceDrafts(launched.loop.tokens, found, lengths)

    def take(self, states: Sequence[DraftState]) -> dict[DraftState, DraftTree]:
        """Wait for the drafts, if any, and hand out those of `states`, which the cache has."""
        launched, self._launched = self._launched, None
        if launched is None:
            return {}
        chains = launched.loop.wait()
        drafts: dict[DraftState, DraftTree] = {}
        for state in states:
            place = launched.place(state)
            if place is not None:
                chain = chains[place][: state.follower.wanted]
                state.give_up_guesses(self._pool)
                state.computed = length = len(state.follower.tokens)
                state.ahead.line, state.patient = chain[:-1], False
                drafts[state] = state.push(DraftTree.chain(length, chain))
        return drafts


def may_launch_after_verify(state: DraftState, row: AsyncRow) -> bool:
    """Return whether a session's next draft can be made behind the step that verifies `row`."""
    tokens = state.follower.tokens
    return (
        bool(tokens)
        and state.computed == len(tokens)
        and state.mask is None
        and not state.samples
        and state.ahead.candidates is None
        and row.num_verified <= len(state.ahead.line) + 1
    )
