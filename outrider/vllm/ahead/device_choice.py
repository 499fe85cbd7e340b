"""Draft tokens that the device chooses for a step, before the host has read the last one."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from enum import IntEnum
from itertools import islice
from typing import Any, NamedTuple

import torch
from torch import Tensor

from outrider.engine.transfers import Fetch, begin_fetch
from outrider.vllm.ahead.branch_table import BranchTable
from outrider.vllm.ahead.draft_side import DraftSide, Known
from outrider.vllm.ahead.placed_drafts import PlacedDrafts

NONE = -1
"""In place of a draft token that a row lacks; equals no token."""


class Chooser(IntEnum):
    """Names who chooses the draft tokens of a step."""

    HOST = 0  # once it has read what the step before emits
    LOOP = 1  # of a proposer in the worker, which the device runs behind the step before
    BRANCHES = 2  # the device, by what the step before emits
    NOBODY = 3  # no row has room for any


class LaunchedStep(NamedTuple):
    """A step whose tokens the device has chosen, or will choose."""

    names: list[str]  # by row
    token_ids: Tensor  # [rows, 1 or 1 + K], on the host once `copied` has happened
    copied: Any  # the event
    within_prompt: frozenset[int]  # rows that emit nothing
    outcomes: Tensor  # of the rows, on the device


class DeviceChoice:
    """Finds who chooses, step by step, and follows what the device chooses.

    With tensor parallelism rank 0 decides, and all ranks verify what its device chooses.
    """

    def __init__(
        self, side: DraftSide, max_num_seqs: int, num_draft_tokens: int, device: torch.device
    ) -> None:
        """Hold the draft tokens of at most so many rows."""
        self._side, self._device = side, device
        self._table = BranchTable(max_num_seqs, num_draft_tokens, device)
        self._rooms: Mapping[str, int] = {}  # for draft tokens, by row of the step
        self._is_known: Known = lambda: True  # how the last step ended
        self._draft_lengths: Sequence[int] = ()  # of the rows, if nothing on the host reads drafts
        self._fetch: Fetch | None = None  # returns all draft tokens, if the host reads them
        self.chooser = Chooser.HOST

    def leave_to_host(self) -> None:
        """Let the host choose the drafts of a step."""
        self.chooser = Chooser.HOST

    def launch(
        self, rooms: Mapping[str, int], last: LaunchedStep, *, host_reads: bool
    ) -> Tensor | None:
        """Have the device choose once the `last` step has ended, if it can.

        `rooms` are the rows of the step, each with its room for draft tokens. With `host_reads`,
        penalties or grammars read draft tokens on the host before tokens are chosen. Returns int32
        [sum of `rooms`], -1 for each that a row lacks; None if the device does not choose.
        """
        self._rooms, self._is_known = rooms, last.copied.query
        if not any(rooms.values()):
            self.chooser = Chooser.NOBODY
            self._draft_lengths, self._fetch = [0] * len(rooms), None
            self._side.begin_prompts(rooms)
            return None
        chooser, drafts = self._find(last)
        self.chooser = Chooser(self._side.agreed(chooser))
        if self.chooser is Chooser.HOST:
            return None
        if self.chooser is Chooser.LOOP:
            self._side.begin_prompts(rooms)
        if drafts is None:  # memory for those of rank 0, which alone counts them
            tokens = torch.empty(sum(rooms.values()), dtype=torch.int32, device=self._device)
            drafts = PlacedDrafts(tokens, [0] * len(rooms))
        self._side.share(drafts.tokens)
        self._draft_lengths, self._fetch = drafts.lengths or (), None
        if host_reads or drafts.lengths is None:
            self._fetch = begin_fetch(drafts.tokens)
        return drafts.tokens

    def _find(self, last: LaunchedStep) -> tuple[Chooser, PlacedDrafts | None]:
        """Return who chooses on this rank, and the drafts if it is the device."""
        rooms = self._rooms
        if (made := self._side.drafts_behind(rooms)) is not None:
            return Chooser.LOOP, made
        if self._is_known():
            return Chooser.HOST, None
        self._table.clear(len(rooms))
        places = {name: row for row, (name, room) in enumerate(rooms.items()) if room}
        if not self._side.write_branches(places, self._table):
            return Chooser.HOST, None
        rows = {name: row for row, name in enumerate(last.names)}
        # Of what did not run there is no branch.
        sources = [rows.get(name, 0) for name in rooms]
        chosen = self._table.choose(last.outcomes, sources, [*rooms.values()])
        return Chooser.BRANCHES, PlacedDrafts(chosen)

    def settle(self) -> bool:
        """Wait for branches that are worth it; return whether the host need not choose.

        All ranks call it.
        """
        if self.chooser is Chooser.BRANCHES:
            come = self._side.await_branches(self._table, self._is_known)
            if not self._side.agreed(come):
                self.chooser = Chooser.HOST
        return self.chooser is not Chooser.HOST

    def add_branches(self) -> None:
        """Write the branches that come until the device chooses, once the step is launched."""
        if self.chooser is Chooser.BRANCHES:
            self._side.add_branches(self._table, self._is_known)

    def take(self) -> list[list[int]]:
        """Return the rows' drafts, `NONE` for each token that lacks, and note their lengths.

        All are empty if nothing on the host reads them.
        """
        rooms, lengths = self._rooms.values(), self._draft_lengths
        drafts: list[list[int]] = [[] for _ in rooms]
        if self._fetch is not None:
            tokens = iter(self._fetch().tolist())
            drafts = [[*islice(tokens, room)] for room in rooms]
            lengths = [len(draft) - draft.count(NONE) for draft in drafts]
        self._side.chosen(dict(zip(self._rooms, lengths, strict=True)))
        return drafts
