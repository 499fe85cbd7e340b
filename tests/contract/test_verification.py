"""Verification rules over real RPC: what a proposer says of its draws reaches the engine, or is
refused."""

from __future__ import annotations

import struct
from collections.abc import Callable

import pytest

from outrider.draft_tree import DraftTree
from outrider.rpc import codec
from outrider.v1 import common_pb2, draft_pb2, scorer_pb2
from tests.contract.test_proposer_stream import hash_model_proposer, ngram_config, running
from tests.support.services.draft_scorer import DraftScorer, open_
from tests.support.services.scorer import RunningScorer, generate_request, running_scorer
from tests.support.services.scripted_proposer import Drafted, ScriptedProposer, block, proposing

PROMPT = [3, 1, 4, 1, 5, 9, 2, 6]
RULES = {rule.value: number for rule, number in codec.RULE_TO_PROTO.items()}


def probs(values: dict[int, float]) -> draft_pb2.DraftProbs:
    packed = struct.pack(f"<{len(values)}f", *values.values())
    return draft_pb2.DraftProbs(token_ids=values, probs=packed)


def fives(*draft_probs: draft_pb2.DraftProbs) -> Callable[[Drafted], list[draft_pb2.Block]]:
    """Drafts nothing but token 5."""

    def script(session: Drafted) -> list[draft_pb2.Block]:
        k = session.num_draft_tokens
        drawn_from = draft_probs * k if len(draft_probs) == 1 else draft_probs
        return [block(session, [5] * k, draft_probs=drawn_from)] if k else []

    return script


async def generate(
    scorer: RunningScorer, rule: str, temperature: float = 1.0
) -> tuple[list[int], common_pb2.AuxInfo]:
    request = generate_request(PROMPT, max_tokens=24, temperature=temperature)
    request.speculation.verification.rule = RULES[rule]
    tokens: list[int] = []
    last: scorer_pb2.ScorerServiceGenerateResponse | None = None
    async for last in scorer.stub.Generate(request, timeout=30):
        tokens += last.token_ids
    assert last is not None
    return tokens, last.aux_info


async def test_rejection_with_draft_probs_weighs_them() -> None:
    hardly = probs({5: 1e-4, 7: 1 - 1e-4})  # so little that the target always finds it likelier
    async with running_scorer() as scorer:
        async with proposing(ScriptedProposer(scorer.stub, fives(hardly))) as proposer:
            tokens, aux = await generate(scorer, "rejection")
            assert proposer.opens[0].verification_rule == RULES["rejection"]
            assert (aux.verification, aux.exact) == ("rejection", True)
            assert aux.accepted == aux.drafted > 0
            assert tokens.count(5) >= aux.accepted
        async with proposing(ScriptedProposer(scorer.stub, fives())):
            tokens, aux = await generate(scorer, "rejection")
            assert aux.drafted > aux.accepted, "a point mass is accepted with the target's chance"
        assert scorer.metric("draft_blocks_total", fate="malformed") == 0


@pytest.mark.parametrize("rule", RULES)
async def test_verification_when_greedy_is_the_same_under_every_rule(rule: str) -> None:
    async with running_scorer() as scorer:
        plain, aux = await generate(scorer, rule, temperature=0.0)
        assert (aux.verification, aux.exact) == (rule, rule in ("coupled", "rejection", "block"))
        hardly = probs({5: 1e-4, 7: 1 - 1e-4})
        async with proposing(ScriptedProposer(scorer.stub, fives(hardly))):
            tokens, aux = await generate(scorer, rule, temperature=0.0)
        coupled, _ = await generate(scorer, "coupled", temperature=0.0)
        assert tokens == plain == coupled
        assert aux.drafted > 0


MALFORMED = {
    "not a number": (probs({5: float("nan"), 6: 0.5}),),
    "no distribution": (probs({5: 0.5, 6: 0.6}),),
    "odd bytes": (draft_pb2.DraftProbs(token_ids=[5], probs=b"abc"),),
    "one for several": (probs({5: 1.0}), probs({5: 1.0})),
    "more tokens than probabilities": (
        draft_pb2.DraftProbs(token_ids=[5, 6], probs=struct.pack("<f", 1.0)),
    ),
}


@pytest.mark.parametrize("what", MALFORMED)
@pytest.mark.parametrize("rule", ["coupled", "rejection"])
async def test_verification_with_invalid_distributions_drops_and_counts_them(
    rule: str, what: str
) -> None:
    async with running_scorer() as scorer:
        plain, _ = await generate(scorer, rule)
        async with proposing(ScriptedProposer(scorer.stub, fives(*MALFORMED[what]))):
            tokens, aux = await generate(scorer, rule)
        assert scorer.metric("draft_blocks_total", fate="malformed") > 0
        assert aux.drafted == 0
        assert tokens == plain, "as if nobody had drafted"


@pytest.mark.parametrize("rule", RULES)
@pytest.mark.parametrize("temperature", [0.0, 1.0])
async def test_draft_model_under_rejection_sends_its_distributions(
    rule: str, temperature: float
) -> None:
    scorer = DraftScorer()
    address = await scorer.start()
    try:
        async with running(ngram_config(address), hash_model_proposer()):
            stream = await scorer.attached()
            opened = open_(1, PROMPT, temperature=temperature, seed=5)
            opened.verification_rule = RULES[rule]
            stream.send(opens=[opened])
            sent = await stream.next_block()
    finally:
        await scorer.stop()
    assert len(sent.token_ids) == 4
    drawn = rule in ("rejection", "block") and temperature > 0
    assert len(sent.draft_probs) == (4 if drawn else 0)
    tree = DraftTree.validated(
        sent.base_len,
        sent.token_ids,
        sent.parents,
        vocab_size=32,
        max_nodes=4,
        probs=[codec.draft_probs_from_proto(each) for each in sent.draft_probs],
    )
    assert None not in tree.probs
