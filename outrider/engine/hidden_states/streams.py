"""Sends hidden states to the proposers that asked for them, in order of position.

The rows of a session are those of computed and committed positions, from 0 on, whether or not its
prompt was found in the prefix cache. After each step as much is sent as the proposer has room for.
"""

from __future__ import annotations

import logging
import time
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from itertools import accumulate, repeat
from operator import itemgetter
from typing import NamedTuple

import torch
from torch import Tensor

from outrider.draft_port import StepStates
from outrider.engine.hidden_states.paged_row import PagedRow
from outrider.engine.kv_cache.hidden_states import HiddenStatePool
from outrider.engine.step import RowSlots
from outrider.engine.transfers import index_on
from outrider.features import FeatureBatch, FeatureOrder, FeatureRows, FeatureSpec, FeatureWindow

log = logging.getLogger(__name__)

MAX_ROWS = 1024  # of one session at once
MAX_READ_BYTES = 64 * 2**20  # per step, before projections
MAX_ROUND_ROWS = 64  # more rows of a session are those of a prompt
MAX_AHEAD_BYTES = 32 * 2**20  # per step, before projections, of rows that may be rejected


@dataclass(slots=True, eq=False)
class _Stream:
    seq: PagedRow
    order: FeatureOrder
    row_bytes: int
    passed: int = 0  # rows that were sent, or that a loop has read on the device


class _Part(NamedTuple):  # made in a third of a frozen dataclass's time
    """Rows of one session."""

    stream: _Stream
    start: int
    num_rows: int
    of_prompt: bool = False

    @property
    def window(self) -> FeatureWindow:
        order = self.stream.order
        return order.prompts if self.of_prompt else order.window


@dataclass(slots=True)
class _Copy:
    """Rows of one `FeatureSpec`, which may be on their way from the device."""

    parts: Sequence[_Part]
    places: Sequence[int]  # of each one's first row in `rows`
    on_device: Tensor  # bfloat16 [n, width]
    rows: Tensor | None = None  # the same on the host
    done: torch.cuda.Event | None = None

    @torch.inference_mode()
    def begin(self) -> None:
        """Enqueue the copy to the host, unless that was done."""
        rows = self.on_device
        if self.rows is not None:
            return
        if rows.device.type != "cuda":
            self.rows = rows
            return
        on_host = torch.empty(rows.shape, dtype=rows.dtype, pin_memory=True)
        on_host.copy_(rows, non_blocking=True)
        self.done = torch.cuda.Event()  # type: ignore[no-untyped-call]
        self.done.record()
        self.rows = on_host


class HiddenStateStreams:
    """Keeps the rows that each session's proposer was sent. Used on the engine's thread."""

    def __init__(self, pool: HiddenStatePool, *, max_ahead_bytes: int = 0) -> None:
        """Read up to `max_ahead_bytes` of a step before its result; 0 where steps run lazily."""
        self._pool = pool
        self._max_ahead_bytes = max_ahead_bytes
        self._ahead: dict[FeatureSpec, _Copy] = {}  # of the step in flight, or the last one
        self._read: set[_Stream] = set()  # whose rows of that step need not be sent
        self._streams: dict[int, _Stream] = {}  # by session
        self._projections: dict[bytes, Tensor] = {}  # by SHA-256
        self._copies: list[_Copy] = []
        self._on_host: list[FeatureRows] | None = None  # that `take` gets; None: nothing came
        self._colocated: list[FeatureRows] = []  # that `take_colocated` gets
        self._seconds = 0.0  # spent on them
        self.due = False
        """Rows may be due that need no further step."""

    @property
    def spec(self) -> FeatureSpec:
        """Return the spec of the captured states."""
        return self._pool.spec

    @property
    def any(self) -> bool:
        """Tell whether rows of any session are sent."""
        return bool(self._streams)

    def follow(self, seq: PagedRow, order: FeatureOrder | None) -> None:
        """Send a session's rows from the first on; None: no longer."""
        self._streams.pop(seq.session_id, None)
        if order is not None:
            self._streams[seq.session_id] = _Stream(seq, order, order.spec.row_bytes)
            self.due = True

    def give_back(self, window: FeatureWindow, size: int) -> None:
        """Return `size` bytes to a window, whose rows were read."""
        window.on_the_way -= size
        self.due = self.due or window.short
        window.short = False

    def put_projection(self, spec: FeatureSpec, matrix: bytearray) -> None:
        """Keep a matrix on the device. May raise what the device raises."""
        tensor = torch.frombuffer(matrix, dtype=torch.bfloat16)
        shape = (spec.projection_dim, spec.captured_width)
        self._projections[spec.projection_sha256] = tensor.view(shape).to(self._pool.rows.device)

    def drop_projection(self, sha256: bytes) -> None:
        """Forget a matrix that nobody uses."""
        self._projections.pop(sha256, None)

    def read_ahead(
        self, step: Iterable[tuple[PagedRow, int, int]], slots: RowSlots | None = None
    ) -> None:
        """Begin to copy the rows that the step in flight writes, accepted or not.

        `step` has its rows, each with its first position there and how many tokens it has. Their
        `slots` spare most steps a list of their own. Only rows of rounds are copied, which are few;
        `gather` copies all others. It also copies those of a proposer on this thread, unless
        `were_read` says that a loop has read them.
        """
        self._ahead, self._read = {}, set()
        if not self._max_ahead_bytes or not self._streams:
            return
        began, row_bytes = time.perf_counter(), self._pool.spec.row_bytes
        expected: dict[FeatureSpec, list[tuple[_Part, int]]] = {}  # and their places in `slots`
        streams, places = self._streams, repeat(0) if slots is None else slots.firsts
        for (seq, start, num_tokens), first in zip(step, places, strict=False):
            stream = streams.get(seq.session_id)
            if stream is None or stream.seq is not seq or not seq.drafting.num_draft_tokens:
                continue
            # The accepted nodes of a tree move to their place before this is read.
            passed = stream.passed
            count = start + num_tokens - passed
            if 0 < count <= MAX_ROUND_ROWS:
                if passed != start:  # it is read from another slot on
                    slots = None
                placed = _Part(stream, passed, count), first
                expected.setdefault(stream.order.spec, []).append(placed)
        for spec, pairs in expected.items():
            parts, firsts = zip(*pairs, strict=True)
            num_rows, at = sum([part.num_rows for part in parts]), None
            if num_rows * row_bytes <= self._max_ahead_bytes:
                stay = all(part.stream.seq.drafting.proposer.colocated for part in parts)
                # Of other rows no more is read than of these, and copied only if no loop reads all.
                if stay and slots is not None and len(slots.slots) <= 2 * num_rows:
                    at = RowSlots(slots.slots, firsts)
                try:
                    self._ahead[spec] = copy = self._copy(spec, parts, at or self._slots(parts))
                    if not stay:
                        copy.begin()
                except Exception:  # `gather` reports what lasts
                    log.debug("rows of a step could not be read ahead", exc_info=True)
        self._seconds += time.perf_counter() - began

    def on_device(self, spec: FeatureSpec) -> StepStates | None:
        """Return what `read_ahead` reads of some spec; None if it reads none."""
        if (copy := self._ahead.get(spec)) is None:
            return None
        streams, starts, counts, _ = zip(*copy.parts, strict=True)
        return StepStates(
            [stream.seq.session_id for stream in streams],
            [stream.order.epoch for stream in streams],
            starts,
            counts,
            copy.places,
            copy.on_device,
        )

    def were_read(self, states: StepStates, numbers: Sequence[int]) -> None:
        """Count these `on_device` states as sent.

        Those of a session that asks for no draft when the step ends stay due.
        """
        sessions = map(states.sessions.__getitem__, numbers)
        self._read |= {stream for each in sessions if (stream := self._streams.get(each))}

    def gather(self, sessions: Mapping[int, PagedRow]) -> None:
        """Begin to copy the rows that are due of living `sessions`; `take` comes next.

        A fault here costs drafts, never a request.
        """
        self.due = False
        ahead, self._ahead = self._ahead, {}
        if not self._streams:
            return
        began = time.perf_counter()
        for spec, parts in self._choose(sessions).items():
            missing = self._take_ahead(ahead[spec], parts) if spec in ahead else parts
            if missing:
                self._begin_copy(spec, missing)
        self._seconds += time.perf_counter() - began

    def begin_prompts(self, seqs: Iterable[PagedRow]) -> None:
        """Begin to copy what the step in flight computes of prompts, whatever it emits."""
        began, streams = time.perf_counter(), self._streams
        due = [
            (seq.num_computed - stream.passed, stream)
            for seq in seqs
            if (stream := streams.get(seq.session_id)) is not None and stream.seq is seq
        ]
        asking = [(n, each) for n, each in due if n > 0 and each.seq.drafting.num_draft_tokens]
        for spec, parts in self._divide(asking).items():
            self._begin_copy(spec, parts)
        self._seconds += time.perf_counter() - began

    def _begin_copy(self, spec: FeatureSpec, parts: list[_Part]) -> None:
        try:
            copy = self._copy(spec, parts, self._slots(parts))
            copy.begin()
            self._copies.append(copy)
        except Exception:
            self._give_up(parts)

    @property
    def copied(self) -> bool:
        """Tell whether `take` has something."""
        return bool(self._copies) or self._on_host is not None

    def take(self) -> FeatureBatch | None:
        """Wait for what `gather` began to copy, and return it; None if there was nothing."""
        self._finish_copies()
        rows, self._on_host = self._on_host, None
        if rows is None:
            return None
        seconds, self._seconds = self._seconds, 0.0
        return FeatureBatch(tuple(rows), seconds)

    def take_colocated(self) -> list[FeatureRows]:
        """Wait as `take`, and return the rows of proposers on this thread, which it leaves."""
        self._finish_copies()
        rows, self._colocated = self._colocated, []
        return rows

    def _finish_copies(self) -> None:
        if not self._copies:
            return
        began = time.perf_counter()
        copies, self._copies = self._copies, []
        rows = self._on_host = self._on_host or []
        for copy in copies:
            try:
                for stream, each in _on_host(copy):
                    colocated = stream.seq.drafting.proposer.colocated
                    (self._colocated if colocated else rows).append(each)
            except Exception:
                self._give_up(copy.parts)
        self._seconds += time.perf_counter() - began

    def _choose(self, sessions: Mapping[int, PagedRow]) -> dict[FeatureSpec, list[_Part]]:
        waiting: list[tuple[int, _Stream]] = []
        read, self._read = self._read, set()
        for session_id, stream in list(self._streams.items()):
            seq = stream.seq
            if sessions.get(session_id) is not seq:
                del self._streams[session_id]
            elif not seq.drafting.num_draft_tokens:
                continue  # its rows stay in the pool, where they cost nothing
            elif (due := seq.num_computed - stream.passed) > 0:
                if stream in read:
                    stream.passed += due
                else:
                    waiting.append((due, stream))
        if read:
            self._on_host = self._on_host or []  # `take` tells the time it took
        return self._divide(waiting)

    def _divide(self, waiting: list[tuple[int, _Stream]]) -> dict[FeatureSpec, list[_Part]]:
        """Return what is read now of streams, each with how many of its rows are due."""
        waiting.sort(key=itemgetter(0))  # rounds before prompts
        parts: dict[FeatureSpec, list[_Part]] = {}
        left = max(1, MAX_READ_BYTES // self._pool.spec.row_bytes)
        for due, stream in waiting:
            order, row_bytes = stream.order, stream.row_bytes
            of_prompt = due > MAX_ROUND_ROWS
            window = order.prompts if of_prompt else order.window
            wanted = min(due, window.room(row_bytes))
            window.short = window.short or wanted < due
            count = min(wanted, MAX_ROWS, left)
            left -= count
            self.due = self.due or count < wanted
            if count:
                part = _Part(stream, stream.passed, count, of_prompt)
                parts.setdefault(order.spec, []).append(part)
                window.on_the_way += count * row_bytes
                stream.passed += count
        return parts

    def _take_ahead(self, ahead: _Copy, parts: list[_Part]) -> list[_Part]:
        """Take the parts that were read ahead, and return the others."""
        streams = [part.stream for part in ahead.parts]
        read = dict(zip(streams, ahead.places, strict=True))
        taken = [part for part in parts if part.stream in read]
        if taken:
            try:
                ahead.begin()
            except Exception:  # `gather` reports what lasts
                return parts
            places = [read[part.stream] for part in taken]
            self._copies.append(replace(ahead, parts=taken, places=places))
        return [part for part in parts if part.stream not in read]

    def _give_up(self, parts: Iterable[_Part]) -> None:
        """Send nothing more of these sessions, since a gap would be of no use."""
        log.exception("features cannot be sent any more to sessions that run")
        for part in parts:
            session_id = part.stream.seq.session_id
            part.window.on_the_way -= part.num_rows * part.stream.row_bytes
            if self._streams.get(session_id) is part.stream:
                del self._streams[session_id]

    @torch.inference_mode()
    def _copy(self, spec: FeatureSpec, parts: Sequence[_Part], at: RowSlots) -> _Copy:
        projection = self._projections[spec.projection_sha256] if spec.projection_dim else None
        return _Copy(parts, at.firsts, self._pool.read(at.slots, spec, projection))

    def _slots(self, parts: Sequence[_Part]) -> RowSlots:
        size, device, slots = self._pool.page_size, self._pool.rows.device, list[int]()
        for stream, start, num_rows, _ in parts:
            table = stream.seq.block_table
            slots += [table[p // size] * size + p % size for p in range(start, start + num_rows)]
        firsts = [*accumulate([part.num_rows for part in parts], initial=0)]
        return RowSlots(index_on(device, slots), firsts[:-1])


def _on_host(copy: _Copy) -> Iterator[tuple[_Stream, FeatureRows]]:
    """Wait for a copy, and yield its rows."""
    if copy.done is not None:
        copy.done.synchronize()
    assert copy.rows is not None
    data = copy.rows.view(torch.uint8).flatten().numpy().data  # it keeps the copy alive
    for part, at in zip(copy.parts, copy.places, strict=True):
        stream, size = part.stream, part.stream.row_bytes
        its_rows = data[at * size : (at + part.num_rows) * size]
        session_id = stream.seq.session_id
        yield stream, FeatureRows(session_id, stream.order, part.start, its_rows, part.of_prompt)
