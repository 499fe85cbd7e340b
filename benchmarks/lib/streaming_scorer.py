"""A scorer without a model: it streams tokens at a fixed pace, to load what is around an engine.

`python -m benchmarks.lib.streaming_scorer` serves like a scorer process, with the scorer's own
servicer and hub.
"""

from __future__ import annotations

import argparse
import asyncio
import sys
import threading
import time
from collections.abc import Callable, Iterable
from contextlib import AbstractContextManager
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any, Final

from outrider.config import MAX_WAITING
from outrider.counts import StepCounts
from outrider.errors import CapacityError
from outrider.models.resolve import resolve_model
from outrider.models.tokenizer import Tokenizer
from outrider.rpc.runtime import prepare_grpc, run
from outrider.types import (
    Commit,
    EngineInfo,
    EngineSnapshot,
    FinishReason,
    Request,
    RequestStats,
    StepEvents,
    StepTimings,
    TokenKind,
)

_KINDS: Final = (TokenKind.PLAIN,)
_MAX_LEN: Final = 8192


@dataclass(slots=True)
class _Row:
    request: Request
    done: int = 0


class StreamingEngine:
    """Commits a token to each of its requests every `step_s` seconds, on a thread of its own."""

    running = True

    def __init__(
        self,
        step_s: float,
        max_num_seqs: int,
        vocab_size: int,
        on_events: Callable[[StepEvents], None],
    ) -> None:
        self._step_s = step_s
        self._max_num_seqs = max_num_seqs
        self._vocab_size = vocab_size
        self._on_events = on_events
        self._lock = threading.Lock()
        self._rows: dict[int, _Row] = {}
        self._stopping = threading.Event()
        self._thread = threading.Thread(target=self._main, name="engine", daemon=True)
        self._thread.start()

    def submit(self, request: Request, _constraint: object = None) -> None:
        """Take a request. Raises `CapacityError`."""
        with self._lock:
            if len(self._rows) >= self._max_num_seqs:
                raise CapacityError("All rows are taken.")
            self._rows[request.session_id] = _Row(request)

    def abort(self, session_id: int) -> None:
        """End a session."""
        with self._lock:
            self._rows.pop(session_id, None)

    def snapshot(self) -> EngineSnapshot:
        return EngineSnapshot(len(self._rows), 0, 1, 1)

    def start(self, timeout_s: float) -> EngineInfo:
        """Raise `NotImplementedError`: its thread runs from the beginning."""
        raise NotImplementedError

    def stop(self, timeout_s: float) -> None:
        """End the thread."""
        self._stopping.set()
        self._thread.join(timeout_s)

    async def until_hung(self) -> None:
        """Wait for ever."""
        await asyncio.Event().wait()

    # What the side that drafts asks of an engine.

    drafting = False
    features: Any = None

    def set_drafting(self, session_id: int, offer: object) -> None: ...

    def post_blocks(self, blocks: Iterable[object]) -> None: ...

    def between_same_steps(self) -> AbstractContextManager[object]:
        return self._lock

    def _main(self) -> None:
        due = time.perf_counter()
        while not self._stopping.is_set():
            due = max(due + self._step_s, time.perf_counter() - self._step_s)
            time.sleep(max(0.0, due - time.perf_counter()))
            with self._lock:
                commits = [self._commit(row) for row in self._rows.values()]
                for commit in commits:
                    if commit.finish_reason is not None:
                        del self._rows[commit.session_id]
            if commits:
                size = len(commits)
                counts = StepCounts(output_tokens=size, way="none")
                counts.rounds[0, 0] = size
                timings = StepTimings(0.1, 1.0, 0.1, 0.1, 0.1, size, size)
                self._on_events(StepEvents(tuple(commits), (), timings, counts=counts))

    def _commit(self, row: _Row) -> Commit:
        request, base = row.request, len(row.request.prompt_token_ids) + row.done
        # By position and seed, so that another scorer goes on with the same text.
        token = (base * 7919 + request.sampling.seed) % self._vocab_size
        row.done += 1
        ended = row.done >= request.stop.max_tokens
        return Commit(
            request.session_id,
            base,
            (token,),
            _KINDS,
            0,
            FinishReason.LENGTH if ended else None,
            _stats(request, row.done) if ended or request.running_stats else None,
        )


def _stats(request: Request, done: int) -> RequestStats:
    counts = (done, done, done, 0, 0, (), (done,), 0, 0, 0, 0, 0.0, 0, 0.0, 0.0, 0.0, 0.0, 0.0, 0)
    return RequestStats(len(request.prompt_token_ids), *counts, (), 0)


class StreamingScorer:
    """Implements `outrider.rpc.runtime.Service` with the scorer's own servicer."""

    def __init__(self, args: argparse.Namespace) -> None:
        self._args = args

    async def start(self) -> dict[str, str]:
        """Serve, and return the addresses."""
        from outrider.rpc.server import GrpcServer
        from outrider.rpc.telemetry import configure
        from scorer_service.call import SERVICE_NAME, Serving
        from scorer_service.config import DraftLimits, ServedModel
        from scorer_service.drafting.side import LocalDrafts
        from scorer_service.hub import Hub
        from scorer_service.metrics import ScorerMetrics
        from scorer_service.servicer import ScorerServicer, add_to_server

        args, loop = self._args, asyncio.get_running_loop()
        folder: Path = resolve_model(None, "target", tokenizer_only=True)
        tokenizer = Tokenizer.load(folder)

        def on_events(events: StepEvents) -> None:
            loop.call_soon_threadsafe(hub.on_events, events)

        settings = (args.step_ms / 1e3, args.max_num_seqs, tokenizer.vocab_size)
        self._engine: Any = StreamingEngine(*settings, on_events)
        same: dict[str, Any] = {"max_model_len": _MAX_LEN, "num_speculative_tokens": 0}
        same["eos_token_ids"] = frozenset()
        served = ServedModel(
            scorer_id="streaming",
            model="streaming",
            served_model_name="default",
            tokenizer_hash=tokenizer.hash,
            vocab_size=tokenizer.needed_vocab_size,
            dtype="float32",
            **same,
        )
        info = EngineInfo(
            vocab_size=served.vocab_size,
            page_size=served.page_size,
            num_pages=1,
            max_num_seqs=args.max_num_seqs,
            max_waiting=0,
            **same,
        )
        telemetry = configure("outrider-scorer")
        metrics = ScorerMetrics(telemetry.registry, "default")
        hub = Hub(self._engine, served, DraftLimits(), metrics)
        servicer = ScorerServicer(telemetry)
        drafts = LocalDrafts(hub.blocks, None)
        servicer.begin(Serving(self._engine, hub, served, info, None, drafts))
        add, address = partial(add_to_server, servicer), f"127.0.0.1:{args.port}"
        self._server = GrpcServer(address, add, [SERVICE_NAME])
        address = f"127.0.0.1:{await self._server.start()}"
        await self._server.set_serving(True)
        return {"grpc": address}

    async def stop(self) -> None:
        """End at once."""
        await self._server.stop(0)
        self._engine.stop(10.0)

    async def wait_failed(self) -> None:
        """Wait for ever."""
        await asyncio.Event().wait()


def main(argv: list[str] | None = None) -> int:
    """Serve until a signal; return the exit code."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--port", type=int, default=0)
    parser.add_argument("--step-ms", type=float, default=20.0, help="time of a step")
    parser.add_argument("--max-num-seqs", type=int, default=MAX_WAITING, help="rows at once")
    args = parser.parse_args(argv)
    prepare_grpc()
    return run("streaming", StreamingScorer(args), exit_with_parent=True)


if __name__ == "__main__":
    sys.exit(main())
