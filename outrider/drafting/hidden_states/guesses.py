"""Chains of which every token is chosen by its row's own rule: under rejection, or a constraint."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

from torch import Tensor

from outrider.draft_tree import DraftProbs
from outrider.drafting.drafters import DraftInput
from outrider.drafting.hidden_states.forward import LEAD
from outrider.drafting.hidden_states.heads.base import OneShotHead
from outrider.drafting.likeliest import draw_of_likeliest, possible
from outrider.engine.sampling.noise import Lane
from outrider.engine.sampling.sample import SamplingBatch, sample


def guess_chains(
    head: OneShotHead, states: Tensor, tokens: Tensor, rows: Sequence[DraftInput], lane: Lane
) -> list[tuple[list[int], list[DraftProbs | None]]]:
    """Draw token by token, with `Lane.DRAFT` also the distributions.

    `states` and `tokens` int64 [n] are those that `head.guess` takes.
    """
    states = head.begin(states)
    drawn: list[list[int]] = [[] for _ in rows]
    drawn_from: list[list[DraftProbs | None]] = [[] for _ in rows]
    params = SamplingBatch.build(
        [row.sampling for row in rows],
        [row.end + LEAD - 1 for row in rows],
        head.device,
        [lane] * len(rows),
    )
    for depth in range(min(max(row.wanted for row in rows), head.max_depth)):
        states, logits = head.step(states, tokens, depth)
        for i, row in enumerate(rows):
            if row.mask is not None:
                row.mask.edit(logits[i : i + 1], ())
        here = replace(params, position=params.position + depth)
        if lane is Lane.DRAFT:
            tokens, ids, probs = draw_of_likeliest(logits, here)
            for at, *likeliest in zip(drawn_from, ids.tolist(), probs.tolist(), strict=True):
                at.append(possible(*likeliest))
        else:
            tokens = sample(logits, here)
        for row, chain, token in zip(rows, drawn, tokens.tolist(), strict=True):
            chain.append(token)
            if row.mask is not None:
                row.mask.commit((token,))
    return [
        (chain[: row.wanted], probs[: row.wanted])
        for row, chain, probs in zip(rows, drawn, drawn_from, strict=True)
    ]
