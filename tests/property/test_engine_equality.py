"""Whatever happens around a request, its text is the one it would have had alone.

The model hashes the whole context that it reads back through the block tables, so any mistake in
paging, rollback, prefix sharing or verification changes the output.
"""

from __future__ import annotations

import random
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from outrider.config import EngineConfig
from outrider.draft_port import DraftOffer, PostedBlock
from outrider.draft_tree import DraftTree, chain_parents
from outrider.drafted_nodes import DraftNodes
from outrider.engine.engine import Engine
from outrider.errors import InternalError
from outrider.params import SamplingParams, SpeculationParams, StopParams
from outrider.policy.adaptive import AdaptivePolicy
from outrider.policy.base import FixedPolicy, Policy
from outrider.policy.row import Drafting
from outrider.types import Commit, FinishReason, Request, StepEvents, TokenKind, TokenLogprobs
from tests.support.models.at_once import AtOnce
from tests.support.models.hash_model import HashModel, Sequential

VOCAB = 24
EOS = frozenset({3})
MAX_LEN = 40
TRUTH = Sequential(HashModel(VOCAB, num_pages=1))
SAMPLINGS = (
    SamplingParams(temperature=0.0),
    SamplingParams(temperature=0.0, seed=9),
    SamplingParams(temperature=1.0, seed=5),
    SamplingParams(temperature=0.7, seed=2**64 - 1, top_k=6, min_p=0.05),
    SamplingParams(temperature=1.6, seed=77, top_p=0.8),
    SamplingParams(temperature=0.0, repetition_penalty=1.8),
    SamplingParams(temperature=0.0, frequency_penalty=0.7, logit_bias=((3, 4.5), (7, -2.0))),
    SamplingParams(temperature=0.9, seed=6, presence_penalty=1.9, frequency_penalty=-0.4),
    SamplingParams(
        temperature=1.0, seed=8, min_p=0.02, repetition_penalty=0.6, logit_bias=((3, 100.0),)
    ),
)
BASES = [tuple(random.Random(i).randrange(VOCAB) for _ in range(MAX_LEN)) for i in range(4)]


@dataclass
class Client:
    """One request as its caller sees it."""

    request: Request
    tokens: list[int]
    kinds: list[TokenKind]
    logprobs: list[TokenLogprobs]
    last: Commit | None = None

    @property
    def committed(self) -> tuple[int, ...]:
        return (*self.request.prompt_token_ids, *self.tokens)


class Scenario:
    """An engine, its clients and a clock, driven by one source of randomness."""

    def __init__(self, rng: random.Random, config: EngineConfig, policy: Policy) -> None:
        self.rng = rng
        self.now = 0.0
        self.model = HashModel(VOCAB, config.page_size, config.num_pages, MAX_LEN)
        self.engine = Engine(
            self.model,
            config,
            eos_token_ids=EOS,
            policy=policy,
            runner=AtOnce(self.model),
            clock=self.clock,
        )
        self.samplings: Sequence[SamplingParams] = SAMPLINGS
        self.top_logprobs: Sequence[int | None] = (None, None, 0, 3)
        self.clients: dict[int, Client] = {}
        self.open: set[int] = set()
        self.ahead = 0  # steps that were launched behind another one

    def clock(self) -> float:
        self.now += self.rng.random() * 0.001
        return self.now

    def submit(self) -> None:
        rng = self.rng
        base = rng.choice(BASES)
        max_tokens = rng.randint(1, 16)
        prompt = base[: rng.randint(1, MAX_LEN - 1 if rng.random() < 0.1 else 20)]
        request = Request(
            session_id=len(self.clients),
            prompt_token_ids=prompt,
            sampling=rng.choice(self.samplings),
            stop=StopParams(
                max_tokens=max_tokens,
                stop_token_ids=frozenset(rng.sample(range(VOCAB), rng.randint(0, 1))),
                ignore_eos=rng.random() < 0.5,
                min_tokens=rng.randint(0, max_tokens) if rng.random() < 0.3 else 0,
            ),
            speculation=SpeculationParams(
                enabled=rng.random() < 0.95,
                num_speculative_tokens=rng.choice((None, None, 0, 1, 4, 8)),
            ),
            top_logprobs=rng.choice(self.top_logprobs),
            num_resumed_tokens=rng.choice((0, 0, rng.randint(0, len(prompt) - 1))),
        )
        self.engine.info.check(request)
        self.engine.submit(request)
        self.clients[request.session_id] = Client(request, [], [], [])
        self.open.add(request.session_id)
        if rng.random() < 0.9:
            ahead, k = rng.random() < 0.3, rng.choice((1, 4, 8, 20))
            self.engine.set_drafting(request.session_id, DraftOffer("a", k, runs_ahead=ahead))

    def draft(self) -> None:
        """Posts a block that is right, partly right, wrong, late, from the future, or garbage."""
        rng = self.rng
        client = self.clients[rng.choice(sorted(self.clients))]
        committed, prompt_len = client.committed, len(client.request.prompt_token_ids)
        base = rng.choice((len(committed), len(committed), prompt_len, len(committed) + 2))
        base = max(0, base - rng.choice((0, 0, 0, 1, 5)))
        truth = TRUTH.stream(client.request, max(0, base + 12 - prompt_len), EOS)
        future = [*client.request.prompt_token_ids, *truth][base : base + rng.randint(0, 12)]
        path = [t if rng.random() < 0.9 else rng.randrange(VOCAB) for t in future]
        tokens, parents = list(path), list(range(-1, len(path) - 1))
        for _ in range(rng.choice((0, 0, 3, 10))):  # side branches, some of them garbage
            parents.append(rng.randint(-1, len(tokens) - 1))
            tokens.append(rng.randrange(VOCAB))
        if rng.random() < 0.2:  # the right path is not the preferred one
            tokens, parents = [1, *tokens], [-1, *(p + 1 if p >= 0 else -1 for p in parents)]
        if rng.random() < 0.3:
            tokens, parents = scattered(path, rng)
        told = rng.randbytes(len(tokens)) if rng.random() < 0.7 else b""
        tree = DraftTree.validated(base, tokens, parents, VOCAB, 64, confidences=told)
        self.engine.post_block(
            PostedBlock(client.request.session_id, tree, rng.choice("aaaab"), 100)
        )

    def abort(self) -> None:
        session = self.rng.choice(sorted(self.open))
        self.engine.abort(session)
        self.open.discard(session)

    def attach(self, proposer_id: str | None) -> None:
        self.engine.set_drafting(self.rng.choice(sorted(self.open)), DraftOffer(proposer_id, 4))

    def fail_a_forward(self) -> None:
        """The model raises after it wrote; the step's requests end, and nothing it wrote stays."""
        self.model.fail_next = True
        events = self.engine.step()
        self.model.fail_next = False
        if events is not None:
            assert events.failures
            assert all(isinstance(failure.error, InternalError) for failure in events.failures)
            self.open.difference_update(failure.session_id for failure in events.failures)

    def step(self) -> bool:
        """One step, or several of which each is launched before the one before is told of.

        Some are launched before the one before is even collected.
        """
        launched = stepped = self.engine.launch()
        while launched:
            self.engine.check_invariants()  # in flight, too
            ahead = self.rng.random() < 0.7 and self.go_ahead()
            self.ahead += ahead
            self.engine.collect()
            self.engine.check_invariants()
            launched = ahead or (self.rng.random() < 0.5 and self.go_on())
            events = self.engine.finalize_step()
            assert events is not None
            self.take_events(events)
        return stepped

    def go_on(self) -> bool:
        """What comes between a result and the next launch."""
        for _ in range(self.rng.choice((0, 1, 4))):
            self.draft()
        if self.open and self.rng.random() < 0.1:
            self.attach(self.rng.choice(("a", "b", None)))
        return self.engine.launch()

    def go_ahead(self) -> bool:
        """Let requests come and go while a step is in flight, and launch one behind it."""
        if len(self.clients) < 20 and self.rng.random() < 0.2:
            self.submit()
        if self.open and self.rng.random() < 0.1:
            self.abort()
        return self.engine.launch_ahead()

    def take_events(self, events: StepEvents) -> None:
        assert not events.failures
        for commit in events.commits:
            client = self.clients[commit.session_id]
            assert commit.session_id in self.open, "an event after the last one"
            assert commit.base_len == len(client.committed)
            assert len(commit.kinds) == len(commit.token_ids)
            client.tokens += commit.token_ids
            client.kinds += commit.kinds
            client.logprobs += commit.logprobs
            if commit.finish_reason is not None:
                client.last = commit
                self.open.discard(commit.session_id)
        self.check_counts(events)

    def act(self) -> None:
        chance = self.rng.random()
        if chance < 0.1:
            self.submit()
        elif chance < 0.4 and self.clients:
            self.draft()
        elif chance < 0.42 and self.open:
            self.abort()
        elif chance < 0.45 and self.open:
            self.attach(self.rng.choice((None, "a", "b")))
        elif chance < 0.6:
            self.now += self.rng.choice((0.001, 0.01))
        else:
            self.step()
        self.engine.check_invariants()

    def finish(self) -> None:
        """Runs everything to its end, and compares with the truth."""
        for _ in range(5000):
            if not self.open:
                break
            if self.rng.random() < 0.5:
                self.draft()
            if not self.step():
                assert self.engine.wake_at < self.now + 1.0, "rows wait without a deadline"
                self.now = max(self.now, self.engine.wake_at)
        assert not self.open, "livelock"
        self.engine.check_invariants()
        snapshot = self.engine.snapshot()
        assert (snapshot.running, snapshot.waiting) == (0, 0)
        assert snapshot.free_pages == snapshot.total_pages
        for client in self.clients.values():
            tokens, reason = TRUTH.output(client.request, MAX_LEN, EOS)
            assert client.tokens == tokens[: len(client.tokens)]
            self.check_logprobs(client)
            if client.last is not None:
                assert client.tokens == tokens
                self.check_stats(client, client.last, reason)

    def check_counts(self, events: StepEvents) -> None:
        """A step counts what it emitted, after trimming."""
        counts = events.counts
        assert counts is not None
        emitted = [kind for commit in events.commits for kind in commit.kinds]
        assert counts.output_tokens == len(emitted)
        accepted = sum(accepted * n for (_, accepted), n in counts.rounds.items())
        assert accepted == emitted.count(TokenKind.ACCEPTED)

    def check_logprobs(self, client: Client) -> None:
        """One per token, and of the model's own distribution at its place."""
        top = client.request.top_logprobs
        assert len(client.logprobs) == (0 if top is None else len(client.tokens))
        if not client.logprobs:
            return
        truth = TRUTH.logprobs(client.request.prompt_token_ids, client.tokens)
        for token, returned, logprobs in zip(client.tokens, client.logprobs, truth, strict=True):
            assert abs(returned.logprob - logprobs[token]) < 1e-5
            assert [likely for likely, _ in returned.top] == np.argsort(-logprobs)[:top].tolist()
            assert all(abs(logprob - logprobs[likely]) < 1e-5 for likely, logprob in returned.top)

    def check_stats(self, client: Client, last: Commit, reason: FinishReason) -> None:
        stats = last.stats
        assert stats is not None
        assert last.finish_reason is reason
        assert stats.output_tokens == len(client.tokens)
        assert stats.accepted == client.kinds.count(TokenKind.ACCEPTED)
        assert stats.accepted == sum(stats.accepted_per_pos)
        assert stats.rounds == sum(stats.k_histogram)
        assert stats.drafted == sum(k * n for k, n in enumerate(stats.k_histogram))
        assert stats.rounds <= stats.iter_count
        # Each round emits its accepted tokens and one more, which a stop may cut off.
        assert stats.output_tokens - stats.accepted in (stats.rounds, stats.rounds - 1)
        assert stats.hits + stats.misses_late + stats.misses_wrong <= stats.iter_count


def scattered(path: list[int], rng: random.Random) -> tuple[list[int], list[int]]:
    """`path` as nodes of a tree among others that are siblings, or garbage below them."""
    tokens: list[int] = []
    parents: list[int] = []
    reached = -1
    for token in path:
        for _ in range(rng.randrange(3)):
            parents.append(rng.choice((reached, rng.randint(-1, len(tokens) - 1))))
            tokens.append(rng.randrange(VOCAB))
        parents.append(reached)
        reached = len(tokens)
        tokens.append(token)
    return tokens, parents


configs = st.builds(
    lambda page_size, spare, budget, rows, caching: EngineConfig(
        page_size=page_size,
        num_pages=-(-MAX_LEN // page_size) + spare,
        max_num_seqs=rows,
        max_num_batched_tokens=budget,
        max_model_len=MAX_LEN,
        enable_prefix_caching=caching,
    ),
    page_size=st.sampled_from((1, 2, 4, 8)),
    spare=st.sampled_from((0, 1, 3, 8, 40)),
    budget=st.sampled_from((1, 2, 5, 16, 64)),
    rows=st.sampled_from((1, 2, 3, 8)),
    caching=st.booleans(),
)


class Pruning(FixedPolicy):
    """Verifies any part of the drafts that tell confidences."""

    def __init__(self, num_speculative_tokens: int, seed: int) -> None:
        super().__init__(num_speculative_tokens, max_wait_s=0.002)
        self._rng = random.Random(seed)

    def cut(self, drafts: Sequence[tuple[Drafting, DraftNodes]], *_: int) -> list[bool]:
        chosen: list[bool] = []
        for _, nodes in drafts:
            kept: list[bool] = []
            for parent in nodes.parents or chain_parents(len(nodes.confidences)):
                kept.append((parent < 0 or kept[parent]) and self._rng.random() < 0.8)
            chosen += kept
        return chosen


def policies(k: int) -> st.SearchStrategy[Policy]:
    patient = st.builds(FixedPolicy, st.just(k), max_wait_s=st.sampled_from((0.0, 0.002, 0.05)))
    pruning = st.builds(Pruning, st.just(k), st.integers(0, 2**32))
    return patient | pruning | st.builds(AdaptivePolicy, st.just(k))


def check(seed: int, config: EngineConfig, policy: Policy) -> None:
    scenario = Scenario(random.Random(seed), config, policy)
    for _ in range(40):
        scenario.act()
    scenario.finish()


quietly: Any = {
    "deadline": None,
    "derandomize": True,
    "suppress_health_check": list(HealthCheck),
}
scenarios: Any = {
    "seed": st.integers(0, 2**32),
    "config": configs,
    "policy": st.integers(0, 8).flatmap(policies),
}


@pytest.mark.timeout(600)  # a quarter of a minute on a machine of its own
@settings(max_examples=200, **quietly)
@given(**scenarios)
def test_engine_under_any_schedule_equals_sequential_decoding(**scenario: Any) -> None:
    check(**scenario)


@pytest.mark.slow
@pytest.mark.timeout(3600)
@settings(max_examples=5000, **quietly)
@given(**scenarios)
def test_engine_under_thousands_of_schedules_equals_sequential_decoding(**scenario: Any) -> None:
    check(**scenario)
