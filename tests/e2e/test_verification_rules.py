"""Verification rules over real processes: a draft model that samples, a scorer that weighs."""

from __future__ import annotations

import asyncio
from dataclasses import dataclass

import pytest

from outrider.rpc import codec
from outrider.v1 import common_pb2, generation_pb2
from tests.support.services.options import GenerateOptions
from tests.support.services.up import Completion, Up, complete

pytestmark = pytest.mark.timeout(400)

PROMPT = "def fibonacci(n):\n    return n if n < 2 else fibonacci(n - 1) + fibonacci("
RULES = {rule.value: number for rule, number in codec.RULE_TO_PROTO.items()}


@dataclass(frozen=True)
class Ruled(GenerateOptions):
    """A completion under a verification rule."""

    rule: str = "coupled"

    def to_proto(self) -> generation_pb2.GenerateRequest:
        request = super().to_proto()
        request.speculation.verification.rule = RULES[self.rule]
        return request


async def say(stack: Up, rule: str, temperature: float, seed: int = 3) -> Completion:
    options = Ruled(
        prompt=PROMPT,
        max_tokens=60,
        ignore_eos=True,
        aux_info=True,
        temperature=temperature,
        seed=seed,
        num_speculative_tokens=4,
        rule=rule,
    )
    return await complete(stack.grpc, options, timeout_s=120)


@pytest.mark.parametrize("rule", RULES)
async def test_verification_rule_when_used_drafts_and_is_reported(
    draft_model_stack: Up, rule: str
) -> None:
    # At 1.0 rejection accepts next to none of this random pair's drafts.
    done = await say(draft_model_stack, rule, temperature=0.3)
    aux = done.aux
    assert (aux.verification, aux.exact) == (rule, rule in ("coupled", "rejection", "block"))
    assert len(done.token_ids) == aux.output_len == 60
    assert 0 < aux.accepted <= aux.drafted  # the lossy ones may accept everything
    assert common_pb2.TOKEN_KIND_ACCEPTED in done.kinds
    assert list(aux.proposer_ids) == ["proposer-draft_model"]


async def test_verification_rules_side_by_side_keep_coupled_text(draft_model_stack: Up) -> None:
    stack = draft_model_stack
    alone = await say(stack, "coupled", temperature=0.9)
    greedy = await say(stack, "coupled", temperature=0.0)
    sampled = [say(stack, rule, 0.9) for rule in RULES]
    together = await asyncio.gather(*sampled, *(say(stack, rule, 0.0) for rule in RULES))
    texts = dict(zip(RULES, together, strict=False))
    assert texts["coupled"].token_ids == alone.token_ids
    for without_randomness in together[len(RULES) :]:
        assert without_randomness.token_ids == greedy.token_ids
