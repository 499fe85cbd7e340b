"""Interfaces of what drafts chains: on demand, ahead of a verification, or behind it."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import NamedTuple, Protocol, runtime_checkable

import numpy as np
from numpy.typing import NDArray
from torch import Tensor

from outrider.engine.batch import RowSlice
from outrider.engine.sampling.constraint import ConstraintEditor
from outrider.params import SamplingParams


class ReadyRow(NamedTuple):
    """A row whose catch-up tokens end its committed text of `length` tokens."""

    length: int
    wanted: int  # draft tokens, at least 1
    sampling: SamplingParams
    mask: ConstraintEditor | None = None  # stands after the committed text; used up


class ChainDrafter(Protocol):
    """A faster way to draft chains after few tokens, over the model's own cache."""

    @property
    def max_tokens(self) -> int:
        """The most tokens to catch up, of all rows together, for which it is faster."""
        ...

    def draft(self, slices: Sequence[RowSlice], ready: Sequence[ReadyRow]) -> list[list[int]]:
        """Feed `slices`, then draft a chain for each of as many `ready`."""
        ...

    def feed(self, slices: Sequence[RowSlice]) -> bool:
        """Feed rows that no draft is wanted for; False if there is no faster way."""
        ...


@dataclass(frozen=True, slots=True)
class Forks:
    """Chains of K tokens, and the likeliest tokens by which the texts may leave them.

    `candidates[r, i]` are the F likeliest tokens, best first, after row r's text and the first i
    tokens of its chain: K + 1 places. The best of each of the first K places is the chain itself.
    """

    candidates: NDArray[np.int32]  # [rows, K + 1, F]
    gaps: NDArray[np.float32]  # [rows, K + 1, F]: distance of a score from its place's best

    @property
    def chains(self) -> NDArray[np.int32]:
        """The chains of all rows: [rows, K]."""
        return self.candidates[:, :-1, 0]


class ForkDrafter(Protocol):
    """Drafts chains of one length with candidates at each of their places."""

    @property
    def page_size(self) -> int: ...

    def forks(
        self,
        slices: Sequence[RowSlice],
        sampling: Sequence[SamplingParams],
        num_tokens: int,
        fanout: int,
        copies: Sequence[tuple[int, int]] = (),
    ) -> Forks:
        """Copy pages (source, target), feed `slices`, draft `num_tokens` after each.

        Page tables cover `num_tokens` more than the slices. Sources are read before any target is
        written. Raises what the model raises.
        """
        ...


class AsyncLine(NamedTuple):
    """The part of a session in the cache when its async draft is enqueued."""

    length: int  # of its text, all in the cache
    num_guesses: int  # after the text
    block_table: Sequence[int]  # covers two tokens more than the guesses, and the draft's


class AsyncLoop(NamedTuple):
    """Chains in progress."""

    tokens: Tensor  # int32 [at least lines, num_tokens]: on the device, for work enqueued behind
    wait: Callable[[], list[list[int]]]  # returns them on the host; once


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
        """Enqueue drafts of `num_tokens` each, by the lines' own `verify_output`; None if unable.

        A step verifies as many guesses of a line as there are, or one more. The loop must be waited
        for before the next call of the drafter.
        """
        ...
