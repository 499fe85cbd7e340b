"""Measures acceptance on the target's own greedy text.

A drafted chain equals the text for as long as it is accepted. So one teacher-forced pass over text
that the target wrote tells how far a chain from each position would reach, and rounds can be
replayed from that alone.
"""

from __future__ import annotations

from dataclasses import asdict, dataclass

import torch
from torch import Tensor

from outrider.train.head import Head
from outrider.train.target import Target

WELL_TRAINED = (0.8, 0.6, 0.4)
"""RTP-LLM's rule: the first, second and third drafted token should be accepted more often."""


@dataclass(frozen=True)
class Acceptance:
    """Acceptance of chains of K drafted tokens."""

    matches: tuple[float, ...]
    """Right guesses by position, given the text up to it."""
    reached: tuple[float, ...]
    """Rounds in which the position was accepted: all guesses up to it right."""
    mean_length: float
    """Tokens per round: accepted ones and the target's own."""

    @property
    def below_rule(self) -> tuple[int, ...]:
        """Return the positions, from 1, that are accepted too seldom for a well trained head."""
        shares = zip(self.reached, WELL_TRAINED, strict=False)
        return tuple(i for i, (share, rule) in enumerate(shares, 1) if share <= rule)

    def lines(self) -> list[str]:
        """Return a table for the log, and the verdict."""
        header = "position    " + "".join(f"{i:>8}" for i in range(1, len(self.reached) + 1))
        rule = [f"> {share:.0%}" for share in WELL_TRAINED[: len(self.reached)]]
        below = " and ".join(map(str, self.below_rule))
        verdict = "well trained: accepted as often as the rule asks for"
        if below:
            verdict = (
                f"below the rule at position {below}: train longer, and on more of the target's "
                "own text"
            )
        return [
            header,
            "matches     " + "".join(f"{value:8.3f}" for value in self.matches),
            "accepted    " + "".join(f"{value:8.3f}" for value in self.reached),
            "rule        " + "".join(f"{text:>8}" for text in rule),
            f"mean acceptance length {self.mean_length:.3f}",
            verdict,
        ]

    def facts(self) -> dict[str, object]:
        """Return what training.json holds."""
        verdict = {"rule": WELL_TRAINED[: len(self.reached)], "below_rule": self.below_rule}
        return {**asdict(self), **verdict, "well_trained": not self.below_rule}


@torch.no_grad()
def acceptance(
    head: Head, target: Target, text: Tensor, prompt_length: int, num_steps: int
) -> Acceptance:
    """Replay rounds on `text [rows, n]`, of which the target wrote all after the prompt."""
    parts = [_matches(head, target, part, num_steps) for part in torch.split(text, 64)]
    match = torch.cat(parts)  # [rows, base, step]: the chain that begins at row base
    return replay(match[:, prompt_length - 2 :])  # a chain's first guess is the token at base + 2


def replay(match: Tensor) -> Acceptance:
    """Play rounds, one row of text after the other; `match [rows, base, step]` is 1 or 0."""
    reached = match.cumprod(-1)
    accepted = reached.sum(-1)
    counts = torch.zeros(match.shape[-1])
    rounds = 0
    for row, lengths in enumerate(accepted.tolist()):
        base = 0
        while base < len(lengths):
            rounds += 1
            counts += reached[row, base]
            base += int(lengths[base]) + 1
    shares = (counts / rounds).tolist()
    return Acceptance(tuple(match.float().mean((0, 1)).tolist()), tuple(shares), 1 + sum(shares))


def _matches(head: Head, target: Target, text: Tensor, num_steps: int) -> Tensor:
    batch = target.read(text, head.layers)
    wanted = batch.token_ids[:, 2:]  # row p guesses token p + 2
    num_bases = wanted.shape[1] - num_steps + 1
    rows = []
    with torch.autocast(text.device.type, torch.bfloat16, enabled=text.device.type == "cuda"):
        for step, logits in enumerate(head.unroll(batch, num_steps)):
            guess = logits[:, :-1].argmax(-1)
            guess = guess if head.draft_ids is None else head.draft_ids[guess]
            rows.append((guess == wanted)[:, step : step + num_bases])
    return torch.stack(rows, -1).int().cpu()
