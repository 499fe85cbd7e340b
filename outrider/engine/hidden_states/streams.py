"""Sends hidden states to the proposers that asked for them, in order of position.

What is sent of a session are the rows of positions that are computed and committed, from 0 on. A
prompt whose pages were found in the prefix cache is therefore sent like any other, in parts: after
each step as much as the proposer has room for.
"""

from __future__ import annotations

import logging
import time
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, replace
from itertools import accumulate
from operator import itemgetter

import torch
from torch import Tensor

from outrider.engine.kv_cache.hidden_states import HiddenStatePool
from outrider.engine.sequence import Sequence
from outrider.engine.step import Step
from outrider.features import FeatureBatch, FeatureOrder, FeatureRows, FeatureSpec, FeatureWindow

log = logging.getLogger(__name__)

MAX_ROWS = 1024  # of one session at once, so that no other waits long
MAX_READ_BYTES = 64 * 2**20  # before projections, which may leave a few bytes of a row, per step
MAX_ROUND_ROWS = 64  # what a session has more was not committed by a round
MAX_AHEAD_BYTES = 16 * 2**20  # before projections, of rows that may be rejected, per step


@dataclass(slots=True, eq=False)
class _Stream:
    seq: Sequence
    order: FeatureOrder
    row_bytes: int
    sent: int = 0  # rows

    @property
    def num_due(self) -> int:
        """Rows to send. After a preemption none until the sequence is where it was.

        Of one that wants no draft they stay in the pool, where they cost nothing: a proposer that
        is not asked for drafts would have to hold them.
        """
        if not self.seq.drafting.num_draft_tokens:
            return 0
        return max(0, self.seq.num_computed - self.sent)


@dataclass(frozen=True, slots=True)
class _Part:
    """Rows of one session."""

    stream: _Stream
    start: int
    count: int
    of_prompt: bool = False

    @property
    def window(self) -> FeatureWindow:
        order = self.stream.order
        return order.prompts if self.of_prompt else order.window


@dataclass(frozen=True, slots=True)
class _Copy:
    """Rows of one `FeatureSpec`, on their way from the device."""

    parts: list[tuple[_Part, int]]  # and which row of `rows` is a part's first
    rows: Tensor  # bfloat16 [n, width] on the host
    done: torch.cuda.Event | None


class HiddenStateStreams:
    """Which rows each session's proposer has been sent. Used on the engine's thread."""

    def __init__(self, pool: HiddenStatePool, *, max_ahead_bytes: int = 0) -> None:
        """`max_ahead_bytes` may be read of a step before it is known what of it is accepted.

        0 where a step does nothing before it is waited for.
        """
        self._pool = pool
        self._max_ahead_bytes = max_ahead_bytes
        self._ahead: dict[FeatureSpec, _Copy] = {}  # of the step in flight, or the last one
        self._streams: dict[int, _Stream] = {}  # by session
        self._projections: dict[bytes, Tensor] = {}  # by SHA-256
        self._copies: list[_Copy] = []
        self._seconds = 0.0  # spent on them
        self.due = False
        """There may be rows that could be sent at once, without another step."""

    @property
    def spec(self) -> FeatureSpec:
        """What is captured."""
        return self._pool.spec

    def follow(self, seq: Sequence, order: FeatureOrder | None) -> None:
        """From now on a session's rows are sent, from the first on; None: not any more."""
        self._streams.pop(seq.session_id, None)
        if order is not None:
            self._streams[seq.session_id] = _Stream(seq, order, order.spec.row_bytes)
            self.due = True

    def give_back(self, window: FeatureWindow, size: int) -> None:
        """So many bytes were read."""
        window.on_the_way -= size
        self.due = self.due or window.short
        window.short = False

    def put_projection(self, spec: FeatureSpec, matrix: bytearray) -> None:
        """Keep a matrix on the device. Raises what the device raises if it has no room."""
        tensor = torch.frombuffer(matrix, dtype=torch.bfloat16)
        shape = (spec.projection_dim, spec.captured_width)
        self._projections[spec.projection_sha256] = tensor.view(shape).to(self._pool.rows.device)

    def drop_projection(self, sha256: bytes) -> None:
        """Nobody uses that matrix any more."""
        self._projections.pop(sha256, None)

    def read_ahead(self, step: Step) -> None:
        """Begins to copy the rows that the step in flight writes, accepted or not.

        They are there with its verdict. Only of rounds, which have few; `gather` reads all others.
        """
        self._ahead = {}
        if not self._max_ahead_bytes or not self._streams:
            return
        began, row_bytes = time.perf_counter(), self._pool.spec.row_bytes
        expected: dict[FeatureSpec, list[_Part]] = {}
        for seq, tokens, *_ in step.rows:
            stream = self._streams.get(seq.session_id)
            if stream is None or stream.seq is not seq or not seq.drafting.num_draft_tokens:
                continue
            # What is accepted of a tree moves to its place in the text before this is read.
            count = tokens.start + len(tokens.token_ids) - stream.sent
            if 0 < count <= MAX_ROUND_ROWS:
                part = _Part(stream, stream.sent, count)
                expected.setdefault(stream.order.spec, []).append(part)
        for spec, parts in expected.items():
            if sum([part.count for part in parts]) * row_bytes <= self._max_ahead_bytes:
                try:
                    self._ahead[spec] = self._copy(spec, parts)
                except Exception:  # if it was not for want of memory, `gather` will say so
                    log.debug("rows of a step could not be read ahead", exc_info=True)
        self._seconds += time.perf_counter() - began

    def gather(self, sessions: Mapping[int, Sequence]) -> bool:
        """Begins to copy the rows that are due; whether there were any. `take` comes next.

        `sessions` are those that live. What fails here costs drafts, never a request.
        """
        self.due = False
        ahead, self._ahead = self._ahead, {}
        if not self._streams:
            return False
        began = time.perf_counter()
        for spec, parts in self._choose(sessions).items():
            missing = self._take_ahead(ahead[spec], parts) if spec in ahead else parts
            try:
                if missing:
                    self._copies.append(self._copy(spec, missing))
            except Exception:
                self._give_up(missing)
        self._seconds += time.perf_counter() - began
        return bool(self._copies)

    def take(self) -> FeatureBatch | None:
        """What `gather` began to copy, once it is there."""
        if not self._copies:
            return None
        began = time.perf_counter()
        rows: list[FeatureRows] = []
        copies, self._copies = self._copies, []
        for copy in copies:
            try:
                rows += _on_host(copy)
            except Exception:
                self._give_up([part for part, _ in copy.parts])
        seconds, self._seconds = self._seconds + time.perf_counter() - began, 0.0
        return FeatureBatch(tuple(rows), seconds)

    def _choose(self, sessions: Mapping[int, Sequence]) -> dict[FeatureSpec, list[_Part]]:
        waiting: list[tuple[int, _Stream]] = []
        for session_id, stream in list(self._streams.items()):
            if sessions.get(session_id) is not stream.seq:
                del self._streams[session_id]
            elif due := stream.num_due:
                waiting.append((due, stream))
        waiting.sort(key=itemgetter(0))  # those that go on with their text before prompts
        parts: dict[FeatureSpec, list[_Part]] = {}
        left = max(1, MAX_READ_BYTES // self._pool.spec.row_bytes)
        for due, stream in waiting:
            order, row_bytes = stream.order, stream.row_bytes
            # Prompts have a window of their own: they leave the rows of rounds their room.
            of_prompt = due > MAX_ROUND_ROWS
            window = order.prompts if of_prompt else order.window
            wanted = min(due, window.room(row_bytes))
            window.short = window.short or wanted < due
            count = min(wanted, MAX_ROWS, left)
            left -= count
            self.due = self.due or count < wanted
            if count:
                part = _Part(stream, stream.sent, count, of_prompt)
                parts.setdefault(order.spec, []).append(part)
                window.on_the_way += count * row_bytes
                stream.sent += count
        return parts

    def _take_ahead(self, ahead: _Copy, parts: list[_Part]) -> list[_Part]:
        """Take of `parts` what was read ahead, which begins where they do; the others."""
        read = {part.stream: at for part, at in ahead.parts}
        taken = [(part, read[part.stream]) for part in parts if part.stream in read]
        if taken:
            self._copies.append(replace(ahead, parts=taken))
        return [part for part in parts if part.stream not in read]

    def _give_up(self, parts: Iterable[_Part]) -> None:
        """Nothing more is sent of these sessions: a gap would be of no use."""
        log.exception("features cannot be sent any more to sessions that run")
        for part in parts:
            session_id = part.stream.seq.session_id
            part.window.on_the_way -= part.count * part.stream.row_bytes
            if self._streams.get(session_id) is part.stream:
                del self._streams[session_id]

    @torch.inference_mode()
    def _copy(self, spec: FeatureSpec, parts: list[_Part]) -> _Copy:
        device = self._pool.rows.device
        ends = [*accumulate(part.count for part in parts)]
        placed = [*zip(parts, [0, *ends], strict=False)]
        slots = torch.tensor(
            [slot for part in parts for slot in self._slots(part)],
            dtype=torch.int64,
            pin_memory=device.type == "cuda",  # else a step in flight could be waited for
        )
        projection = self._projections[spec.projection_sha256] if spec.projection_dim else None
        rows = self._pool.read(slots.to(device, non_blocking=True), spec, projection)
        if device.type != "cuda":
            return _Copy(placed, rows, None)
        on_host = torch.empty(rows.shape, dtype=rows.dtype, pin_memory=True)
        on_host.copy_(rows, non_blocking=True)
        done = torch.cuda.Event()  # type: ignore[no-untyped-call]
        done.record()
        return _Copy(placed, on_host, done)

    def _slots(self, part: _Part) -> list[int]:
        size, table = self._pool.page_size, part.stream.seq.block_table
        # Most are a few rows, for which NumPy takes longer.
        positions = range(part.start, part.start + part.count)
        return [table[p // size] * size + p % size for p in positions]


def _on_host(copy: _Copy) -> list[FeatureRows]:
    """Wait for a copy."""
    if copy.done is not None:
        copy.done.synchronize()
    data = copy.rows.view(torch.uint8).flatten().numpy().data  # it keeps the copy alive
    rows: list[FeatureRows] = []
    for part, at in copy.parts:
        stream, size = part.stream, part.stream.row_bytes
        its_rows = data[at * size : (at + part.count) * size]
        session_id = stream.seq.session_id
        rows.append(FeatureRows(session_id, stream.order, part.start, its_rows, part.of_prompt))
    return rows
