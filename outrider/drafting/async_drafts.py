"""Async drafts: loops enqueued behind a verification step on the same device.

A draft goes on from what the target chose. Where both models are on one stream the device knows
that when the verification ends, and the host knows it later. So the draft loop is enqueued behind
the step, and reads from the step's output where each text ends and with which tokens
(`LoopInputs.follow`), and from the device the hidden states that go with them. Meanwhile the host
processes the output.

An async draft is a bet that the text goes on. Where it has ended or the session is gone the draft
is dropped; where the text went on otherwise it is made anew. Nothing has to be undone: a loop
writes behind what was committed when it began, on pages that were the session's then, and later
owners of these pages write to them later on the stream.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Generic, NamedTuple, Protocol, TypeVar, runtime_checkable

from torch import Tensor

from outrider.draft_port import DeviceDrafts, StepStates
from outrider.drafting.drafters import AsyncDrafter, AsyncLoop, DraftInput, StatesBehind
from outrider.drafting.proposer import SessionKey
from outrider.drafting.sessions import FollowedSession
from outrider.engine.transfers import select_rows

S = TypeVar("S", bound=FollowedSession)
D = TypeVar("D")


class AsyncRow(NamedTuple):
    """A row of the step in flight, in which a session's text is verified."""

    session: SessionKey
    place: int  # in the step's output
    max_accepted: int  # tokens of the session's latest draft
    wanted: int  # draft tokens after it, at least 1
    is_tree: bool = False  # that draft
    number: int | None = None  # its place in the `StepStates`, for methods that read them


@runtime_checkable
class AsyncProposer(Protocol):
    """A method that drafts behind a step."""

    def launch_after_verify(
        self, rows: Sequence[AsyncRow], verify_output: Tensor, states: StepStates | None = None
    ) -> Sequence[int]:
        """Enqueue drafts that go on from the step's output, if most of the rows can have one.

        `verify_output` is `VerifyOutput.tokens`, and `states` are those that the step writes. The
        next `draft` hands the drafts out. Before the commits of a later step come, either is called
        again. Return the numbers of states that are not to come by `features`: of texts that go on
        and ask for a draft.
        """

    def device_drafts(self, sessions: Sequence[SessionKey]) -> DeviceDrafts | None:
        """Return the place on the device of the drafts that the next `draft` returns.

        The commits of `sessions` have been made. None unless all of them have such a draft, but
        for those that the next `draft` would give none.
        """

    @property
    def launched_drafts(self) -> DeviceDrafts | None:
        """Return the place of the drafts that were launched last, before the commits are made.

        None if there are none, or only the host will have them.
        """


@dataclass(frozen=True, slots=True)
class _Launched(Generic[D]):
    """A loop in progress, and its rows by session, each with its place."""

    loop: AsyncLoop[D]
    rows: dict[SessionKey, tuple[int, DraftInput]]


class AsyncDrafts(Generic[S, D]):
    """A method's drafts behind the step in flight.

    `fits(state, row)` says whether a draft that was launched for `row` continues the session's
    text as it is now.
    """

    def __init__(self, drafter: AsyncDrafter[D], fits: Callable[[S, DraftInput], bool]) -> None:
        self._drafter = drafter
        self._fits = fits
        self._launched: _Launched[D] | None = None
        self._on_device: dict[S, int] | None = None  # what `on_device` found, which `take` returns

    @property
    def in_flight(self) -> bool:
        """Return whether a loop was launched and not taken."""
        return self._launched is not None

    def launch(
        self,
        rows: Sequence[tuple[S, int, DraftInput]],
        num_verified: int,
        verify_output: Tensor,
        behind: StatesBehind | None = None,
    ) -> bool:
        """Enqueue drafts of sessions, each with its place in a step of `num_verified` rows.

        False if there are none.
        """
        self.take(())  # nobody asked for those behind the step before
        # A few would cost nearly as much as all.
        if not 0 < num_verified <= 2 * len(rows):
            return False
        output = select_rows(verify_output, [place for _, place, _ in rows])
        loop = self._drafter.launch_after_verify([row for *_, row in rows], output, behind)
        if loop is not None:
            placed = {state.key: (i, row) for i, (state, _, row) in enumerate(rows)}
            self._launched = _Launched(loop, placed)
        return loop is not None

    @property
    def launched(self) -> DeviceDrafts | None:
        """Implement `AsyncProposer.launched_drafts`."""
        launched = self._launched
        if launched is None or (nodes := launched.loop.nodes) is None:
            return None
        rows, most = launched.rows.items(), nodes.tokens.shape[1]
        places = {key: place for key, (place, _) in rows}
        return DeviceDrafts(nodes, places, {key: min(row.wanted, most) for key, (_, row) in rows})

    def on_device(self, states: Sequence[S], gets_none: Callable[[S], bool]) -> DeviceDrafts | None:
        """Return the place on the device of what `take` returns.

        None unless it has all but those states that get no draft now in any case.
        """
        launched, self._on_device = self._launched, None
        if launched is None or (nodes := launched.loop.nodes) is None:
            return None
        places, most = self._places(launched, states), nodes.tokens.shape[1]
        if len(places) < len(states) and any(
            each.follower.wanted and not gets_none(each) for each in states if each not in places
        ):
            return None
        self._on_device = places
        keys = [state.key for state in places]
        wanted = [state.follower.wanted for state in places]
        lengths = [n if n < most else most for n in wanted]
        by_key = dict(zip(keys, places.values(), strict=True))
        return DeviceDrafts(nodes, by_key, dict(zip(keys, lengths, strict=True))) if keys else None

    def take(self, states: Sequence[S]) -> dict[S, D]:
        """Wait for the drafts, if any, and hand out those of `states`, which the cache has."""
        launched, self._launched = self._launched, None
        found, self._on_device = self._on_device, None
        if launched is None:
            return {}
        wanted = [row.wanted for _, row in launched.rows.values()]
        most = max(wanted)
        if found is None:
            places = self._places(launched, states)
        else:
            places = {state: found[state] for state in states if state in found}
        for state, place in places.items():
            number = state.follower.wanted
            wanted[place] = number if number < most else most
        drafts = launched.loop.wait(wanted)
        return {state: drafts[place] for state, place in places.items()}

    def _places(self, launched: _Launched[D], states: Sequence[S]) -> dict[S, int]:
        """Return the places of drafts that are wanted and fit the commits since."""
        rows, fits = launched.rows, self._fits
        return {
            state: found[0]
            for state in states
            if state.follower.wanted
            and (found := rows.get(state.key)) is not None
            and fits(state, found[1])
        }
