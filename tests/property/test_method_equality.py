"""Whatever drafts, and whatever it copies from, a request's text is the one it has alone."""

from __future__ import annotations

from collections.abc import Callable

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from outrider.config import EngineConfig
from outrider.draft_port import DraftOffer, PostedBlock
from outrider.drafting.copying.deterministic import DeterministicProposer
from outrider.drafting.copying.ngram import NgramProposer
from outrider.drafting.copying.suffix import SuffixProposer
from outrider.drafting.draft_model.proposer import DraftModelProposer
from outrider.drafting.hybrid import HybridProposer
from outrider.drafting.proposer import NO_PACE, DraftRound, Proposer, SessionStart
from outrider.engine.engine import Engine
from outrider.params import Advice, SamplingParams, SpeculationParams, StopParams
from outrider.policy.base import FixedPolicy
from outrider.types import Commit, Request
from tests.support.models.hash_model import HashModel, Sequential

VOCAB, OUTPUT, K = 5, 24, 128
TRUTH = Sequential(HashModel(VOCAB, num_pages=1))
METHODS: dict[str, Callable[[], Proposer]] = {
    "ngram": lambda: NgramProposer(prompt_lookup_min=1, max_draft_tokens=K),
    "suffix": lambda: SuffixProposer(max_draft_tokens=K),
    "deterministic": DeterministicProposer,
    "hybrid": lambda: HybridProposer(
        [
            DeterministicProposer(),
            SuffixProposer(),
            DraftModelProposer(HashModel(VOCAB, num_pages=64, max_model_len=256), name="hash"),
        ]
    ),
}


class Pair:
    """An engine and a proposer, each message delivered at once."""

    def __init__(self, proposer: Proposer) -> None:
        config = EngineConfig(max_model_len=256, num_pages=64, page_size=8)
        model = HashModel(VOCAB, config.page_size, config.num_pages, config.max_model_len)
        self.proposer = proposer
        self.now = 0.0
        self.engine = Engine(model, config, policy=FixedPolicy(K), clock=lambda: self.now)

    def run(self, requests: dict[int, Request]) -> dict[int, Commit]:
        """The last commits, by session; their texts have been compared."""
        texts: dict[int, list[int]] = {i: [] for i in requests}
        last: dict[int, Commit] = {}
        wanting = list(requests)
        for i, request in requests.items():
            self.engine.submit(request)
            ahead = self.proposer.traits.runs_ahead
            self.engine.set_drafting(i, DraftOffer("p", K, runs_ahead=ahead))
            prompt = request.prompt_token_ids
            start = SessionStart(
                prompt, request.sampling, K, len(prompt) + OUTPUT, advice=request.speculation.advice
            )
            self.proposer.open(i, start)
        while len(last) < len(requests):
            self.now += 1.0
            self.post(self.proposer.draft(wanting))
            if self.proposer.traits.runs_ahead:
                self.post(self.proposer.ahead(wanting, NO_PACE))
            events = self.engine.step()
            self.engine.check_invariants()
            for commit in events.commits if events else ():
                i = commit.session_id
                texts[i] += commit.token_ids
                if commit.finish_reason is not None:
                    last[i] = commit
                    wanting.remove(i)
                    self.proposer.close(i)
                else:
                    k = commit.num_draft_tokens
                    self.proposer.commit(i, commit.base_len, commit.token_ids, k)
        for i, request in requests.items():
            alone = TRUTH.tokens(request.prompt_token_ids, request.sampling, OUTPUT)
            assert tuple(texts[i]) == tuple(alone)
        return last

    def post(self, round_: DraftRound) -> None:
        names = self.proposer.traits.methods or (self.proposer.traits.method,)
        for key, tree in (*round_.drafts, *round_.trees):
            name = names[round_.methods.get(key, 0)]
            self.engine.post_block(PostedBlock(key, tree, "p", 10, method=name))


@pytest.mark.parametrize("method", METHODS)
@settings(max_examples=25)
@given(
    prompts=st.lists(
        st.lists(st.integers(0, VOCAB - 1), min_size=1, max_size=30), min_size=1, max_size=4
    ),
    temperature=st.sampled_from((0.0, 1.0)),
    edit=st.booleans(),
    noise=st.lists(st.tuples(st.integers(0, OUTPUT), st.integers(0, VOCAB - 1)), max_size=4),
)
def test_speculation_with_any_method_keeps_the_plain_text(
    method: str,
    prompts: list[list[int]],
    temperature: float,
    edit: bool,
    noise: list[tuple[int, int]],
) -> None:
    pair = Pair(METHODS[method]())
    for first in (1, 101):  # the second time with what the first left behind
        requests = {}
        for i, prompt in enumerate(prompts, start=first):
            sampling = SamplingParams(temperature=temperature, seed=7)
            advice = list(TRUTH.tokens(tuple(prompt), sampling, OUTPUT))
            for place, token in noise:
                advice.insert(place, token)
            requests[i] = Request(
                session_id=i,
                prompt_token_ids=tuple(prompt),
                sampling=sampling,
                stop=StopParams(max_tokens=OUTPUT),
                speculation=SpeculationParams(
                    num_speculative_tokens=K, advice=Advice(token_ids=tuple(advice), edit=edit)
                ),
            )
        last = pair.run(requests)
    stats = [commit.stats for commit in last.values() if commit.stats is not None]
    for each in stats:
        assert sum(counts.drafted for counts in each.by_method) == each.drafted
        assert sum(counts.accepted for counts in each.by_method) == each.accepted
    if not noise and (method == "suffix" or (method == "deterministic" and edit)):
        assert all(each.accepted > 0 for each in stats), "the same again is foreseen"
