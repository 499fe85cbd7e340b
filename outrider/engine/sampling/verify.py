"""Verification: a drafted token is accepted where the target chose the same one.

On CUDA `verify_row_kernel` in cuda/kernels/topk_topp.py computes the same.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, replace

import torch
from torch import Tensor

from outrider.engine.sampling.sample import SamplingBatch, sample


def padded(rows: Iterable[Sequence[int]], width: int, value: int | None) -> Tensor:
    """Return int64 [rows, width], padded with `value`, or if None with each row's last value."""
    filled = [(*row, *(row[-1] if value is None else value,) * (width - len(row))) for row in rows]
    return torch.tensor(filled, dtype=torch.int64)


def verify_rows(drafts: Tensor, choices: Tensor) -> Tensor:
    """Return how many drafted tokens of each row are accepted, where the tensors are: int64 [n].

    `choices[:, i]` is what the target chooses after drafts[:, :i], one more than there are drafts.
    A drafted token is accepted exactly when it equals the target's choice and all before it were
    accepted. The round then commits choices[: accepted + 1]: the accepted tokens, which are the
    target's choices too, and one more, chosen where the draft was rejected (recovered) or after all
    of it (bonus). Under the coupled rule a choice is the target's own draw, whatever was drafted,
    so the draft cannot change the text; under the others (`verification_rules`) it may follow it.

    drafts int64 [n, k], rows shorter than k padded with -1, which no token equals; choices int64
    [n, k + 1], padded with anything.
    """
    return (drafts == choices[:, :-1]).cumprod(dim=1).sum(dim=1)


def verify_trees(drafts: Tensor, parents: Tensor, choices: Tensor, max_depth: int) -> Tensor:
    """Return the accepted nodes of trees, from the root down, where the tensors are.

    `choices[:, 0]` is what the target chooses before all nodes (parent -1), `choices[:, 1 + i]`
    what it chooses after node i and its ancestors. The walk goes to the child that equals the
    choice, the first of them, as long as there is one. The round then commits the choices along it:
    the tokens of its nodes, and one more. Returns int64 [n, max_depth].

    drafts int64 [n, k] and parents int64 [n, k], smaller trees padded with tokens of -1, which none
    equals; choices int64 [n, k + 1], padded with anything. No tree is deeper than `max_depth`. What
    follows the end of a path is -1.
    """
    num_rows, width = choices.shape
    nodes = torch.arange(-1, width - 1, device=drafts.device)
    # Row j: after node j - 1, or the root.
    children = (parents[:, None, :] == nodes[:, None]) & (drafts[:, None, :] == choices[:, :, None])
    first = torch.where(children.any(dim=2), children.int().argmax(dim=2) + 1, width)
    following = torch.nn.functional.pad(first, (0, 1), value=width)  # after the end, the end
    at = torch.zeros(num_rows, 1, dtype=torch.int64, device=drafts.device)
    path = []
    for _ in range(max_depth):
        at = following.gather(1, at)
        path.append(at)
    reached = torch.cat(path, dim=1)
    return torch.where(reached < width, reached - 1, -1)


@dataclass(frozen=True, slots=True)
class VerifyBatch:
    """The inputs of sampling and verification besides logits: n packed rows."""

    input_ids: Tensor  # int64 [num_tokens]: per row the token before the drafts, then these
    cu_seqlens: Tensor  # int32 [n + 1]: where each row begins
    draft_lens: Tensor  # int32 [n]: a row's tokens after so many drafts are padding
    sampling: SamplingBatch  # one entry a token of `input_ids`; the token after each is drawn

    def by_row(self, values: Tensor, width: int) -> Tensor:
        """Arrange values [num_tokens] as [n, width]: a row's own ones, then any others."""
        places = self.cu_seqlens[:-1, None] + torch.arange(width, device=values.device)
        return values[places.clamp(max=len(values) - 1)]


ChooseAndVerify = Callable[[Tensor, VerifyBatch, Tensor], None]
"""`choose_and_verify`, or a faster equal of it."""


def choose_and_verify(logits: Tensor, batch: VerifyBatch, out: Tensor) -> None:
    """Draw a token from each row of logits [num_tokens, vocab], and verify the drafts.

    `out`, int32 [n, 1 + width], gets per row the number of accepted drafts, then the drawn tokens.
    A row has `width` tokens at most; what follows a shorter one's tokens may be anything.
    """
    width = out.shape[1] - 1
    drawn = sample(logits, replace(batch.sampling, position=batch.sampling.position + 1))
    choices = batch.by_row(drawn, width)
    # Padding may be equal to a choice by chance.
    agreeing = verify_rows(batch.by_row(batch.input_ids, width)[:, 1:], choices)
    out[:, 0] = torch.minimum(agreeing, batch.draft_lens)
    out[:, 1:] = choices
