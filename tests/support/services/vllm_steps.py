"""Steps as vLLM runs them, around the plug-in and a hub on one thread: no model, no sockets."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any, cast

import numpy as np
import pytest
from prometheus_client import CollectorRegistry

from outrider.params import VerificationRule
from outrider.types import Request, StepEvents
from outrider.v1 import draft_pb2
from outrider.vllm import adapter
from outrider.vllm.draft_host import DraftHost, Listener
from outrider.vllm.proposer import RemoteProposer
from outrider.vllm.waiting import LockstepFixedPolicy
from scorer_service.config import DraftLimits, ServedModel
from scorer_service.drafting.attached import AttachedProposer
from scorer_service.hub import Hub
from scorer_service.metrics import ScorerMetrics
from scorer_service.sessions import Session
from tests.support.services.scripted_proposer import hello

K, VOCAB, CONTEXT, MAX_WAIT_S = 4, 512, 64, 0.01
SERVED = ServedModel("s", "m", "m", "", VOCAB, CONTEXT, "float32", frozenset(), K)


def truth(name: str, position: int) -> int:
    """The token that the target has at a position of a request, whatever was drafted."""
    return (sum(name.encode()) * 31 + position * position * 7) % (VOCAB - 1) + 1


def new_request(name: str, max_tokens: int = 48, **extra_args: object) -> SimpleNamespace:
    """Return what vLLM's scheduler says of a request; its prompt are the first three tokens."""
    params = SimpleNamespace(
        **{"temperature": 0.0, "top_k": 0, "top_p": 1.0, "seed": None, "extra_args": extra_args},
        **{"presence_penalty": 0.0, "frequency_penalty": 0.0, "repetition_penalty": 1.0},
        **{"max_tokens": max_tokens, "ignore_eos": False, "stop_token_ids": []},
        eos_token_id=0,
    )
    prompt = [truth(name, i) for i in range(3)]
    return SimpleNamespace(req_id=name, prompt_token_ids=prompt, sampling_params=params)


class VllmSteps(Listener):
    """Requests that vLLM runs in lock step; it verifies what the plug-in drafts."""

    def __init__(
        self,
        monkeypatch: pytest.MonkeyPatch,
        names: tuple[str, ...] = ("a", "b"),
        max_wait_s: float = MAX_WAIT_S,
        max_graph_rows: int = 0,
    ) -> None:
        monkeypatch.setattr(adapter, "agreed", lambda value: value)
        monkeypatch.setattr(adapter, "share", lambda _: None)
        policy = LockstepFixedPolicy(K, max_wait_s=max_wait_s)
        self.host = DraftHost(K, CONTEXT, 8, policy=policy, max_graph_rows=max_graph_rows)
        self.host.listener = self
        metrics = ScorerMetrics(CollectorRegistry(), "m")
        self.hub = Hub(cast("Any", self.host), SERVED, DraftLimits(), metrics)
        self.batch = SimpleNamespace(req_ids=[])
        self.plugin = object.__new__(RemoteProposer)  # without vLLM's configuration
        vars(self.plugin).update(
            _served=SimpleNamespace(
                num_speculative_tokens=K, max_model_len=CONTEXT, vocab_size=VOCAB, seed=0
            ),
            _rule=VerificationRule.COUPLED,
            _host=self.host,
            _runner=SimpleNamespace(
                input_batch=self.batch,
                vllm_config=SimpleNamespace(compilation_config=SimpleNamespace(cudagraph_mode=0)),
            ),
            _ahead=False,
            _num_faults=0,
        )
        self.texts: dict[str, list[int]] = {}
        self.drafts: dict[str, list[int]] = {}
        self.finished: list[str] = []
        self.new: list[SimpleNamespace] = []
        for name in names:
            self.open(name)

    def opened(self, request: Request, traceparent: str) -> None:
        self.hub.submit(request, traceparent)

    def stepped(self, events: StepEvents) -> None:
        self.hub.on_events(events)

    def open(self, name: str, max_tokens: int = 48, **extra_args: object) -> None:
        """Let a request run in the next step, as vLLM's scheduler says it."""
        self.new.append(new_request(name, max_tokens, **extra_args))
        self.texts[name] = [*self.new[-1].prompt_token_ids]

    def attach(self, proposer_id: str = "p", **fields: object) -> AttachedProposer:
        given = {"vocab_size": VOCAB, "tokenizer_hash": "", **fields}
        return self.hub.registry.attach(hello(proposer_id=proposer_id, **given))

    def session(self, name: str) -> Session:
        session_id = self.host._rows[name].session_id
        return self.hub._sessions[session_id]

    def block(self, name: str, length: int = 8, **fields: object) -> draft_pb2.Block:
        """What a proposer that knows the truth drafts, with fields changed."""
        session, base = self.session(name), len(self.texts[name])
        tokens = [truth(name, base + i) for i in range(length)]
        values = {
            **{"session": session.id, "epoch": session.epoch},
            **{"base_len": base, "token_ids": tokens, "draft_us": 100, **fields},
        }
        return draft_pb2.Block(**values)  # type: ignore[arg-type]

    def post(self, proposer: AttachedProposer, *blocks: draft_pb2.Block) -> None:
        self.hub.blocks.receive(proposer, blocks)

    def step(self, *names: str) -> dict[str, list[int]]:
        """Run a step of some rows, or all; return the drafts for the next one."""
        batch = list(names or self.texts)
        drafts = {name: self.drafts.pop(name, []) for name in batch}
        scheduled = {name: 1 + len(draft) for name, draft in drafts.items()}
        new, finished, self.new, self.finished = self.new, self.finished, [], []
        plan = adapter.StepPlan(new, finished, {n: d for n, d in drafts.items() if d}, scheduled)
        self.plugin.begin(plan)
        self.plugin.launched()
        emitted = [self._verified(name, draft) for name, draft in drafts.items()]
        self.batch.req_ids = batch
        lengths = np.array([len(self.texts[name]) for name in batch], dtype=np.int32)
        table = np.zeros((len(batch), CONTEXT + K + 1), dtype=np.int32)
        for row, name in enumerate(batch):
            table[row, : len(self.texts[name])] = self.texts[name]
        proposed = self.plugin.propose(emitted, lengths, table)
        assert len(proposed) == len(batch)
        assert all(len(draft) <= K for draft in proposed)
        assert all(0 <= token < VOCAB for draft in proposed for token in draft)
        self.drafts = dict(zip(batch, proposed, strict=True))
        return dict(self.drafts)

    def _verified(self, name: str, draft: list[int]) -> list[int]:
        text, emitted = self.texts[name], [truth(name, len(self.texts[name]))]
        while len(emitted) <= len(draft) and draft[len(emitted) - 1] == emitted[-1]:
            emitted.append(truth(name, len(text) + len(emitted)))
        text += emitted
        return emitted

    def finish(self, name: str) -> None:
        """End a request as vLLM does: the next step says so."""
        del self.texts[name]
        self.drafts.pop(name, None)
        self.finished.append(name)
