"""Verification: which drafted tokens are what the target chose itself."""

from __future__ import annotations

from collections.abc import Sequence

import torch
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


def verify_packed(input_ids: Tensor, logits_index: Tensor, choices: Tensor, row: Tensor) -> Tensor:
    """`verify` for all rows of a packed batch at once, on the device.

    input_ids [num_tokens]; logits_index, choices, row [num_logits]: where each row of logits sits
    in the batch, what was drawn from it, and whose it is (0, 1, ... in order, each with at least
    one). Returns int64 [num_rows].
    """
    is_last = torch.ones_like(row, dtype=torch.bool)
    is_last[:-1] = row[1:] != row[:-1]
    # The token after a logits position is the draft to compare; a row's last has none.
    following = input_ids[(logits_index + 1).clamp(max=len(input_ids) - 1)]
    mismatches = ((following != choices) | is_last).cumsum(0)
    # Each row has at least one mismatch (its last), so rows are told apart by what came before.
    num_rows = int(row[-1]) + 1 if len(row) else 0
    before = torch.zeros(num_rows, dtype=torch.int64, device=row.device)
    before[1:] = mismatches[is_last][:-1]
    accepted = torch.zeros_like(before)
    return accepted.index_add_(0, row, (mismatches == before[row]).to(torch.int64))
