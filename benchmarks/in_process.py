"""A scorer's engine and a proposer's method that take turns in one process, without RPC.

    python -m benchmarks.in_process "SCORER FLAGS" "PROPOSER FLAGS"

A worker (worker_loop.py): what the services would build from the same flags, with the policy of
fixed_k.py. Hidden states, commits and drafts are handed over as arguments. A request {"prompts",
"max_tokens", "concurrency", "k"} is answered with `completions` (records.Completion), `wall_s` and
`features`.
"""

from __future__ import annotations

import shlex
import sys
import time
from collections import deque
from collections.abc import Sequence
from dataclasses import asdict, dataclass, field
from itertools import pairwise
from typing import Any, Final, cast

from benchmarks import fixed_k
from benchmarks.program import say
from benchmarks.records import Completion
from benchmarks.worker_loop import Handler, serve
from outrider.draft_port import DraftOffer, PostedBlock
from outrider.drafting.building.methods import build_proposer
from outrider.drafting.proposer import FeatureProposer, SessionStart
from outrider.errors import ConfigError
from outrider.features import FeatureBatch, FeatureOrder, FeatureWindow
from outrider.models.resolve import resolve_model
from outrider.params import SamplingParams, SpeculationParams, StopParams, TokenIds
from outrider.types import Request, RequestStats, StepEvents
from proposer_service.__main__ import parse
from scorer_service.__main__ import resolve
from scorer_service.app import Options, build_engine

_NAME: Final = "in-process"
_STATS = (
    *("rounds", "drafted", "accepted", "hits", "misses_late", "misses_wrong", "wait_ms"),
    *("propose_ms", "network_ms", "score_ms", "prefill_ms"),
)


@dataclass(slots=True)
class _Open:
    """A request that runs."""

    index: int
    started: float
    length: int  # committed tokens
    num_rows: int = 0  # whose hidden states were handed over
    token_ids: list[int] = field(default_factory=list)
    arrivals: list[float] = field(default_factory=list)

    @property
    def complete(self) -> bool:
        """The method lacks nothing to draft."""
        return self.num_rows >= self.length - 1

    def completion(self, stats: RequestStats) -> Completion:
        values = {name: float(getattr(stats, name)) for name in _STATS}
        values["undrafted_rounds"] = float(stats.k_histogram[0] if stats.k_histogram else 0)
        return Completion(
            tuple(self.token_ids),
            self.arrivals[-1] - self.started,
            ttft_s=self.arrivals[0] - self.started,
            stats=values,
            accepted_per_pos=stats.accepted_per_pos,
            round_gaps_s=tuple(b - a for a, b in pairwise(self.arrivals)),
        )


class InProcess:
    """Takes turns: a step, its hidden states and commits to the method, a draft for all rows."""

    def __init__(self, scorer_flags: Sequence[str], proposer_flags: Sequence[str]) -> None:
        flags = resolve(scorer_flags)
        del flags["exit_with_parent"]
        options = Options(**flags, ranks=None)
        self._engine = engine = build_engine(resolve_model(options.model, "target"), options)
        # It dials nobody.
        config, _ = parse(["--scorer", "127.0.0.1:1", *proposer_flags])
        method = build_proposer(config.methods, config.max_sessions, say)[0]
        spec = method.traits.features
        if spec is None or engine.features is None:
            raise ConfigError("the method or the scorer's --hidden-features lacks hidden states")
        self._method, self._spec = cast("FeatureProposer", method), spec
        if spec.projection_dim:
            engine.features.put_projection(spec, bytearray(self._method.projection))
        self._k = 0
        self._window = FeatureWindow()
        self._sessions = 0
        self._features = dict.fromkeys(("bytes", "rows", "seconds", "steps"), 0.0)

    def run(
        self, prompts: Sequence[TokenIds], max_tokens: int, concurrency: int, k: int
    ) -> dict[str, object]:
        """All prompts, `concurrency` at once, greedily, `k` draft tokens a round."""
        self._k = min(k, self._method.traits.max_draft_tokens)
        self._features = dict.fromkeys(self._features, 0.0)
        started = time.perf_counter()
        waiting = deque(enumerate(prompts))
        running: dict[int, _Open] = {}
        wanting: dict[int, None] = {}
        done: dict[int, Completion] = {}
        while waiting or running:
            while waiting and len(running) < concurrency:
                index, prompt = waiting.popleft()
                session = self._submit(prompt, max_tokens)
                running[session] = _Open(index, time.perf_counter(), len(prompt))
                wanting[session] = None
            self._engine.collect()
            came = time.perf_counter()
            events = self._engine.finalize_step()
            began = time.perf_counter()
            if events is not None:
                self._hand_over(events.features, running)
                done |= self._apply(events, running, wanting, came)
            self._draft(running, wanting, began)
            self._engine.launch()
        wall_s = time.perf_counter() - started
        return {
            "completions": [asdict(done[i]) for i in range(len(prompts))],
            "wall_s": wall_s,
            "features": self._features,
        }

    def _submit(self, prompt: TokenIds, max_tokens: int) -> int:
        self._sessions = session = self._sessions + 1
        sampling = SamplingParams(temperature=0.0)
        stop = StopParams(max_tokens=max_tokens, ignore_eos=True)
        self._engine.submit(Request(session, prompt, sampling, stop, SpeculationParams()))
        max_len = min(len(prompt) + max_tokens, self._engine.info.max_model_len)
        self._method.open(session, SessionStart(prompt, sampling, self._k, max_len))
        order = FeatureOrder(0, self._spec, self._window)
        self._engine.set_drafting(session, DraftOffer(_NAME, self._k, features=order))
        return session

    def _hand_over(self, batch: FeatureBatch | None, running: dict[int, _Open]) -> None:
        if batch is None:
            return
        self._features["seconds"] += batch.seconds
        for part in batch.rows:
            size = len(part.rows)
            self._features["bytes"] += size
            num_rows = size // self._spec.row_bytes
            self._features["rows"] += num_rows
            running[part.session_id].num_rows = part.start + num_rows
            self._method.features(part.session_id, part.start, part.rows)
            assert self._engine.features is not None
            self._engine.features.give_back(part.window, size)

    def _apply(
        self, events: StepEvents, running: dict[int, _Open], wanting: dict[int, None], came: float
    ) -> dict[int, Completion]:
        if events.failures:
            raise events.failures[0].error
        self._features["steps"] += events.timings is not None
        done: dict[int, Completion] = {}
        for commit in events.commits:
            session = commit.session_id
            request = running[session]
            request.token_ids += commit.token_ids
            request.length = commit.base_len + len(commit.token_ids)
            request.arrivals.append(came)
            if commit.finish_reason is not None:
                assert commit.stats is not None
                done[request.index] = request.completion(commit.stats)
                del running[session]
                wanting.pop(session, None)
                self._method.close(session)
                continue
            k = commit.num_draft_tokens
            self._method.commit(session, commit.base_len, commit.token_ids, k)
            if k:
                wanting[session] = None
        return done

    def _draft(self, running: dict[int, _Open], wanting: dict[int, None], began: float) -> None:
        """Drafts for all that want it; like a proposer's, the time counts what was handed over.

        A long prompt takes several calls, which a proposer makes while its scorer goes on.
        """
        asked = list(wanting)
        while asked:
            round_ = self._method.draft(asked)
            if round_.lost:
                raise ConfigError("a session was lost: give --proposer-flags a --kv-cache-memory")
            draft_us = round((time.perf_counter() - began) * 1e6)
            for session, tree in round_.drafts:
                del wanting[session]
                self._engine.post_block(PostedBlock(session, tree, _NAME, draft_us))
            asked = [session for session in round_.unfinished if running[session].complete]


def build() -> Handler:
    """Of the command line."""
    fixed_k.fix()
    scorer_flags, proposer_flags = map(shlex.split, sys.argv[1:3])
    stack = InProcess(scorer_flags, proposer_flags)

    def run(request: dict[str, Any]) -> dict[str, Any]:
        prompts = [tuple(prompt) for prompt in request["prompts"]]
        return stack.run(prompts, request["max_tokens"], request["concurrency"], request["k"])

    return run


if __name__ == "__main__":
    serve(build)
