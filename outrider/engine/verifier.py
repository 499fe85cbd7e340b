"""Verification: which drafted tokens are what the target chose itself."""

from __future__ import annotations

from collections.abc import Sequence

from torch import Tensor


def verify(draft_tokens: Sequence[int], target_choices: Sequence[int]) -> int:
    """How many drafted tokens are accepted: the readable definition.

    `target_choices[i]` is the token the target itself draws after draft_tokens[:i], so there is
    one choice more than there are drafts. A drafted token is accepted exactly when it equals the
    target's choice and all before it were accepted. The round then commits
    target_choices[: accepted + 1]: the accepted tokens, which are the target's choices too, and
    one more, drawn where the draft was rejected (recovered) or after all of it (bonus). No
    drafted token enters the text except by being equal, so the draft cannot change the text.
    """
    assert len(target_choices) == len(draft_tokens) + 1
    accepted = 0
    while accepted < len(draft_tokens) and draft_tokens[accepted] == target_choices[accepted]:
        accepted += 1
    return accepted


def verify_rows(drafts: Tensor, choices: Tensor) -> Tensor:
    """`verify` for many rows at once, where the tensors are.

    drafts int64 [n, k], rows shorter than k padded with -1, which no token equals; choices int64
    [n, k + 1], padded with anything. Returns int64 [n].
    """
    return (drafts == choices[:, :-1]).cumprod(dim=1).sum(dim=1)
