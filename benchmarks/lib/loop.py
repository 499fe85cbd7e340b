"""An engine and a drafting method in one process: the method drafts between steps.

Nothing overlaps, so CPU time says what a round costs, and other work on the machine disturbs
little.
"""

from __future__ import annotations

import time
from dataclasses import dataclass
from typing import Final, cast

from outrider.config import EngineConfig
from outrider.draft_port import DraftOffer, PostedBlock
from outrider.drafting.proposer import FeatureProposer, Proposer, SessionStart
from outrider.engine.engine import Engine
from outrider.engine.hidden_states.streams import HiddenStateStreams
from outrider.engine.model.paged_model import PagedModel
from outrider.features import FeatureBatch, FeatureOrder, FeatureWindow
from outrider.params import TokenIds
from outrider.policy.fixed import FixedPolicy
from outrider.types import Commit, Request, RequestStats

_PROPOSER: Final = "proposer"


@dataclass(frozen=True)
class Outcome:
    """One request from its first token to its last. Times are CPU seconds of the process."""

    token_ids: TokenIds
    stats: RequestStats
    decode_s: float  # after the first token, drafting included
    draft_s: tuple[float, ...]  # of each draft; the first one processes the prompt


def engine_config(model: PagedModel, k: int) -> EngineConfig:
    """Return the configuration of an engine with K draft tokens and no prefix cache."""
    return EngineConfig(
        page_size=model.page_size,
        num_pages=model.num_pages,
        max_model_len=min(model.max_model_len, model.page_size * model.num_pages),
        num_speculative_tokens=k,
        enable_prefix_caching=False,
    )


def engine_of(
    model: PagedModel, config: EngineConfig, k: int
) -> tuple[Engine, HiddenStateStreams | None]:
    """Return an engine that takes `k` draft tokens in every round, and its hidden states."""
    pool = model.pools.features
    streams = None if pool is None else HiddenStateStreams(pool)
    policy = FixedPolicy(k, max_wait_s=60.0)  # it never waits: drafts come between steps
    return Engine(model, config, policy=policy, features=streams), streams


class Loop:
    """Runs requests one after the other."""

    def __init__(self, model: PagedModel, k: int) -> None:
        """Make an engine that drafts `k` tokens in every round."""
        self._engine, self._streams = engine_of(model, engine_config(model, k), k)

    def run(self, request: Request, method: Proposer | None, k: int) -> Outcome:
        """Run a request with drafts of at most `k` tokens."""
        engine, session = self._engine, request.session_id
        engine.submit(request)
        if method is not None:
            self._open(request, method, k)
        tokens: list[int] = []
        draft_s: list[float] = []
        began = 0.0
        while True:
            commit = self._step(method)
            began = began or time.process_time()
            tokens += commit.token_ids
            if commit.finish_reason is not None:
                break
            if method is not None:
                wanted = commit.num_draft_tokens
                method.commit(session, commit.base_len, commit.token_ids, wanted)
                if wanted:
                    draft_s.append(self._draft(method, session))
        decode_s = time.process_time() - began
        if method is not None:
            method.close(session)
        assert commit.stats is not None
        return Outcome(tuple(tokens), commit.stats, decode_s, tuple(draft_s))

    def _open(self, request: Request, method: Proposer, k: int) -> None:
        prompt, speculation = request.prompt_token_ids, request.speculation
        start = SessionStart(
            prompt,
            request.sampling,
            k,
            len(prompt) + request.stop.max_tokens,
            advice=speculation.advice,
            rule=speculation.verification.rule,
        )
        method.open(request.session_id, start)
        spec = method.traits.features
        order = None if spec is None else FeatureOrder(0, spec, FeatureWindow())
        self._engine.set_drafting(request.session_id, DraftOffer(_PROPOSER, k, features=order))

    def _step(self, method: Proposer | None) -> Commit:
        """Step until the request commits tokens."""
        while True:
            events = self._engine.step()
            if events is None:
                continue
            self._feed(method, events.features)
            if events.commits:
                return events.commits[0]

    def _draft(self, method: Proposer, session: int) -> float:
        """Post a draft, and return the CPU seconds that it took."""
        seconds = 0.0
        while True:
            began = time.process_time()
            round_ = method.draft([session])
            seconds += time.process_time() - began
            assert not round_.lost
            for _, tree in round_.drafts:
                name, micros = method.traits.method, round(seconds * 1e6)
                block = PostedBlock(session, tree, _PROPOSER, micros, method=name)
                self._engine.post_block(block)
            if not round_.unfinished:
                return seconds
            self._engine.collect()  # a long prompt's hidden states come in parts
            events = self._engine.finalize_step()
            self._feed(method, None if events is None else events.features)

    def _feed(self, method: Proposer | None, batch: FeatureBatch | None) -> None:
        for each in batch.rows if batch is not None else ():
            assert self._streams is not None
            cast(FeatureProposer, method).features(each.session_id, each.start, each.rows)
            self._streams.give_back(each.window, len(each.rows))
