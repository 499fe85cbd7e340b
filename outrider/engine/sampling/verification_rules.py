"""Verification rules other than coupled: the target's choice, given the draft.

All rules share one frame. At each place of a row the scorer names one token, its choice; a drafted
token is accepted exactly when it is the choice and all before it were accepted (`verify_rows`). The
coupled choice is the target's own draw and does not look at the draft. Under the rules here the
choice at a drafted place may be the drafted token itself:

rejection     with chance min(1, target_prob / draft_prob), else a draw from the residual of the
              target's distribution (Leviathan et al. 2023; Chen et al. 2023): exact in law
block         if the draft up to it, or further, is likely enough (Sun et al. 2024): exact in law,
              and accepts no less than rejection
typical       if the target finds the token typical enough (Medusa, Cai et al. 2024): lossy
top_p_window  if the token is a candidate, or the tokens after it agree (PaddleNLP): lossy

docs/sampling.md argues why the exact ones keep the law. With temperature 0 every rule is coupled.
The definitions, a row at a time, are in tests/support/models/verification.py.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from outrider.draft_tree import DraftProbs
from outrider.engine.batch import grouped
from outrider.engine.sampling.noise import Lane, gumbel_noise, seed_keys, uniforms
from outrider.engine.sampling.sample import SamplingBatch, process_logits
from outrider.params import SamplingParams, TokenIds, Verification, VerificationRule

_MAX_PROBS = 2**22  # held at once: 8 bytes each, and several times over


@dataclass(frozen=True, slots=True)
class RuledRow:
    """A row whose rule looks at its draft."""

    first: int  # its first row of logits
    draft: TokenIds
    draft_probs: tuple[DraftProbs | None, ...]  # empty: point masses
    position: int  # of the first drafted token
    sampling: SamplingParams
    verification: Verification


@dataclass(frozen=True, slots=True)
class _Places:
    """The n drafted places of some rows."""

    rows: Sequence[RuledRow]
    drafted: Tensor  # int64 [n]
    target_probs: Tensor  # float64 [n, vocab]
    allowed: Tensor  # bool [n]: the drafted token is not masked
    drawn: Tensor  # int64 [n]: the target's own draws

    def tensor(self, values: Sequence[object], dtype: torch.dtype | None = None) -> Tensor:
        return torch.tensor(values, dtype=dtype).to(self.drafted.device, non_blocking=True)

    @property
    def positions(self) -> Tensor:
        """int64 [n]."""
        return self.tensor([row.position + i for row in self.rows for i in range(len(row.draft))])

    def uniforms(self, seeds: Sequence[int]) -> Tensor:
        """Return float64 [n] that decide on acceptance, by a seed for each row."""
        of_places = [s for s, row in zip(seeds, self.rows, strict=True) for _ in row.draft]
        keys = seed_keys(of_places, [Lane.ACCEPT] * len(of_places))
        return uniforms(keys.to(self.drafted.device, non_blocking=True), self.positions)

    @property
    def drafted_prob(self) -> Tensor:
        """float64 [n, 1]: the target's probability of the drafted token."""
        return self.target_probs.gather(1, self.drafted[:, None])


def apply_rules(logits: Tensor, rows: Sequence[RuledRow], drawn: Tensor) -> None:
    """Put the rules' choices at the drafted places of `rows` into `drawn`, in place.

    logits [num_logits, vocab]; drawn int64 [num_logits] holds the target's own draws, under
    rejection and block with the noise of `Lane.RECOVER`. Rows do not affect each other.
    """
    device = logits.device
    most = max(1, _MAX_PROBS // logits.shape[-1])
    for rule, choices in _BATCHED.items():
        of_rule = [row for row in rows if row.verification.rule is rule]
        for group in grouped(of_rule, lambda row: len(row.draft), most):
            places = [row.first + i for row in group for i in range(len(row.draft))]
            at = torch.tensor(places).to(device, non_blocking=True)
            tokens = [token for row in group for token in row.draft]
            drafted = torch.tensor(tokens).to(device, non_blocking=True)
            params = [row.sampling for row in group for _ in row.draft]
            batch = SamplingBatch.build(params, places, device)  # nothing is drawn by position
            probs = process_logits(logits[at], batch).double().softmax(dim=-1)
            allowed = logits[at, drafted] > -torch.inf
            drawn[at] = choices(_Places(group, drafted, probs, allowed, drawn[at]))


# Per rule: the choices int64 [n].


def _rejections(places: _Places) -> Tensor:
    drawn_from = _DrawnFrom.of(places)
    uniform = places.uniforms([row.sampling.seed for row in places.rows])
    accepted = uniform * drawn_from.prob < places.drafted_prob[:, 0]
    recovered = _recovered(places, drawn_from.residual(places.target_probs))
    return torch.where(accepted, places.drafted, recovered)


def _blocks(places: _Places) -> Tensor:
    """Accept by `ratio`: how likely the target is to write the draft, over how likely it was drawn.

    It is of the draft so far, and capped at 1 from place to place. A round ends at the last place
    that passes. (Sun et al. 2024, arXiv 2403.10444, algorithm 2.)
    """
    drawn_from, lens = _DrawnFrom.of(places), [len(row.draft) for row in places.rows]
    most = max(lens)
    flat = [row * most + i for row, count in enumerate(lens) for i in range(count)]
    at, ends = places.tensor(flat), places.tensor(lens)[:, None]

    def padded(values: Tensor) -> Tensor:  # [n] to [rows, most]
        return values.new_zeros(len(lens) * most).index_copy_(0, at, values).view(-1, most)

    ratios = [torch.ones_like(ends[:, 0], dtype=torch.float64)]
    for step in padded(places.drafted_prob[:, 0] / drawn_from.prob).unbind(1):
        ratios.append((ratios[-1] * step).clamp(max=1.0))
    ratio = torch.stack(ratios, dim=1)  # [rows, most + 1]
    before = ratio[:, :-1].flatten()[at]
    residual = drawn_from.residual(before[:, None] * places.target_probs)
    left = residual.sum(dim=1)
    # Where place i fails, the round may still end behind it.
    seeds = [row.sampling.of_draft(row.position).seed for row in places.rows]
    uniform = padded(places.uniforms(seeds))
    inside = uniform[:, :-1] * padded(left + 1 - before)[:, 1:] <= padded(left)[:, 1:]
    place = torch.arange(1, most + 1, device=at.device)
    inside = torch.nn.functional.pad(inside, (0, 1)) & (place < ends)
    whole = (uniform < ratio[:, 1:]) & (place == ends)
    accepted = ((inside | whole) * place).amax(dim=1, keepdim=True)
    kept = (place <= accepted).flatten()[at]
    return torch.where(kept, places.drafted, _recovered(places, residual))


def _recovered(places: _Places, residual: Tensor) -> Tensor:
    """Return a draw from each residual [n, vocab], or the target's own where there is none."""
    seeds = [row.sampling.seed for row in places.rows for _ in row.draft]
    keys = seed_keys(seeds, [Lane.RECOVER] * len(seeds)).to(residual.device, non_blocking=True)
    scores = residual.log() + gumbel_noise(keys, places.positions, residual.shape[-1])
    return torch.where(residual.sum(dim=1) > 0.0, scores.argmax(dim=1), places.drawn)


@dataclass(frozen=True, slots=True)
class _DrawnFrom:
    """The distributions that the n drafted tokens were drawn from."""

    ids: Tensor  # int64 [n, width]
    probs: Tensor  # float64 [n, width], summing to 1
    prob: Tensor  # float64 [n]: of the drafted token

    @classmethod
    def of(cls, places: _Places) -> _DrawnFrom:
        rows = places.rows
        drawn_from = [
            probs or DraftProbs((token,), (1.0,))
            for row in rows
            for token, probs in zip(
                row.draft, row.draft_probs or (None,) * len(row.draft), strict=True
            )
        ]
        width = max([len(probs.token_ids) for probs in drawn_from])
        padding = [(0,) * (width - len(probs.token_ids)) for probs in drawn_from]
        of_rows = [*zip(drawn_from, padding, strict=True)]
        ids = places.tensor([(*probs.token_ids, *fill) for probs, fill in of_rows])
        found = places.tensor([(*probs.probs, *fill) for probs, fill in of_rows], torch.float64)
        found /= found.sum(dim=1, keepdim=True)
        return cls(ids, found, (found * (ids == places.drafted[:, None])).sum(dim=1))

    def residual(self, target_probs: Tensor) -> Tensor:
        """Return what of `target_probs` [n, vocab] is above these."""
        return target_probs.scatter_add(1, self.ids, -self.probs).clamp_(min=0.0)


def _typical(places: _Places) -> Tensor:
    settings = [row.verification for row in places.rows for _ in row.draft]
    epsilon = places.tensor([each.epsilon for each in settings], torch.float64)
    alpha = places.tensor([each.alpha for each in settings], torch.float64)
    entropy = torch.special.entr(places.target_probs).sum(dim=1)
    threshold = torch.minimum(epsilon, alpha * (-entropy).exp())
    return torch.where(places.drafted_prob[:, 0] > threshold, places.drafted, places.drawn)


def _top_p_window(places: _Places) -> Tensor:
    """Accept candidates: the likeliest tokens that top_k, top_p and min_p leave, with ties.

    Another draft needs a whole window of drafts after it that are likeliest tokens.
    """
    windows: list[tuple[int, int, int]] = []  # candidates, and the window's begin and end
    for row in places.rows:
        last = len(windows) + len(row.draft)
        for place in range(len(windows) + 1, last + 1):
            after = place + row.verification.verify_window
            end = after if after <= last else -1
            windows.append((row.verification.max_candidate_len, place, end))
    most, begins, ends = places.tensor(windows).unbind(dim=1)
    ranks = (places.target_probs > places.drafted_prob).sum(dim=1)
    candidate = (ranks < most) & (places.drafted_prob[:, 0] > 0.0)
    failing = torch.nn.functional.pad((ranks > 0).cumsum(dim=0), (1, 0))  # among those before
    agrees = (failing[ends.clamp(min=0)] == failing[begins]) & (ends >= 0)
    return torch.where(candidate | (agrees & places.allowed), places.drafted, places.drawn)


_BATCHED = {
    VerificationRule.REJECTION: _rejections,
    VerificationRule.BLOCK: _blocks,
    VerificationRule.TYPICAL: _typical,
    VerificationRule.TOP_P_WINDOW: _top_p_window,
}
