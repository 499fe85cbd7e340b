"""The shipped share of late drafts, for a proposer that drafts after each commit."""

from __future__ import annotations

import re
from collections.abc import Sequence

from outrider.counts import DRAFT_FATES
from outrider.v1 import draft_pb2
from tests.support.kubernetes.promql import ROOT
from tests.support.services.scorer import PacedModel, running_scorer
from tests.support.services.scripted_proposer import (
    Drafted,
    ScriptedProposer,
    block,
    proposing,
)

PROMPT = [5, 6, 7]
greedy_text = PacedModel().greedy_text
SHARES = {
    "alert": "k8s/chart/outrider/files/alerts.yaml",
    "autoscaler": "k8s/examples/rendered/remote-draft-pool.yaml",
    "dashboard": "k8s/chart/outrider/files/dashboards/capacity.json",
}
"""Files with an expression of the share: the late rounds of a pool, then all rounds of a pool."""


def answer(session: Drafted) -> Sequence[draft_pb2.Block]:
    """Drafts after each Commit, but has no guess at every third length."""
    length = len(session.tokens)
    if length == len(PROMPT):
        return []
    tokens = greedy_text(session.tokens, session.num_draft_tokens)
    return [block(session, tokens if length % 3 else [])]


async def test_pool_rounds_that_wanted_a_draft_are_counted_once_by_fate() -> None:
    async with (
        running_scorer(pause_s=0.002) as scorer,
        proposing(ScriptedProposer(scorer.stub, answer)),
    ):
        outputs = [await scorer.generate([*PROMPT[:2], i], max_tokens=120) for i in range(3)]
        rounds = {
            fate: scorer.metric("pool_rounds_total", pool="test", fate=fate) for fate in DRAFT_FATES
        }
    assert outputs[0].token_ids == greedy_text([*PROMPT[:2], 0], 120)
    wanted = sum(output.aux_info.iter_count - 1 for output in outputs)  # but the prompts' steps
    assert sum(rounds.values()) == wanted > 60
    # Nothing is drafted ahead: a draft comes while its row waits, or just before it is looked at.
    assert rounds["waited"] + rounds["hit"] > 0.4 * wanted
    assert rounds["none"] > 0
    for name, path in SHARES.items():
        text = (ROOT / path).read_text().replace("\\", "")
        late, every = re.findall(r"rate\(outrider:pool_rounds_total(?:{([^}]*)})?", text)[:2]
        assert re.findall(r'fate="(\w+)"', late) == ["late"], name
        assert "fate" not in every, name
    assert rounds["late"] / wanted < 0.1, "at which a pool grows"
