"""A proposer within the scorer's process, which drafts between the steps of the engine's thread.

It suits one device that target and draft share: nothing travels, the device does not change over
between processes, and all rows have their drafts when a step begins. Nothing is drafted while a
step runs, and the draft scales with its scorer. Others see a proposer like any other.
"""

from __future__ import annotations

import contextlib
import logging
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from typing import Final, Protocol, cast

import torch

from outrider import start_times
from outrider.draft_port import ColocatedEngine, DeviceDrafts, PostedBlock
from outrider.drafting.async_drafts import AsyncProposer, AsyncRow
from outrider.drafting.draft_queue import DraftQueue
from outrider.drafting.proposer import (
    NO_PACE,
    FeatureProposer,
    Proposer,
    SessionKey,
    SessionStart,
)
from outrider.errors import InternalError
from outrider.features import FeatureRows
from outrider.hello import make_hello
from outrider.methods import COPYING_METHODS
from outrider.v1 import draft_pb2
from scorer_service.config import ServedModel
from scorer_service.drafting.in_process_flags import naming_flag

POOL: Final = "in-process"
_MAX_FAILURES: Final = 3  # of the method, until it is given up
_FORGIVEN: Final = 64  # rounds of drafts without a failure, after which earlier ones do not count
_log = logging.getLogger(__name__)


class DraftListener(Protocol):
    """Listener for draft events of the engine's thread. Thread-safe, non-blocking."""

    def first_draft(self, session_id: int, epoch: int) -> None: ...

    def lost(self, session_id: int, epoch: int) -> None: ...

    def failed(self) -> None:
        """Learn that nothing will be drafted any more."""


@dataclass(slots=True)
class _Session:
    key: SessionKey
    id: int
    epoch: int
    start: SessionStart  # without a text
    num_given: int  # tokens of the text that came with the request
    told: int = 0  # tokens of the text that the method knows; 0: it does not know the session
    drafted: bool = False


class InProcessProposer:
    """Implements `ColocatedProposer`. Used on the engine's thread."""

    def __init__(
        self,
        build: Callable[[], tuple[Proposer, str]],
        proposer_id: str,
        clock: Callable[[], float] = time.perf_counter,
        *,
        drafts_before_prompts: bool = False,
    ) -> None:
        """With `drafts_before_prompts` a lone request's first step verifies a draft already."""
        self._build = build
        self._before_prompts = drafts_before_prompts
        self._clock = clock
        self.id = proposer_id
        self._listener: DraftListener | None = None  # None: nothing is drafted
        self._by_id: dict[int, _Session] = {}
        self._sessions: dict[SessionKey, _Session] = {}
        self._vocab_size = sys.maxsize  # of the target, once `hello` has named it
        self._on_device = False  # the step in flight has drafts that are to be posted
        self._drafting = 0.0, 0.0  # start and end of the last drafting between two steps
        self._failures = 0
        self._successes = 0  # since the last failure

    def build(self) -> None:
        """Load the method. Raises `ConfigError` and `UnsupportedModelError`."""
        threads = torch.get_num_threads()
        with start_times.phase("draft"), naming_flag():
            self._proposer, self._tokenizer_hash = self._build()
        torch.set_num_threads(threads)  # the engine's
        self._queue = DraftQueue(self._proposer)
        behind = self._proposer if isinstance(self._proposer, AsyncProposer) else None
        self._drafts_behind = behind  # a step
        traits = self._proposer.traits
        self._methods = traits.methods or (traits.method,)
        self._copies = not COPYING_METHODS.isdisjoint(self._methods)

    def put_projection(self, engine: ColocatedEngine) -> None:
        """Give the engine the projection that the method asks for."""
        spec = self._proposer.traits.features
        if spec is not None and spec.projection_dim:
            assert engine.features is not None, "--hidden-features follows the method"
            projection = cast("FeatureProposer", self._proposer).projection
            engine.features.put_projection(spec, bytearray(projection))

    def hello(self, served: ServedModel) -> draft_pb2.Hello:
        """Return the Hello that the proposer would send by a stream; it drafts for `served`."""
        self._vocab_size = served.vocab_size
        return make_hello(
            self._proposer.traits,
            self._tokenizer_hash,
            proposer_id=self.id,
            pool=POOL,
            device=served.device,  # steps and drafts never run at once, whatever the device is
        )

    def listen(self, listener: DraftListener) -> None:
        """Accept sessions from now on."""
        self._listener = listener

    def open(
        self, engine: ColocatedEngine, session: int, epoch: int, start: SessionStart, num_given: int
    ) -> None:
        """Open a session whose text is the engine's: `start` has none.

        `num_given` tokens of the text came with the request. Beside others a model hears of it when
        a commit asks for the first draft: it would process the prompt before the target does, and a
        burst's first requests would keep all others waiting, in vain where so many are not drafted
        for. A method that copies learns from every text.
        """
        text = engine.committed(session)
        if text is None or self._listener is None:
            return
        at_once = not self._proposer.traits.model or (self._before_prompts and not self._sessions)
        opened = _Session(self._queue.new_key(), session, epoch, start, num_given)
        self._by_id[session] = self._sessions[opened.key] = opened
        if self._copies or at_once:
            with self._containing_failures():
                self._tell(opened, text, start.num_draft_tokens if at_once else 0)

    def close(self, session: int) -> None:
        """Close a session, if it is known."""
        known = self._by_id.get(session)
        if known is not None:
            self._forget(known)
            with self._containing_failures():
                self._queue.close(known.key)

    @property
    def busy(self) -> bool:
        return bool(self._queue.wanting)

    @property
    def launched_drafts(self) -> DeviceDrafts | None:
        """Return where drafts behind the step in flight will be, by session; None without such."""
        drafts = self._drafts_behind and self._drafts_behind.launched_drafts
        return self._of_sessions(drafts) if drafts else None

    def draft_between_steps(self, engine: ColocatedEngine) -> None:
        began = self._clock()
        self._on_device = False
        with self._containing_failures():
            self._hear(engine)
            self._on_device = self._leave_on_device(engine)
        if not self._on_device:
            self._pass_on_features(engine)
            with self._containing_failures():
                if self._queue.wanting:
                    self._draft(engine, self._clock())
        self._drafting = began, self._clock()
        engine.count_drafting(self._drafting[1] - began)

    def after_launch(self, engine: ColocatedEngine) -> None:
        self._pass_on_features(engine)
        if self._listener is not None:
            with self._containing_failures():
                if self._on_device:
                    began, ended = self._drafting
                    engine.count_drafting(self._draft(engine, began) - ended)
                self._launch_after_verify(engine)
                self._proposer.ahead((), NO_PACE)

    @contextlib.contextmanager
    def _containing_failures(self) -> Iterator[None]:
        """Lose all sessions if the method fails; no request fails with them."""
        try:
            yield
        except Exception:
            _log.exception("drafting failed")
            self._failures += 1
            self._successes = 0
            for key in [*self._sessions]:
                with contextlib.suppress(Exception):
                    self._queue.forget(key)
                self._lose(key)
            if self._failures >= _MAX_FAILURES and self._listener is not None:
                self._listener.failed()
                self._listener = None

    def _hear(self, engine: ColocatedEngine) -> None:
        """Tell the method of texts that ask for a draft, ask no more, or have ended.

        A text that never asked has ended without a word to a model.
        """
        unanswered, by_id = [*self._queue.wanting], self._by_id
        for session_id, text, asked, finished in engine.grown_texts:
            session = by_id.get(session_id)
            if session is None:
                continue
            if session.told or not finished:
                self._tell(session, text, asked)
            if finished:
                self.close(session_id)
        for key in unanswered:
            known = self._sessions.get(key)
            if known is not None and not engine.asks(known.id):
                self._queue.commit(key, known.told, (), 0)

    def _tell(self, session: _Session, text: Sequence[int], asked: int) -> None:
        """Tell the method what it does not know of a text, which asks for so many draft tokens."""
        told, session.told = session.told, len(text)
        if told:
            self._queue.commit(session.key, told, text[told:], asked)
            return
        written = len(text) - session.num_given
        start = replace(session.start, num_draft_tokens=asked, num_output_tokens=written)
        self._queue.open(session.key, replace(start, prefix=tuple(text)))

    def _pass_on_features(self, engine: ColocatedEngine) -> None:
        """Give the method the hidden states that came, of texts that go on."""
        if engine.features is None:
            return
        rows = engine.features.take_colocated()
        for each in rows:
            engine.features.give_back(each.window, len(each.rows))
        with self._containing_failures():
            for each in rows:
                session = self._by_id.get(each.session_id)
                if session is not None and session.epoch == each.order.epoch:
                    self._pass_on(engine, session, each)

    def _pass_on(self, engine: ColocatedEngine, session: _Session, rows: FeatureRows) -> None:
        if not session.told:  # its prompt is not through yet
            text = engine.committed(session.id)
            if text is None:  # it was aborted, and is closed soon
                return
            self._tell(session, text, 0)
        self._queue.features(session.key, rows.start, rows.rows)

    def _draft(self, engine: ColocatedEngine, began: float) -> float:
        """Post the wanted drafts, made since `began`, and return when they were made."""
        round_ = self._proposer.draft([*self._queue.wanting], NO_PACE)
        now = self._clock()  # one time for all drafts of a batch
        draft_us = round((now - began) * 1e6)
        longest_first = sorted(round_.drafts, key=lambda draft: -len(draft[1].token_ids))
        for key, tree in longest_first:  # a batch's first draft tells what it takes
            self._queue.answered(key)
            session = self._sessions[key]
            ids = tree.token_ids
            if ids and not 0 <= min(ids) <= max(ids) < self._vocab_size:  # it would end the engine
                raise InternalError(
                    f"a draft has tokens that are none of {self._vocab_size}: {ids}"
                )
            method = self._methods[round_.methods.get(key, 0)]
            engine.post_block(PostedBlock(session.id, tree, self.id, draft_us, now, method))
            if not session.drafted and self._listener is not None:
                session.drafted = True
                self._listener.first_draft(session.id, session.epoch)
        for key in round_.at_hand:
            self._queue.answered(key)
        for key in round_.unfinished:
            self._queue.unfinished(key)
        for key in round_.lost:
            self._queue.drop(key)
            self._lose(key)
        self._successes += 1
        if self._successes == _FORGIVEN:
            self._failures = 0
        return now

    def _leave_on_device(self, engine: ColocatedEngine) -> bool:
        """Let the next step verify drafts on the device, which are posted after its launch.

        False if there are none, or the step cannot.
        """
        proposer, wanting = self._drafts_behind, self._queue.wanting
        if not wanting or proposer is None:
            return False
        drafts = proposer.device_drafts([*wanting])
        if drafts is None:
            return False
        return engine.schedule_with_device_drafts(self._of_sessions(drafts))

    def _of_sessions(self, drafts: DeviceDrafts) -> DeviceDrafts:
        """Return drafts of a method's keys by the sessions that are known."""
        sessions = self._sessions
        places, lengths = (
            {sessions[key].id: number for key, number in each.items() if key in sessions}
            for each in (drafts.places, drafts.lengths)
        )
        return DeviceDrafts(drafts.nodes, places, lengths)

    def _launch_after_verify(self, engine: ColocatedEngine) -> None:
        """Launch the drafts that the step in flight will ask for behind it on the device."""
        proposer = self._drafts_behind
        if proposer is None or (verify_output := engine.verify_output) is None:
            return
        states, spec = None, self._proposer.traits.features
        if spec is not None and engine.features is not None:
            states = engine.features.on_device(spec)
        numbers: dict[int, int] = {}
        epochs: Sequence[int] = ()
        if states is not None:
            epochs = states.epochs
            numbers = {session_id: i for i, session_id in enumerate(states.sessions)}
        rows: list[AsyncRow] = []
        by_id = self._by_id
        for session_id, length, place, max_accepted, wanted, is_tree in verify_output.rows:
            session = by_id.get(session_id)
            if session is None or session.told < length:
                continue  # the method is behind the text
            number = numbers.get(session_id)
            if number is not None and epochs[number] != session.epoch:
                number = None
            rows.append(AsyncRow(session.key, place, max_accepted, wanted, is_tree, number))
        read = proposer.launch_after_verify(rows, verify_output.tokens, states)
        if read and states is not None and engine.features is not None:
            engine.features.were_read(states, read)

    def _lose(self, key: SessionKey) -> None:
        """Report a session that the method has forgotten; the scorer may open it again."""
        session = self._sessions.get(key)
        if session is not None:
            self._forget(session)
            if self._listener is not None:
                self._listener.lost(session.id, session.epoch)

    def _forget(self, session: _Session) -> None:
        del self._sessions[session.key], self._by_id[session.id]
