"""Verification rules other than coupled: what the target chooses, given what was drafted.

All rules share one frame. At each place of a row the scorer names one token, its choice; a drafted
token is accepted exactly when it is the choice and all before it were accepted (`verifier.verify`).
The coupled choice is the target's own draw and does not look at the draft. Under the rules here the
choice at a drafted place may be the drafted token itself:

rejection     with chance min(1, target_prob / draft_prob), else a draw from what the draft lacks of
              the target's distribution (Leviathan et al. 2023; Chen et al. 2023): exact in law
typical       if the target finds it not untypical (Medusa, Cai et al. 2024): lossy
top_p_window  if it is a candidate, or what follows it reconciles (PaddleNLP): lossy

The first three functions are the definitions, a row at a time; `apply_rules` is them, batched.
docs/sampling.md argues why rejection keeps the law. With temperature 0 every rule is coupled.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from outrider.draft_tree import DraftProbs
from outrider.engine.sampling.coupled import (
    Lane,
    SamplingBatch,
    gumbel_noise,
    process_logits,
    seed_keys,
    uniforms,
)
from outrider.params import SamplingParams, TokenIds, Verification, VerificationRule
from outrider.types import Request

_MAX_PROBS = 2**22  # held at once: 8 bytes each, and several times over


def rule_of(request: Request) -> VerificationRule:
    """The rule that a request is verified by: without randomness every rule is coupled."""
    if request.sampling.greedy:
        return VerificationRule.COUPLED
    return request.speculation.verification.rule


def is_coupled(request: Request) -> bool:
    """Whether a request's choices do not look at its drafts."""
    return rule_of(request) is VerificationRule.COUPLED


def lane_of(request: Request) -> Lane:
    """The noise with which the target draws where it does not look at a draft."""
    return Lane.RECOVER if rule_of(request) is VerificationRule.REJECTION else Lane.SHARED


# The definitions. `target_probs` [vocab] is after all processing: edits, temperature, cuts.


def rejection(
    drafted: int,
    draft_probs: DraftProbs | None,
    target_probs: Sequence[float],
    uniform: float,
    noise: Sequence[float],
) -> int:
    """The choice at one drafted place; `noise` is standard Gumbel noise, one per token.

    No `draft_probs`: the draft is a point mass. Where rounding leaves nothing of the residual, the
    draw is from the target's own distribution.
    """
    ids, probs = draft_probs or ((drafted,), (1.0,))
    total = sum(probs)  # float32 values sum to 1 only about
    lacking = [*target_probs]
    for token, prob in zip(ids, probs, strict=True):
        lacking[token] = max(0.0, lacking[token] - prob / total)
    if uniform * probs[ids.index(drafted)] / total < target_probs[drafted]:
        return drafted
    residual = lacking if any(lacking) else target_probs
    scores = [math.log(p) + g if p > 0 else -math.inf for p, g in zip(residual, noise, strict=True)]
    return scores.index(max(scores))


def typical(
    drafted: int, target_probs: Sequence[float], drawn: int, epsilon: float, alpha: float
) -> int:
    """The choice at one drafted place; `drawn` is the target's own coupled draw."""
    entropy = -sum(p * math.log(p) for p in target_probs if p > 0)
    threshold = min(epsilon, alpha * math.exp(-entropy))
    return drafted if target_probs[drafted] > threshold else drawn


def top_p_window(
    draft: TokenIds,
    target_probs: Sequence[Sequence[float]],
    allowed: Sequence[bool],
    drawn: Sequence[int],
    max_candidate_len: int,
    verify_window: int,
) -> list[int]:
    """The choices at all drafted places of a row; `drawn` are the target's coupled draws.

    Candidates are the likeliest tokens that top_k, top_p and min_p leave, at most so many, with
    ties. A draft outside of them needs a whole window of drafts after it that are likeliest tokens,
    and must be `allowed`: cut perhaps, but not masked.
    """
    ranks = [sum(p > probs[t] for p in probs) for t, probs in zip(draft, target_probs, strict=True)]
    choices = []
    for i, token in enumerate(draft):
        candidate = ranks[i] < max_candidate_len and target_probs[i][token] > 0
        window = ranks[i + 1 : i + 1 + verify_window]
        reconciled = allowed[i] and len(window) == verify_window and not any(window)
        choices.append(token if candidate or reconciled else drawn[i])
    return choices


# Batched.


@dataclass(frozen=True, slots=True)
class RuledRow:
    """A row with a draft under a rule that is not coupled."""

    first: int  # place of its first row of logits
    draft: TokenIds
    draft_probs: tuple[DraftProbs | None, ...]  # empty: point masses
    position: int  # of the first drafted token
    sampling: SamplingParams
    verification: Verification


def apply_rules(logits: Tensor, rows: Sequence[RuledRow], drawn: Tensor) -> None:
    """Put the rules' choices at the drafted places of `rows` into `drawn`, in place.

    logits [num_logits, vocab]; drawn int64 [num_logits] holds the target's own draws, with the
    noise of `lane_of`. Rows do not affect each other.
    """
    device = logits.device
    at_once = max(1, _MAX_PROBS // logits.shape[-1])
    for rule, choices in _BATCHED.items():
        ruled = [row for row in rows if row.verification.rule is rule]
        for part in _parts(ruled, at_once):
            places = [row.first + i for row in part for i in range(len(row.draft))]
            drafted = [token for row in part for token in row.draft]
            at = torch.tensor(places).to(device, non_blocking=True)
            params = [row.sampling for row in part for _ in row.draft]
            batch = SamplingBatch.build(params, places, device)  # no draw: positions are not used
            own = logits[at]
            to_compare = torch.tensor(drafted).to(device, non_blocking=True)
            drawn[at] = choices(
                _Places(
                    rows=part,
                    drafted=to_compare,
                    target_probs=process_logits(own, batch).double().softmax(dim=-1),
                    allowed=own.gather(1, to_compare[:, None])[:, 0] > -torch.inf,
                    drawn=drawn[at],
                )
            )


@dataclass(frozen=True, slots=True)
class _Places:
    """The n drafted places of some rows."""

    rows: Sequence[RuledRow]
    drafted: Tensor  # int64 [n]
    target_probs: Tensor  # float64 [n, vocab]
    allowed: Tensor  # bool [n]: the drafted token is not masked
    drawn: Tensor  # int64 [n]: the target's own draws


def _parts(rows: Sequence[RuledRow], at_once: int) -> Iterator[Sequence[RuledRow]]:
    """The rows in parts of about `at_once` drafted places."""
    start = places = 0
    for end, row in enumerate(rows):
        if end > start and places + len(row.draft) > at_once:
            yield rows[start:end]
            start, places = end, 0
        places += len(row.draft)
    if start < len(rows):
        yield rows[start:]


# Per rule: the choices int64 [n].


def _rejections(places: _Places) -> Tensor:
    rows, drafted, target_probs = places.rows, places.drafted, places.target_probs
    device, count = drafted.device, len(drafted)
    positions = torch.tensor([row.position + i for row in rows for i in range(len(row.draft))])
    seeds = [row.sampling.seed for row in rows for _ in row.draft]
    positions = positions.to(device, non_blocking=True)
    accept = seed_keys(seeds, [Lane.ACCEPT] * count).to(device, non_blocking=True)
    recover = seed_keys(seeds, [Lane.RECOVER] * count).to(device, non_blocking=True)
    ids, draft_probs = (each.to(device, non_blocking=True) for each in _padded_probs(rows))
    prob = (draft_probs * (ids == drafted[:, None])).sum(dim=1)
    target_prob = target_probs.gather(1, drafted[:, None])[:, 0]
    accepted = uniforms(accept, positions) * prob < target_prob
    residual = target_probs.scatter_add(1, ids, -draft_probs).clamp_(min=0.0)
    scores = residual.log() + gumbel_noise(recover, positions, target_probs.shape[-1])
    recovered = torch.where(residual.sum(dim=1) > 0.0, scores.argmax(dim=1), places.drawn)
    return torch.where(accepted, drafted, recovered)


def _padded_probs(rows: Sequence[RuledRow]) -> tuple[Tensor, Tensor]:
    """What each drafted token was drawn from: int64 [n, w], float64 [n, w], padded with zeros."""
    each = [
        drawn_from or DraftProbs((token,), (1.0,))
        for row in rows
        for token, drawn_from in zip(
            row.draft, row.draft_probs or (None,) * len(row.draft), strict=True
        )
    ]
    width = max([len(probs.token_ids) for probs in each])
    ids = [(*probs.token_ids, *(0,) * (width - len(probs.token_ids))) for probs in each]
    padded = [(*probs.probs, *(0.0,) * (width - len(probs.probs))) for probs in each]
    draft_probs = torch.tensor(padded, dtype=torch.float64)
    return torch.tensor(ids), draft_probs / draft_probs.sum(dim=1, keepdim=True)


def _typical(places: _Places) -> Tensor:
    rows, drafted, target_probs = places.rows, places.drafted, places.target_probs
    settings = [
        (row.verification.epsilon, row.verification.alpha) for row in rows for _ in row.draft
    ]
    limits = torch.tensor(settings, dtype=torch.float64).to(drafted.device, non_blocking=True)
    entropy = torch.special.entr(target_probs).sum(dim=1)
    threshold = torch.minimum(limits[:, 0], limits[:, 1] * (-entropy).exp())
    target_prob = target_probs.gather(1, drafted[:, None])[:, 0]
    return torch.where(target_prob > threshold, drafted, places.drawn)


def _top_p_window(places: _Places) -> Tensor:
    rows, drafted, target_probs = places.rows, places.drafted, places.target_probs
    device, count = drafted.device, len(drafted)
    most: list[int] = []
    begin: list[int] = []
    end: list[int] = []
    fits: list[bool] = []
    for row in rows:
        window = row.verification.verify_window
        last = len(begin) + len(row.draft)
        for place in range(len(begin), last):
            most.append(row.verification.max_candidate_len)
            begin.append(place + 1)
            end.append(min(place + 1 + window, count))
            fits.append(place + 1 + window <= last)
    windows = torch.tensor((most, begin, end, fits)).to(device, non_blocking=True)
    target_prob = target_probs.gather(1, drafted[:, None])
    ranks = (target_probs > target_prob).sum(dim=1)
    candidate = (ranks < windows[0]) & (target_prob[:, 0] > 0.0)
    failing = torch.nn.functional.pad((ranks > 0).cumsum(dim=0), (1, 0))  # among those before
    agrees = (failing[windows[2]] == failing[windows[1]]) & windows[3].bool()
    return torch.where(candidate | (agrees & places.allowed), drafted, places.drawn)


_BATCHED = {
    VerificationRule.REJECTION: _rejections,
    VerificationRule.TYPICAL: _typical,
    VerificationRule.TOP_P_WINDOW: _top_p_window,
}
