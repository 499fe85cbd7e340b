"""Interfaces of what drafts chains: on demand, ahead of a verification, or behind it."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Final, Generic, NamedTuple, Protocol, TypeVar, runtime_checkable

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from outrider.draft_port import DeviceNodes
from outrider.drafting.confidence import confidences_of
from outrider.engine.batch import RowSlice
from outrider.engine.sampling.constraint import ConstraintEditor
from outrider.params import SamplingParams

CATCH_UP: Final = 2
"""Tokens that a session feeds at most after most rounds. Large batches are fast with no more."""


class DraftInput(NamedTuple):  # made in a third of a frozen dataclass's time
    """A row of a round: tokens to feed, which end the text if a draft is wanted after them."""

    slice: RowSlice
    wanted: int  # draft tokens; 0: none
    sampling: SamplingParams
    mask: ConstraintEditor | None = None  # stands after the committed text; used up
    features: Tensor | None = None  # of the tokens, on the host: bfloat16 [tokens, width]
    text: Sequence[int] = ()  # its latest tokens up to the last one fed, if its tree follows them

    @property
    def end(self) -> int:
        return self.slice.start + len(self.slice.token_ids)

    def split(self) -> tuple[DraftInput, DraftInput]:
        """Return all tokens but the last, without a draft, and the last with the draft."""
        tokens, start, features = self.slice.token_ids, self.slice.start, self.features
        begin = self.slice._replace(token_ids=tokens[:-1])
        last = self.slice._replace(token_ids=tokens[-1:], start=start + len(tokens) - 1)
        if features is None:
            return self._replace(slice=begin, wanted=0), self._replace(slice=last)
        return (
            self._replace(slice=begin, wanted=0, features=features[:-1]),
            self._replace(slice=last, features=features[-1:]),
        )


@dataclass(frozen=True, slots=True)
class FedRows:
    """Rows to feed, and the parameters by which the tokens after each are drawn."""

    slices: Sequence[RowSlice]
    sampling: Sequence[SamplingParams]
    firsts: Sequence[int] | None = None
    """The places of the rows' first hidden states; None: one row's follow the other's."""

    @staticmethod
    def of(rows: Sequence[DraftInput]) -> FedRows:
        return FedRows([row.slice for row in rows], [row.sampling for row in rows])

    def some(self, numbers: Sequence[int]) -> FedRows:
        """Return the rows of these numbers."""
        return FedRows([self.slices[i] for i in numbers], [self.sampling[i] for i in numbers])

    @property
    def cut(self) -> bool:
        """Return whether some row has top_k, top_p or min_p."""
        return any(each.top_k or each.top_p < 1.0 or each.min_p for each in self.sampling)


def features_of(rows: Sequence[DraftInput]) -> list[Tensor]:
    """Return the features of rows that have any."""
    return [row.features for row in rows if row.features is not None]


def features_on(device: torch.device, rows: Sequence[DraftInput]) -> Tensor:
    """Return the features of rows on the device, without waiting for its steps in flight."""
    parts = features_of(rows)
    shape = sum(map(len, parts)), parts[0].shape[1]
    pinned = device.type == "cuda"  # only of such memory a copy is enqueued
    joined = torch.empty(shape, dtype=parts[0].dtype, pin_memory=pinned)
    return torch.cat(parts, out=joined).to(device, non_blocking=True)


class StatesBehind(NamedTuple):
    """Hidden states on the device, for a loop behind the step that writes them."""

    rows: Tensor  # bfloat16 [any, width]
    firsts: Sequence[int]  # the place of each row's first


Chain = tuple[list[int], bytes]
"""Tokens, and their confidences (`outrider.drafting.confidence`) if they are told."""


class ChainDrafter(Protocol):
    """A faster way to draft chains after few tokens, over the model's own cache."""

    @property
    def max_tokens(self) -> int:
        """The most tokens to catch up, of all rows together, for which it is faster."""

    def draft(self, rows: Sequence[DraftInput]) -> list[Chain]:
        """Feed rows and draft a chain for each; most tokens wanted first."""

    def feed(self, slices: Sequence[RowSlice]) -> bool:
        """Feed rows that no draft is wanted for; False if there is no faster way."""


@dataclass(slots=True)  # not frozen, which would take longer to make: sessions have their own
class Forks:
    """Chains of K tokens, and the likeliest tokens by which the texts may leave them.

    `candidates[r, i]` are the F likeliest tokens, best first, after row r's text and the first i
    tokens of its chain: K + 1 places. The best of each of the first K places is the chain itself.
    """

    candidates: NDArray[np.int32]  # [rows, K + 1, F]; of one row, without the first axis
    gaps: NDArray[np.float32]  # the same: distance of a score from its place's best

    def __getitem__(self, part: int | slice | NDArray[np.intp]) -> Forks:
        """Return those of a row or some rows; of one row, those of some places."""
        return Forks(self.candidates[part], self.gaps[part])

    def places(self, start: int, end: int) -> Forks:
        """Return some places of all rows."""
        return Forks(self.candidates[:, start:end], self.gaps[:, start:end])

    @staticmethod
    def joined(parts: Sequence[Forks], axis: int = 0) -> Forks:
        """Return the rows of all parts; of parts of one row, or along axis 1, the places."""
        return Forks(
            np.concatenate([part.candidates for part in parts], axis),
            np.concatenate([part.gaps for part in parts], axis),
        )

    @property
    def chains(self) -> NDArray[np.int32]:
        """The chains of all rows: [rows, K]."""
        return self.candidates[:, :-1, 0]


class ForkedGuess(NamedTuple):
    """Tokens, their confidences, and the candidates [tokens, F] at their places."""

    tokens: list[int]
    confidences: bytes
    forks: Forks


class ForkBatch:
    """Rows that are drafted together, and candidates after their guesses.

    A guess is a row's chain and the best candidate at its end. The candidates after it take one
    forward more, which the device runs while the host uses the forks. `fetch` waits for the forks,
    and `fetch_beyond` for these candidates.
    """

    def __init__(self, fetch: Callable[[], Forks], fetch_beyond: Callable[[], Forks]) -> None:
        self._fetch, self._fetch_beyond = fetch, fetch_beyond

    @staticmethod
    def split(forks: Forks, num_tokens: int) -> ForkBatch:
        """Return a batch of forks that came at once, with as many places more as were drafted."""
        end = num_tokens + 1
        return ForkBatch(lambda: forks.places(0, end), lambda: forks.places(end, end + 1))

    def wait(self) -> None:
        """Wait for the forks, and keep them."""
        _ = self.forks

    @cached_property
    def forks(self) -> Forks:
        """Wait for the forks [rows, K + 1, F]."""
        return self._fetch()

    @cached_property
    def beyond(self) -> Forks:
        """Wait for the candidates [rows, 1, F] after the guesses."""
        return self._fetch_beyond()

    def row(self, row: int) -> ForkedGuess:
        """Return the guess of a row."""
        return _guess(self.forks, *self._told, row)

    def grown(self, row: int) -> ForkedGuess:
        """Return the guess of a row, longer by the best of the candidates after it."""
        return _guess(*self._grown, row)

    def grow(self) -> None:
        """Wait for the candidates after the guesses, and make what `grown` needs."""
        _ = self._grown

    @cached_property
    def confidences(self) -> bytes:
        """The confidences of all guesses, one row's after the other's."""
        return confidences_of(self.forks.gaps[:, :, 1])

    @cached_property
    def _told(self) -> tuple[list[list[int]], bytes]:
        return _tokens(self.forks), self.confidences

    @cached_property
    def _grown(self) -> tuple[Forks, list[list[int]], bytes]:
        forks = Forks.joined((self.forks, self.beyond), 1)
        return forks, _tokens(forks), confidences_of(forks.gaps[:, :, 1])


def _tokens(forks: Forks) -> list[list[int]]:
    tokens: list[list[int]] = forks.candidates[:, :, 0].tolist()
    return tokens


def _guess(forks: Forks, tokens: list[list[int]], confidences: bytes, row: int) -> ForkedGuess:
    size = len(tokens[row])
    return ForkedGuess(tokens[row], confidences[row * size : (row + 1) * size], forks[row])


class ForkDrafter(Protocol):
    """Drafts chains of one length with candidates at each of their places."""

    page_size: int

    def captured_rows(self, num_rows: int) -> int:
        """Return how many rows the model runs for so many, padding included."""

    def forks(
        self,
        rows: FedRows,
        num_tokens: int,
        fanout: int,
        copies: Sequence[tuple[int, int]] = (),
        *,
        beyond: bool = False,
    ) -> ForkBatch:
        """Copy pages (source, target), feed rows, draft `num_tokens` after each.

        With `beyond` the candidates after the guesses are wanted, too. Page tables cover
        `num_tokens` more than the slices, and with `beyond` one more. Sources are read before any
        target is written. Raises what the model raises.
        """


D = TypeVar("D", covariant=True)


@dataclass(frozen=True, slots=True)
class AsyncLoop(Generic[D]):
    """Drafts in progress."""

    nodes: DeviceNodes | None
    """The drafts for work enqueued behind; None: only the host will have them."""
    wait: Callable[[Sequence[int]], list[D]]
    """Returns the drafts on the host, given how many tokens each row wants; to be called once."""


@runtime_checkable
class AsyncDrafter(Protocol[D]):
    """Drafts behind a step."""

    def launch_after_verify(
        self, rows: Sequence[DraftInput], verify_output: Tensor, states: StatesBehind | None = None
    ) -> AsyncLoop[D] | None:
        """Enqueue drafts of rows that `LoopInputs.follow` updates by their own `verify_output`.

        Instead of features they have `states`. None if unable. The loop must be waited for before
        the next call of the drafter.
        """
