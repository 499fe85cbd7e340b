"""No kernel is compiled once services are ready, because all requests would wait for it."""

from __future__ import annotations

import random
import time
from collections import deque
from collections.abc import Sequence
from functools import cache
from typing import cast

import pytest
import torch

if not torch.cuda.is_available():
    pytest.skip("needs a CUDA device", allow_module_level=True)

from outrider.draft_port import DraftOffer, PostedBlock
from outrider.drafting.building.methods import build_proposer
from outrider.drafting.proposer import FeatureProposer, Pace, Proposer, SessionStart
from outrider.engine.engine import Engine
from outrider.features import FeatureOrder, FeatureWindow
from outrider.models.resolve import resolve_model
from outrider.params import SamplingParams, SpeculationParams, StopParams
from outrider.types import Request, StepEvents
from proposer_service.__main__ import parse
from scorer_service.__main__ import resolve
from scorer_service.config import ScorerOptions
from scorer_service.core import build_engine

pytestmark = pytest.mark.gpu

NAME = "proposer"
K = 4
SCORER = (
    *("--device", "cuda", "--dtype", "bfloat16", "--attention-backend", "triton"),
    *("--kv-cache-memory", "512", "--max-model-len", "1024", "--max-num-seqs", "8"),
    *("--max-num-batched-tokens", "768", "--num-speculative-tokens", str(K)),
    *("--speculation-policy", "fixed"),
)
PROPOSER = (
    *("--scorer", "127.0.0.1:1", "--device", "cuda", "--attention-backend", "triton"),
    *("--max-sessions", "8", "--max-draft-tokens", str(K), "--kv-cache-memory", "256"),
)
METHODS = {
    "draft_model": ("--max-branches", "8"),
    "eagle3": ("--tree-width", "1"),
    "eagle3 trees": (),
    "mtp": (),
    "medusa": (),
    "mlp_speculator": (),
}
LENGTHS = (2, 5, 17, 33, 64, 100, 130, 300, 500, 700)
GREEDY = SamplingParams(temperature=0.0)
SAMPLING = (
    GREEDY,
    SamplingParams(temperature=1.0, seed=1),
    SamplingParams(temperature=0.7, top_p=0.9, seed=2),
    SamplingParams(temperature=1.0, top_k=20, min_p=0.05, seed=3),
    SamplingParams(temperature=1.0, presence_penalty=0.5, frequency_penalty=0.2, seed=4),
)


def _requests(count: int, seed: int) -> list[Request]:
    """Make requests of which some share a prefix."""
    rng = random.Random(seed)
    shared = tuple(rng.randrange(100, 8000) for _ in range(max(LENGTHS)))
    requests = []
    for i in range(count):
        length = rng.choice(LENGTHS)
        prompt = shared[:length] if rng.random() < 0.5 else shared[7 * i :][:length]
        stop = StopParams(max_tokens=rng.choice((1, 9, 40)), ignore_eos=True)
        sampling = rng.choice(SAMPLING) if i % 2 else GREEDY
        requests.append(Request(i + 1, prompt, sampling, stop, SpeculationParams()))
    return requests


class Loop:
    """An engine and a drafting method, run alternately."""

    def __init__(self, engine: Engine, method: Proposer) -> None:
        self._engine, self._method = engine, method
        self._spec = method.traits.features
        self._window = FeatureWindow()
        self._running: set[int] = set()
        self._wanting: dict[int, None] = {}

    def serve(self, requests: Sequence[Request], at_once: int) -> None:
        """Run all requests to their end."""
        waiting = deque(requests)
        deadline = time.monotonic() + 120
        while waiting or self._running:
            assert time.monotonic() < deadline
            while waiting and len(self._running) < at_once:
                self._begin(waiting.popleft())
            self._engine.collect()
            events = self._engine.finalize_step()
            if events is not None:
                self._apply(events)
            done = self._method.draft(list(self._wanting))
            assert not done.lost
            for session, tree in done.drafts:
                del self._wanting[session]
                self._engine.post_block(PostedBlock(session, tree, NAME, 100))
            self._method.ahead(list(self._running), Pace())
            self._engine.launch()

    def _begin(self, request: Request) -> None:
        session, prompt = request.session_id, request.prompt_token_ids
        self._engine.submit(request)
        max_len = min(len(prompt) + 64, self._engine.info.max_model_len)
        self._method.open(session, SessionStart(prompt, request.sampling, K, max_len))
        order = FeatureOrder(0, self._spec, self._window) if self._spec else None
        self._engine.set_drafting(session, DraftOffer(NAME, K, features=order))
        self._running.add(session)
        self._wanting[session] = None

    def _apply(self, events: StepEvents) -> None:
        assert not events.failures
        for part in events.features.rows if events.features else ():
            assert self._engine.features is not None
            cast(FeatureProposer, self._method).features(part.session_id, part.start, part.rows)
            self._engine.features.give_back(part.window, len(part.rows))
        for commit in events.commits:
            session, k = commit.session_id, commit.num_draft_tokens
            if commit.finish_reason is not None:
                self._running.remove(session)
                self._wanting.pop(session, None)
                self._method.close(session)
                continue
            self._method.commit(session, commit.base_len, commit.token_ids, k)
            if k:
                self._wanting[session] = None


@cache
def _engine(features: str) -> Engine:
    flags = resolve([*SCORER, *(("--hidden-features", features) if features else ())])
    del flags["exit_with_parent"]
    options = ScorerOptions(**flags)
    return build_engine(resolve_model(options.model, "target"), options)


@pytest.mark.parametrize("how", METHODS)
def test_serving_after_start_compiles_nothing(how: str, compiled: list[str]) -> None:
    name = how.split()[0]
    engine = _engine({"draft_model": "", "eagle3": "eagle3"}.get(name, "final"))
    config, _ = parse([*PROPOSER, "--method", name, *METHODS[how]])
    method = build_proposer(config.methods, config.max_sessions, print)[0]
    compiled.clear()  # test_gemm.py tells whether anything is noted
    loop = Loop(engine, method)
    loop.serve(_requests(24, 1), 1)
    loop.serve(_requests(60, 2), 8)
    assert not compiled, "\n".join(compiled)
