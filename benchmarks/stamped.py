"""A scorer or proposer that sleeps instead of computing and notes how far rounds have come.

    python -m benchmarks.stamped scorer_service|proposer_service --stamps FILE --sleep-ms 5 [flags]

For benchmarks only. The scorer's forward sleeps and finds every draft right; the proposer, which
is to copy (`--method ngram`), sleeps for each of its cycles. With `--ahead-ms` its thread runs
Python for that long again and again while it has no message, as it does where it drafts ahead.
With `--row-bytes` it asks for that many bytes of hidden states a token, and puts them together like
a module (stamped_states.py).
FILE gets the stamps at the end. They are of CLOCK_MONOTONIC, which is one clock for all processes
of a host.
"""

from __future__ import annotations

import argparse
import functools
import importlib
import json
import os
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any, Final
from unittest import mock

from benchmarks.wrapped import leave
from outrider.rpc import runtime

TOKEN: Final = 7
"""All that prompts and texts consist of."""

Round = tuple[int, int]  # session, committed length that is drafted from
Taken = list[tuple[str, int, list[Round]]]


def main(argv: Sequence[str] | None = None) -> int:
    """Run until a signal; returns the exit code."""
    p = argparse.ArgumentParser(description=__doc__, add_help=False)
    p.add_argument("service", choices=("scorer_service", "proposer_service"))
    p.add_argument("--stamps", type=Path, required=True)
    p.add_argument("--sleep-ms", type=float, required=True)
    p.add_argument("--ahead-ms", type=float, default=0.0)
    p.add_argument("--row-bytes", type=int, default=0)
    ours, flags = p.parse_known_args(argv)
    os.environ["OMP_NUM_THREADS"] = "1"  # before torch is imported
    runtime.prepare_grpc()
    taken: Taken = []
    steps: list[tuple[int, int]] = []
    if ours.service == "scorer_service":
        _change_scorer(taken, steps, ours.sleep_ms * 1e-3, ours.row_bytes)
    else:
        _change_proposer(taken, ours.sleep_ms * 1e-3, ours.ahead_ms * 1e-3, ours.row_bytes)
    code: int = importlib.import_module(f"{ours.service}.__main__").main(flags)
    ours.stamps.write_text(json.dumps({"rounds": _by_round(taken), "steps": steps}))
    return code


def _change_scorer(
    taken: Taken, steps: list[tuple[int, int]], sleep_s: float, row_bytes: int
) -> None:
    import torch

    from benchmarks.fixed_k import fix
    from outrider.engine.engine import Engine
    from outrider.engine.scheduler import Scheduler
    from outrider.engine.worker import EngineWorker
    from outrider.rpc.feature_codec import response_to_bytes
    from scorer_service import app, loading
    from scorer_service.drafting import transport
    from scorer_service.hub import Hub

    load = loading.load

    def load_sleeping(*args: Any) -> Any:
        model, runner, step_times = load(*args)
        logits = torch.empty(0)

        def forward(batch: Any) -> torch.Tensor:
            nonlocal logits
            began = time.perf_counter_ns()
            time.sleep(sleep_s)
            steps.append((began, time.perf_counter_ns()))
            rows = len(batch.logits_index)
            if rows > len(logits):
                logits = torch.zeros(rows, model.vocab_size)
                logits[:, TOKEN] = 1.0
            return logits[:rows]

        mock.patch.object(model, "forward", forward).start()
        if row_bytes:
            from benchmarks.stamped_states import make_pool

            model.pools.features = make_pool(row_bytes, model)
        return model, runner, step_times

    mock.patch.object(app, "load", load_sleeping).start()
    fix()
    commit, result_at = Scheduler.commit, 0

    def committing(*args: Any) -> Any:
        nonlocal result_at
        result_at = time.perf_counter_ns()
        return commit(*args)

    mock.patch.object(Scheduler, "commit", committing).start()
    _before(taken, EngineWorker, "_publish", "publish", 1)
    _before(taken, EngineWorker, "_publish", "result", 1, lambda: result_at)
    _before(taken, Hub, "on_events", "hub", 0)
    _before(taken, EngineWorker, "post_blocks", "posted", 0)
    _before(taken, Engine, "post_block", "taken", 0)
    to_bytes = _at(taken, response_to_bytes, "sent")
    mock.patch.object(transport, "response_to_bytes", to_bytes).start()
    mock.patch.object(transport, "_parse", _after(taken, transport._parse, "arrived")).start()


def _change_proposer(taken: Taken, sleep_s: float, ahead_s: float, row_bytes: int) -> None:
    from outrider.drafting.building import methods
    from outrider.drafting.copying.ngram import NgramProposer
    from proposer_service import connection
    from proposer_service.cycle import Cycle

    kind: Any = NgramProposer
    if row_bytes:
        from benchmarks.stamped_states import StatesProposer, build

        kind = StatesProposer
        mock.patch.object(methods, "_build", functools.partial(build, row_bytes)).start()
    drafting = (0, 0)
    draft, hand_over = kind.draft, Cycle._hand_over

    def slept(self: Any, *args: Any) -> object:
        nonlocal drafting
        began = time.perf_counter_ns()
        if sleep_s:
            time.sleep(sleep_s)
        round_ = draft(self, *args)
        drafting = began, time.perf_counter_ns()
        return round_

    def handed_over(self: Cycle, outgoing: Any) -> None:
        messages = [each for link in outgoing.values() for each in link]
        rounds = _rounds(messages)
        taken.append(("asked", drafting[0], rounds))
        taken.append(("guessed", drafting[1], rounds))
        taken.append(("drafted", time.perf_counter_ns(), rounds))
        hand_over(self, outgoing)

    def computed(self: Cycle) -> bool:
        due = time.perf_counter() + ahead_s
        while time.perf_counter() < due:
            pass
        return bool(self._routes.drafted)

    mock.patch.object(kind, "draft", slept).start()
    mock.patch.object(Cycle, "_hand_over", handed_over).start()
    _before(taken, connection.Connection, "send", "answered", 0)
    mock.patch.object(connection, "_parse", _after(taken, connection._parse, "received")).start()
    if ahead_s:
        mock.patch.object(Cycle, "ahead", computed).start()
    _before(taken, Cycle, "apply", "applied", 0)


def _before(
    taken: Taken,
    owner: type,
    method: str,
    point: str,
    argument: int,
    now: Callable[[], int] = time.perf_counter_ns,
) -> None:
    """Stamps each call of a method, for the rounds in one of its arguments."""
    original: Callable[..., Any] = getattr(owner, method)

    @functools.wraps(original)
    def stamped(self: object, *args: Any, **kwargs: Any) -> Any:
        taken.append((point, now(), _rounds(args[argument])))
        return original(self, *args, **kwargs)

    mock.patch.object(owner, method, stamped).start()


def _at(taken: Taken, serialize: Callable[[Any], bytes], point: str) -> Callable[[Any], bytes]:
    def stamped(message: Any) -> bytes:
        taken.append((point, time.perf_counter_ns(), _rounds(message)))
        return serialize(message)

    return stamped


def _after(taken: Taken, parse: Callable[[bytes], Any], point: str) -> Callable[[bytes], Any]:
    def stamped(data: bytes) -> Any:
        now = time.perf_counter_ns()  # reading it is ours to shorten, too
        message = parse(data)
        taken.append((point, now, _rounds(message)))
        return message

    return stamped


def _by_round(taken: Taken) -> dict[str, list[tuple[int, int, int]]]:
    """(session, length, ns) by point, of what was committed."""
    stamps: dict[str, list[tuple[int, int, int]]] = {}
    for point, ns, rounds in taken:
        stamps.setdefault(point, []).extend((*each, ns) for each in rounds)
    return stamps


def _rounds(what: Any) -> list[Round]:
    """The rounds that a message is about, or the messages and items of a list.

    Found at once: a message must not be kept for the end, it may have megabytes of states.
    """
    from outrider.draft_port import PostedBlock
    from outrider.rpc.feature_codec import SessionMessage
    from outrider.types import StepEvents
    from outrider.v1 import draft_pb2
    from proposer_service.cycle import Batch

    if isinstance(what, StepEvents):
        return [(each.session_id, each.base_len + len(each.token_ids)) for each in what.commits]

    if isinstance(what, draft_pb2.DraftRequest):
        return [(block.session, block.base_len) for block in what.blocks.blocks]
    if isinstance(what, draft_pb2.DraftResponse):
        return _rounds(what.sessions)
    if isinstance(what, draft_pb2.SessionBatch):
        return [(commit.session, commit.base_len + len(commit.tokens)) for commit in what.commits]
    if isinstance(what, SessionMessage):
        return _rounds(what.batch)
    if isinstance(what, Batch):
        return _rounds(what.message)
    if isinstance(what, PostedBlock):
        return [(what.session_id, what.tree.base_len)]
    return [each for one in what for each in _rounds(one)] if isinstance(what, list) else []


if __name__ == "__main__":
    leave(main())
