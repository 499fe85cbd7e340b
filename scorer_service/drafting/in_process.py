"""A proposer within the scorer's process: its method drafts on the engine's thread, in turns with
the engine's steps.

For one device that target and draft share. Nothing travels, the device changes over between no
processes, and all rows have their drafts when a step begins; but nothing is drafted while a step
runs, and the draft scales with its scorer. To everyone else it is a proposer like any other.
"""

from __future__ import annotations

import contextlib
import logging
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from typing import Final, Protocol, cast

import torch

from outrider.drafting.draft_model.async_drafts import AsyncProposer, AsyncRow
from outrider.drafting.proposer import NO_PACE, FeatureProposer, Proposer, SessionKey, SessionStart
from outrider.engine.engine import Engine
from outrider.engine.step import DeviceDrafts
from outrider.engine.worker import DraftedBetweenSteps
from outrider.features import FeatureRows
from outrider.hello import make_hello
from outrider.params import TokenIds
from outrider.v1 import draft_pb2
from scorer_service.config import ServedModel
from scorer_service.drafting.in_process_flags import naming_flag

POOL: Final = "in-process"
_MAX_FAILURES: Final = 3  # of the method, until it is tried no more
_FORGIVEN: Final = 64  # drafts, after which former failures count no longer
_log = logging.getLogger(__name__)


class DraftListener(Protocol):
    """Whom the engine's thread tells of its drafts; thread-safe, and never waits."""

    def first_draft(self, session_id: int, epoch: int) -> None: ...

    def lost(self, session_id: int, epoch: int) -> None: ...

    def failed(self) -> None:
        """Nothing will be drafted any more."""
        ...


@dataclass(slots=True)
class _Followed:
    """A session as the method knows it."""

    id: int
    epoch: int
    length: int  # committed tokens
    num_rows: int = 0  # whose hidden states were handed over
    drafted: bool = False
    starved: bool = False  # wants a draft, but states that it needs are to come


class InProcessProposer:
    """Implements `outrider.engine.worker.Companion`. All of it happens on the engine's thread."""

    def __init__(self, build: Callable[[], tuple[Proposer, str]], proposer_id: str) -> None:
        self._build = build
        self.id = proposer_id
        self._told: DraftListener | None = None
        self._keys: dict[int, SessionKey] = {}  # by session
        self._followed: dict[SessionKey, _Followed] = {}
        self._last_key = 0
        self._wanting: dict[SessionKey, None] = {}
        self._late = False  # the drafts of the step that was launched are to be posted
        self._turn = 0.0, 0.0  # when the last one began, and ended
        self._failures = 0
        self._good = 0  # drafts since the last failure

    def build(self) -> None:
        """Load the method. Raises `ConfigError` and `UnsupportedModelError`."""
        threads = torch.get_num_threads()
        with naming_flag():
            self._proposer, self._tokenizer_hash = self._build()
        torch.set_num_threads(threads)  # the engine's
        traits = self._proposer.traits
        self._names = traits.methods or (traits.method,)
        spec = traits.features
        self._reader = None if spec is None else cast("FeatureProposer", self._proposer)
        self._row_bytes = 0 if spec is None else spec.row_bytes

    def bring(self, engine: Engine) -> None:
        """Hands the engine the projection that the method asks for."""
        spec = self._proposer.traits.features
        if self._reader is not None and spec is not None and spec.projection_dim:
            assert engine.features is not None, "`states_of` saw to it"
            engine.features.put_projection(spec, bytearray(self._reader.projection))

    def hello(self, served: ServedModel) -> draft_pb2.Hello:
        """What it is, as other proposers say it."""
        return make_hello(
            self._proposer.traits,
            self._tokenizer_hash,
            proposer_id=self.id,
            pool=POOL,
            device=served.device,  # whatever it computes on: steps and drafts take turns
        )

    def tell(self, told: DraftListener) -> None:
        """From now on there may be sessions."""
        self._told = told

    def open(
        self, engine: Engine, session: int, epoch: int, start: SessionStart, num_given: int
    ) -> None:
        """A session begins; `start` without its text, of which the engine knows more by now.

        `num_given` tokens of it came with the request.
        """
        tokens = engine.committed(session)
        if tokens is None or self._told is None:  # it has ended, or all has
            return
        self._last_key = key = self._last_key + 1
        self._keys[session] = key
        self._followed[key] = _Followed(session, epoch, len(tokens))
        written = len(tokens) - num_given
        with self._careful():
            self._proposer.open(key, replace(start, prefix=tokens, num_output_tokens=written))
            self._want(key, start.num_draft_tokens)

    def close(self, session: int) -> None:
        """The session, known or not, is over or drafted for by another."""
        key = self._keys.get(session)
        if key is not None:
            self._forget(key)
            with self._careful():
                self._proposer.close(key)

    @property
    def busy(self) -> bool:
        return bool(self._wanting)

    def draft_between_steps(self, engine: Engine) -> DraftedBetweenSteps:
        began = time.perf_counter()
        self._late = False
        features = None if engine.features is None else engine.features.take()
        mine: list[FeatureRows] = []
        left: list[FeatureRows] = []
        if engine.features is not None and features is not None:
            for rows in features.rows:
                (mine if self._is_mine(rows) else left).append(rows)
            for rows in mine:  # read by nobody else, whatever happens
                engine.features.give_back(rows.window, len(rows.rows))
            features = replace(features, rows=tuple(left))
        with self._careful():
            for rows in mine:
                self._take(rows)
            for seq, base_len, output, *_, finish_reason, _logprobs in engine.emitted:
                key = self._keys.get(seq.session_id)
                if key is not None:
                    self._follow(key, base_len, output, seq.drafting.num_draft_tokens)
                    if finish_reason is not None:
                        self.close(seq.session_id)
            self._late = self._expects(engine)
            if self._wanting and not self._late:
                self._draft(engine, time.perf_counter())
        self._turn = began, time.perf_counter()
        return DraftedBetweenSteps(self._turn[1] - began, features)

    def rest(self, engine: Engine) -> None:
        if self._told is not None:
            with self._careful():
                if self._late:
                    began, ended = self._turn
                    engine.drafted(self._draft(engine, began) - ended)
                self._draft_behind(engine)
                self._proposer.ahead((), NO_PACE)

    @contextlib.contextmanager
    def _careful(self) -> Iterator[None]:
        """A fault of the method, or of the device in it, is no request's: its drafts are lost."""
        try:
            yield
        except Exception:
            _log.exception("drafting failed")
            self._failures += 1
            self._good = 0
            for key in [*self._followed]:
                with contextlib.suppress(Exception):
                    self._proposer.forget(key)
                self._lose(key)
            if self._failures >= _MAX_FAILURES and self._told is not None:
                self._told.failed()
                self._told = None

    def _is_mine(self, rows: FeatureRows) -> bool:
        key = self._keys.get(rows.session_id)
        return key is not None and self._followed[key].epoch == rows.order.epoch

    def _take(self, rows: FeatureRows) -> None:
        """Hidden states of a session's next positions."""
        assert self._reader is not None
        key = self._keys[rows.session_id]
        known = self._followed[key]
        known.num_rows = rows.start + len(rows.rows) // self._row_bytes
        self._reader.features(key, rows.start, rows.rows)
        if known.starved:
            known.starved = False
            self._wanting[key] = None

    def _follow(self, key: SessionKey, base_len: int, output: TokenIds, wanted: int) -> None:
        known = self._followed[key]
        known.length = max(known.length, base_len + len(output))
        self._proposer.commit(key, base_len, output, wanted)
        self._want(key, wanted)

    def _want(self, key: SessionKey, num_draft_tokens: int) -> None:
        self._followed[key].starved = False
        if num_draft_tokens:
            self._wanting[key] = None
        else:
            self._wanting.pop(key, None)

    def _draft(self, engine: Engine, began: float) -> float:
        """Post what is wanted, made since `began`; returns when it was there."""
        round_ = self._proposer.draft([*self._wanting], NO_PACE)
        now = time.perf_counter()  # the same for all: they were drafted in one batch
        draft_us = round((now - began) * 1e6)
        for key, tree in round_.drafts:
            known = self._answered(key)
            method = self._names[round_.methods.get(key, 0)]
            engine.post_block(known.id, tree, self.id, draft_us, now, method=method)
            if not known.drafted and self._told is not None:
                known.drafted = True
                self._told.first_draft(known.id, known.epoch)
        for key in round_.at_hand:
            self._answered(key)
        for key in round_.unfinished:
            known = self._followed[key]
            if self._reader is not None and known.num_rows < known.length - 1:
                known.starved = True  # until more of its states have come
                del self._wanting[key]
        for key in round_.lost:
            self._lose(key)
        self._good += 1
        if self._good == _FORGIVEN:
            self._failures = 0
        return now

    def _expects(self, engine: Engine) -> bool:
        """Whether the next step can begin before the host has its drafts: they are on their way
        to it on the device, and are told when it has begun.
        """
        trailer = self._proposer
        if not self._wanting or not isinstance(trailer, AsyncProposer):
            return False
        late = trailer.can_launch_after_verify([*self._wanting])
        if late is None:
            return False
        ids = {key: self._followed[key].id for key in late.places}
        places = {ids[key]: place for key, place in late.places.items()}
        lengths = {ids[key]: length for key, length in late.lengths.items()}
        return engine.expect(DeviceDrafts(late.tokens, places, lengths))

    def _draft_behind(self, engine: Engine) -> None:
        """Has the drafts that the step in flight will ask for begin on the device when it ends."""
        verify_output, trailer = engine.verify_output, self._proposer
        if verify_output is None or not isinstance(trailer, AsyncProposer):
            return
        rows: list[AsyncRow] = []
        for place, (seq, piece, draft, _) in enumerate(verify_output.rows):
            key, wanted = self._keys.get(seq.session_id), seq.drafting.num_draft_tokens
            # A constraint may cut what is accepted.
            if key is not None and wanted and not piece.parents and seq.constraint is None:
                rows.append(AsyncRow(key, place, len(draft), wanted))
        trailer.launch_after_verify(rows, verify_output.tokens)

    def _answered(self, key: SessionKey) -> _Followed:
        del self._wanting[key]
        return self._followed[key]

    def _lose(self, key: SessionKey) -> None:
        """The method has forgotten a session; the scorer may open it again."""
        known = self._followed.get(key)
        if known is not None:
            self._forget(key)
            if self._told is not None:
                self._told.lost(known.id, known.epoch)

    def _forget(self, key: SessionKey) -> None:
        del self._keys[self._followed.pop(key).id]
        self._wanting.pop(key, None)
