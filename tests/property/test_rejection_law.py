"""What a whole engine emits under a verification rule: its law, and what it must not depend on."""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Callable, Sequence
from functools import cache
from itertools import product

import numpy as np
import pytest
import torch

from outrider.config import EngineConfig
from outrider.draft_port import DraftOffer, PostedBlock
from outrider.draft_tree import DraftProbs, DraftTree
from outrider.drafting.draft_model.proposer import DraftModelProposer
from outrider.drafting.likeliest import draw_of_likeliest
from outrider.drafting.proposer import ProposerLimits, SessionStart
from outrider.engine.engine import Engine
from outrider.engine.sampling.constraint import ConstraintCompiler
from outrider.engine.sampling.noise import Lane, seed_keys, uniforms
from outrider.engine.sampling.sample import SamplingBatch, process_logits
from outrider.params import (
    REQUEST_RULES,
    Constraint,
    ConstraintKind,
    SamplingParams,
    SpeculationParams,
    StopParams,
    Verification,
    VerificationRule,
)
from outrider.policy.base import FixedPolicy
from outrider.types import Commit, Request
from tests.support.models.byte_tokenizer import byte_tokenizer
from tests.support.models.hash_model import HashModel, Sequential
from tests.unit.sampling.test_sampling import chi_square_limit

VOCAB, LENGTH, PROMPT = 3, 5, (1, 2)
Draw = tuple[int, DraftProbs]  # a token, and what it was drawn from
NUM_REQUESTS = 2000
PAGES = {"page_size": 8, "num_pages": NUM_REQUESTS, "max_model_len": 8}
REJECTION = SpeculationParams(verification=Verification(VerificationRule.REJECTION))
BLOCK = SpeculationParams(verification=Verification(VerificationRule.BLOCK))
TARGET = HashModel(VOCAB, **PAGES, peak=1.5)


class OtherModel(HashModel):
    """Disagrees with the target more often than not."""

    def _logits(self, states: np.ndarray) -> np.ndarray:
        return super()._logits(states ^ np.uint64(0x5BD1E995))


class Drafts:
    """Drafts for requests as their text grows."""

    def opened(self, request: Request) -> None: ...

    def committed(self, commit: Commit) -> None: ...

    def trees(self) -> list[tuple[int, DraftTree]]:
        """What is to be posted before the next step."""
        raise NotImplementedError


class ByDraftModel(Drafts):
    """The real method."""

    def __init__(self, k: int) -> None:
        model = OtherModel(VOCAB, **PAGES, peak=1.5)
        self.method = DraftModelProposer(
            model, name="other", limits=ProposerLimits(max_sessions=NUM_REQUESTS)
        )
        self.k = k
        self.wanting: list[int] = []

    def opened(self, request: Request) -> None:
        session, prompt = request.session_id, request.prompt_token_ids
        start = SessionStart(
            prompt,
            request.sampling,
            self.k,
            len(prompt) + LENGTH,
            rule=request.speculation.verification.rule,
        )
        self.method.open(session, start)

    def committed(self, commit: Commit) -> None:
        if commit.finish_reason is not None:
            self.method.close(commit.session_id)
            return
        k = commit.num_draft_tokens
        self.method.commit(commit.session_id, commit.base_len, commit.token_ids, k)
        self.wanting.append(commit.session_id)

    def trees(self) -> list[tuple[int, DraftTree]]:
        drafts = self.method.draft(self.wanting).drafts
        self.wanting = []
        return drafts


@cache
def draws(samplings: tuple[SamplingParams, ...]) -> dict[tuple[int, ...], list[Draw]]:
    """For every text but the longest, a draw of each request after the prompt and that text."""
    model = OtherModel(VOCAB, **PAGES, peak=1.5)
    drawn = {}
    for path in (path for n in range(LENGTH - 1) for path in product(range(VOCAB), repeat=n)):
        text = [*PROMPT, *path]
        logits = torch.from_numpy(model.logits_of(text)).expand(len(samplings), -1)
        place = sum((token + 1) * 4**i for i, token in enumerate(path))  # other noise by path
        params = [sampling.of_draft(place) for sampling in samplings]
        lanes = [Lane.DRAFT] * len(params)
        batch = SamplingBatch.build(params, [len(text)] * len(params), lanes=lanes)
        parts = (part.tolist() for part in draw_of_likeliest(logits, batch))
        drawn[path] = [
            (token, DraftProbs(tuple(ids), tuple(probs)))
            for token, ids, probs in zip(*parts, strict=True)
        ]
    return drawn


class ByTrees(Drafts):
    """All at once, before the first token: a tree of every text, which the rounds walk.

    The first child of a node is drawn from the draft model, or `greedy` the first of it; its
    siblings are point masses. `claim` is what the tree says of the draw.
    """

    def __init__(
        self,
        claim: Callable[[DraftProbs], DraftProbs | None] = lambda true: true,
        *,
        greedy: bool = False,
    ) -> None:
        self.claim, self.greedy = claim, greedy
        self.requests: list[Request] = []

    def opened(self, request: Request) -> None:
        self.requests.append(request)

    def trees(self) -> list[tuple[int, DraftTree]]:
        if not self.requests:
            return []
        drawn = draws(tuple(request.sampling for request in self.requests))
        trees = []
        for i, request in enumerate(self.requests):
            tokens: list[int] = []
            parents: list[int] = []
            probs: list[DraftProbs | None] = []
            nodes = {(): -1}
            for path, each in drawn.items():
                first, drawn_from = each[i]
                if self.greedy:
                    first = drawn_from.token_ids[0]
                for token in (first, *(t for t in range(VOCAB) if t != first)):
                    nodes[*path, token] = len(tokens)
                    tokens.append(token)
                    parents.append(nodes[path])
                    probs.append(self.claim(drawn_from) if token == first else None)
            tree = DraftTree(len(PROMPT), tuple(tokens), tuple(parents), tuple(probs))
            trees.append((request.session_id, tree))
        self.requests = []
        return trees


def run(requests: Sequence[Request], drafts: Drafts, k: int) -> dict[int, list[int]]:
    """What each request emits, all together in one engine."""
    now = 0.0
    config = EngineConfig(
        **PAGES, max_num_seqs=500, max_num_batched_tokens=8192, num_speculative_tokens=k
    )
    model = HashModel(VOCAB, **PAGES, peak=1.5)
    engine = Engine(model, config, policy=FixedPolicy(k, max_wait_s=0.01), clock=lambda: now)
    outputs: dict[int, list[int]] = {request.session_id: [] for request in requests}
    for request in requests:
        engine.submit(request)
        engine.set_drafting(request.session_id, DraftOffer("p", k))
        drafts.opened(request)
    running, accepted = set(outputs), 0
    while running:
        for session, tree in drafts.trees():
            engine.post_block(PostedBlock(session, tree, "p", 1))
        events = engine.step()
        if events is None:
            now = engine.wake_at
            continue
        assert not events.failures
        for commit in events.commits:
            outputs[commit.session_id] += commit.token_ids
            drafts.committed(commit)
            if commit.finish_reason is not None:
                assert commit.stats is not None
                accepted += commit.stats.accepted
                running.discard(commit.session_id)
    assert accepted or len(requests) == 1, "nothing was put to the test"
    return outputs


def requests_with(params: SamplingParams, speculation: SpeculationParams) -> list[Request]:
    """The same request with many seeds."""
    return [
        Request(
            i,
            PROMPT,
            SamplingParams(params.temperature, params.top_k, params.top_p, seed=i),
            StopParams(max_tokens=LENGTH),
            speculation,
        )
        for i in range(NUM_REQUESTS)
    ]


def law(params: SamplingParams) -> dict[tuple[int, ...], float]:
    """The chance of every text under the target alone."""
    chances = {(): 1.0}
    batch = SamplingBatch.build([params], [0])
    for _ in range(LENGTH):
        longer = {}
        for path, chance in chances.items():
            logits = torch.from_numpy(TARGET.logits_of([*PROMPT, *path]))[None]
            probs = process_logits(logits, batch).double().softmax(dim=-1)[0].tolist()
            longer.update({(*path, t): chance * prob for t, prob in enumerate(probs) if prob})
        chances = longer
    return chances


def chi_square(outputs: dict[int, list[int]], params: SamplingParams) -> tuple[float, float]:
    """The statistic of whole texts, and its limit; rare texts are counted together."""
    expected = {text: len(outputs) * chance for text, chance in law(params).items()}
    counts = Counter(tuple(tokens) for tokens in outputs.values())
    assert counts.keys() <= expected.keys(), "a text with a token that was cut"
    rare = [text for text, number in expected.items() if number < 5]
    cells = [(counts[text], number) for text, number in expected.items() if number >= 5]
    if rare:
        cells.append((sum(counts[t] for t in rare), sum(expected[t] for t in rare)))
    statistic = math.fsum((count - number) ** 2 / number for count, number in cells)
    return statistic, chi_square_limit(len(cells) - 1)


CASES: dict[str, Callable[[], tuple[Drafts, int, SamplingParams]]] = {
    "draft model, K = 1, hot, top_k": lambda: (ByDraftModel(1), 1, SamplingParams(1.6, top_k=2)),
    "draft model, K = 2, cold, top_p": lambda: (ByDraftModel(2), 2, SamplingParams(0.6, top_p=0.8)),
    "draft model, K = 4": lambda: (ByDraftModel(4), 4, SamplingParams(1.0)),
    "late trees, K = 2": lambda: (ByTrees(), 2, SamplingParams(1.0)),
    "point masses, K = 3": lambda: (ByTrees(lambda _: None, greedy=True), 3, SamplingParams(0.8)),
}


@pytest.mark.parametrize("speculation", [REJECTION, BLOCK], ids=["rejection", "block"])
@pytest.mark.parametrize("case", CASES)
def test_sampled_drafts_with_any_draft_probs_emit_the_target_distribution(
    case: str, speculation: SpeculationParams
) -> None:
    drafts, k, params = CASES[case]()
    statistic, limit = chi_square(run(requests_with(params, speculation), drafts, k), params)
    assert statistic < limit


def test_block_with_the_noise_of_rejected_drafts_is_biased(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Why each draft has a seed of its own; and the test above can fail."""
    monkeypatch.setattr(SamplingParams, "of_draft", lambda params, _: params)
    params = SamplingParams(1.0)
    statistic, limit = chi_square(run(requests_with(params, BLOCK), ByDraftModel(4), 4), params)
    assert statistic > limit


def test_rejection_with_wrong_draft_probs_is_biased() -> None:
    """And coupled does not: docs/sampling.md warns of it. The test above can fail."""
    params = SamplingParams(1.0)

    def lie(drawn_from: DraftProbs) -> DraftProbs:
        return DraftProbs(drawn_from.token_ids, tuple(reversed(drawn_from.probs)))

    statistic, limit = chi_square(run(requests_with(params, REJECTION), ByTrees(lie), 3), params)
    assert statistic > limit
    coupled = run(requests_with(params, SpeculationParams())[:100], ByTrees(lie), 3)
    truth = Sequential(TARGET)
    for i, tokens in coupled.items():
        sampling = SamplingParams(1.0, seed=i)
        assert tokens == truth.tokens(PROMPT, sampling, LENGTH)


@pytest.mark.parametrize("k", [1, 3])
def test_rules_in_one_batch_are_independent(k: int) -> None:
    samplings = (SamplingParams(0.0), SamplingParams(1.0), SamplingParams(0.7, top_p=0.7))
    requests = [
        Request(
            i,
            PROMPT,
            SamplingParams(params.temperature, top_p=params.top_p, seed=1000 + i),
            StopParams(max_tokens=LENGTH),
            SpeculationParams(verification=Verification(rule)),
        )
        for i, (rule, params, _) in enumerate(product(REQUEST_RULES, samplings, range(4)))
    ]
    together = run(requests, ByTrees(), k)
    assert together == run(requests, ByTrees(), k)
    truth = Sequential(TARGET)
    lossy = 0
    for request in requests:
        tokens, rule = together[request.session_id], request.speculation.verification.rule
        expected = truth.tokens(PROMPT, request.sampling, LENGTH)
        if request.sampling.greedy or rule is VerificationRule.COUPLED:
            assert tokens == expected
        elif not rule.exact:
            lossy += tokens != expected
        assert run([request], ByTrees(), k) == {request.session_id: tokens}, "alone"
    assert lossy, "the lossy rules never took a draft that the target did not choose"


def test_rejection_with_constraint_rejects_forbidden_draws() -> None:
    """Half of what is drafted is forbidden; were it left out, its place would be drawn anew."""
    tokenizer = byte_tokenizer()
    zero, one, other = (tokenizer.token_to_id(text) for text in "01x")
    vocab_size, count = tokenizer.get_vocab_size(), 1500
    constraint = Constraint(ConstraintKind.REGEX, "[01]{3}")
    compiler = ConstraintCompiler(tokenizer.to_str(), vocab_size, frozenset())
    sizes = {"page_size": 8, "num_pages": count, "max_model_len": 8}
    config = EngineConfig(
        **sizes, max_num_seqs=count, max_num_batched_tokens=4 * count, num_speculative_tokens=2
    )
    model = HashModel(vocab_size, **sizes, peak=0.4)
    engine = Engine(model, config, policy=FixedPolicy(2, max_wait_s=0.0))
    drawn_from = DraftProbs((zero, other), (0.5, 0.5))
    requests = [
        Request(i, PROMPT, SamplingParams(seed=i), StopParams(3), REJECTION, constraint=constraint)
        for i in range(count)
    ]
    keys = seed_keys(range(count), [Lane.DRAFT] * count)
    draws = [
        (uniforms(keys, torch.full((count,), len(PROMPT) + place)) < 0.5).tolist()
        for place in range(2)
    ]
    for request, *picks in zip(requests, *draws, strict=True):
        engine.submit(request, compiler.editor(constraint, request.stop))
        engine.set_drafting(request.session_id, DraftOffer("p", 2))
        chain = [zero if pick else other for pick in picks]
        engine.post_block(
            PostedBlock(
                request.session_id, DraftTree.chain(len(PROMPT), chain, [drawn_from] * 2), "p", 1
            )
        )
    outputs: dict[int, list[int]] = {request.session_id: [] for request in requests}
    running = set(outputs)
    while running:
        events = engine.step()
        assert events is not None
        for commit in events.commits:
            outputs[commit.session_id] += commit.token_ids
            if commit.finish_reason is not None:
                running.discard(commit.session_id)
    expected = {(): float(count)}
    for _ in range(3):
        longer = {}
        for path, number in expected.items():
            logits = torch.from_numpy(model.logits_of([*PROMPT, *path]))[[zero, one]].double()
            for token, prob in zip((zero, one), logits.softmax(dim=0).tolist(), strict=True):
                longer[*path, token] = number * prob
        expected = longer
    counts = Counter(tuple(tokens) for tokens in outputs.values())
    assert counts.keys() <= expected.keys()
    statistic = sum((counts[text] - number) ** 2 / number for text, number in expected.items())
    assert statistic < chi_square_limit(len(expected) - 1)
