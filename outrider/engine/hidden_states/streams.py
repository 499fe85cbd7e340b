"""Sends hidden states to the proposers that asked for them, in order of position.

The rows of a session are those of computed and committed positions, from 0 on, whether or not its
prompt was found in the prefix cache. After each step as much is sent as the proposer has room for.
"""

from __future__ import annotations

import logging
import time
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from itertools import accumulate, compress
from operator import itemgetter
from typing import NamedTuple

import torch
from torch import Tensor

from outrider.draft_port import StepStates
from outrider.engine.hidden_states.paged_row import PagedRow
from outrider.engine.kv_cache.hidden_states import HiddenStatePool
from outrider.engine.step import Step
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
    sent: int = 0  # rows

    @property
    def num_due(self) -> int:
        """Return the number of rows to send.

        Rows of a sequence that wants no draft stay in the pool, where they cost nothing.
        """
        seq = self.seq
        due = seq.num_computed - self.sent if seq.drafting.num_draft_tokens else 0
        return due if due > 0 else 0


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


class _Parts:
    """Parts by spec, whose hash takes longer than all else; most have that of the one before."""

    def __init__(self) -> None:
        self.by_spec: dict[FeatureSpec, list[_Part]] = {}
        self._last: FeatureSpec | None = None

    def of(self, spec: FeatureSpec) -> list[_Part]:
        if spec is not self._last:
            self._last, self._parts = spec, self.by_spec.setdefault(spec, [])
        return self._parts


@dataclass(frozen=True, slots=True)
class _Copy:
    """Rows of one `FeatureSpec`, on their way from the device."""

    parts: list[_Part]
    places: list[int]  # of each part's first row
    on_device: Tensor  # bfloat16 [n, width]
    rows: Tensor  # the same on the host
    done: torch.cuda.Event | None

    def states(self, numbers: Sequence[int], rows: Tensor) -> StepStates:
        """Return the parts of these numbers, which lie in `rows`."""
        parts = [self.parts[i] for i in numbers]
        streams = [part.stream for part in parts]
        return StepStates(
            [stream.seq.session_id for stream in streams],
            [stream.order.epoch for stream in streams],
            [part.start for part in parts],
            [part.num_rows for part in parts],
            [self.places[i] for i in numbers],
            rows,
        )


class HiddenStateStreams:
    """Keeps the rows that each session's proposer was sent. Used on the engine's thread."""

    def __init__(self, pool: HiddenStatePool, *, max_ahead_bytes: int = 0) -> None:
        """Read up to `max_ahead_bytes` of a step before its result; 0 where steps run lazily."""
        self._pool = pool
        self._max_ahead_bytes = max_ahead_bytes
        self._ahead: dict[FeatureSpec, _Copy] = {}  # of the step in flight, or the last one
        self._streams: dict[int, _Stream] = {}  # by session
        self._projections: dict[bytes, Tensor] = {}  # by SHA-256
        self._copies: list[_Copy] = []
        self._on_host: list[FeatureRows] | None = None  # that `take` gets; None: nothing came
        self._colocated: list[StepStates] = []  # that `take_colocated` gets
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

    def read_ahead(self, step: Step) -> None:
        """Begin to copy the rows that the step in flight writes, accepted or not.

        Only rows of rounds are copied, which are few; `gather` copies all others.
        """
        self._ahead = {}
        if not self._max_ahead_bytes or not self._streams:
            return
        began, row_bytes = time.perf_counter(), self._pool.spec.row_bytes
        expected = _Parts()
        streams = self._streams
        for row in step.rows:
            seq, tokens = row.seq, row.slice
            stream = streams.get(seq.session_id)
            if stream is None or stream.seq is not seq or not seq.drafting.num_draft_tokens:
                continue
            # The accepted nodes of a tree move to their place before this is read.
            count = tokens.start + len(tokens.token_ids) - stream.sent
            if 0 < count <= MAX_ROUND_ROWS:
                expected.of(stream.order.spec).append(_Part(stream, stream.sent, count))
        for spec, parts in expected.by_spec.items():
            if sum([part.num_rows for part in parts]) * row_bytes <= self._max_ahead_bytes:
                try:
                    self._ahead[spec] = self._copy(spec, parts)
                except Exception:  # `gather` reports what lasts
                    log.debug("rows of a step could not be read ahead", exc_info=True)
        self._seconds += time.perf_counter() - began

    def on_device(self, spec: FeatureSpec) -> StepStates | None:
        """Return what `read_ahead` reads of some spec; None if it reads none."""
        copy = self._ahead.get(spec)
        return None if copy is None else copy.states(range(len(copy.parts)), copy.on_device)

    def gather(self, sessions: Mapping[int, PagedRow]) -> None:
        """Begin to copy the rows that are due of living `sessions`; `take` comes next.

        A fault here costs drafts, never a request.
        """
        self.due = False
        ahead, self._ahead = self._ahead, {}
        if not self._streams:
            return
        began = time.perf_counter()
        for spec, parts in self._choose(sessions).by_spec.items():
            missing = self._take_ahead(ahead[spec], parts) if spec in ahead else parts
            try:
                if missing:
                    self._copies.append(self._copy(spec, missing))
            except Exception:
                self._give_up(missing)
        self._seconds += time.perf_counter() - began

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

    def take_colocated(self) -> list[StepStates]:
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
                rows += self._read(copy)
            except Exception:
                self._give_up(copy.parts)
        self._seconds += time.perf_counter() - began

    def _read(self, copy: _Copy) -> list[FeatureRows]:
        """Wait for a copy; return the rows to send, and keep those of proposers on this thread."""
        if copy.done is not None:
            copy.done.synchronize()
        numbers = range(len(copy.parts))
        colocated = [part.stream.seq.drafting.proposer.colocated for part in copy.parts]
        here, others = [*compress(numbers, colocated)], [i for i in numbers if not colocated[i]]
        sent: list[FeatureRows] = []
        if others:
            data = copy.rows.view(torch.uint8).flatten().numpy().data  # it keeps the copy alive
            for i in others:
                stream, start, count, of_prompt = copy.parts[i]
                first, size, session_id = copy.places[i], stream.row_bytes, stream.seq.session_id
                its_rows = data[first * size : (first + count) * size]
                sent.append(FeatureRows(session_id, stream.order, start, its_rows, of_prompt))
        if here:
            self._colocated.append(copy.states(here, copy.rows))
            for part in map(copy.parts.__getitem__, here):  # they are read at once
                self.give_back(part.window, part.num_rows * part.stream.row_bytes)
        return sent

    def _choose(self, sessions: Mapping[int, PagedRow]) -> _Parts:
        gone = [key for key, each in self._streams.items() if sessions.get(key) is not each.seq]
        for session_id in gone:
            del self._streams[session_id]
        waiting = [(due, stream) for stream in self._streams.values() if (due := stream.num_due)]
        waiting.sort(key=itemgetter(0))  # rounds before prompts
        parts = _Parts()
        left = max(1, MAX_READ_BYTES // self._pool.spec.row_bytes)
        for due, stream in waiting:
            order, row_bytes = stream.order, stream.row_bytes
            of_prompt = due > MAX_ROUND_ROWS
            window = order.prompts if of_prompt else order.window
            if (wanted := window.room(row_bytes)) < due:
                window.short = True
            else:
                wanted = due
            count = min(wanted, MAX_ROWS, left)
            left -= count
            self.due = self.due or count < wanted
            if count:
                parts.of(order.spec).append(_Part(stream, stream.sent, count, of_prompt))
                window.on_the_way += count * row_bytes
                stream.sent += count
        return parts

    def _take_ahead(self, ahead: _Copy, parts: list[_Part]) -> list[_Part]:
        """Take the parts that were read ahead, and return the others."""
        read = {part.stream: place for part, place in zip(ahead.parts, ahead.places, strict=True)}
        taken = [part for part in parts if part.stream in read]
        if taken:
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
    def _copy(self, spec: FeatureSpec, parts: list[_Part]) -> _Copy:
        device = self._pool.rows.device
        places = [*accumulate([part.num_rows for part in parts[:-1]], initial=0)]
        slots = torch.tensor(
            self._slots(parts),
            dtype=torch.int64,
            pin_memory=device.type == "cuda",  # else a step in flight could be waited for
        )
        projection = self._projections[spec.projection_sha256] if spec.projection_dim else None
        rows = self._pool.read(slots.to(device, non_blocking=True), spec, projection)
        if device.type != "cuda":
            return _Copy(parts, places, rows, rows, None)
        on_host = torch.empty(rows.shape, dtype=rows.dtype, pin_memory=True)
        on_host.copy_(rows, non_blocking=True)
        done = torch.cuda.Event()  # type: ignore[no-untyped-call]
        done.record()
        return _Copy(parts, places, rows, on_host, done)

    def _slots(self, parts: Iterable[_Part]) -> list[int]:
        size, slots = self._pool.page_size, list[int]()
        for stream, start, num_rows, _ in parts:
            table, (page, offset) = stream.seq.block_table, divmod(start, size)
            end = offset + num_rows
            while end > size:
                slots += range(table[page] * size + offset, (table[page] + 1) * size)
                page, offset, end = page + 1, 0, end - size
            slots += range(table[page] * size + offset, table[page] * size + end)
        return slots
