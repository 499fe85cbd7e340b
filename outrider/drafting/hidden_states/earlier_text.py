"""What followed the same tokens earlier in a text, for slots that cannot look it up themselves.

A block's slots are computed before the tokens between the text and them are known. So they cannot
attend to places of the text where the same tokens stand, as a module does that drafts token by
token. Along a path of guesses the tokens are known, and what followed them in the text becomes
likelier, as in a cache language model (Kuhn and De Mori, "A Cache-Based Natural Language Model for
Speech Recognition", 1990).
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Final

import torch
from torch import Tensor

WINDOW: Final = 2048
"""The latest tokens of a text, among which is looked."""

_PER_PLACE: Final = 0.6
"""Nats for each guessed token: slots farther from the text know less of it by themselves.

Fitted along texts of the embedded target, other than those of `benchmarks.hidden_states`.
"""


class EarlierText:
    """The latest `WINDOW` tokens of texts, which end with the last committed token.

    Empty: nothing is raised in that row.
    """

    def __init__(self, texts: Sequence[Sequence[int]], device: torch.device) -> None:
        parts = [torch.tensor(text[-WINDOW:], dtype=torch.int64) for text in texts]
        width = 2 + max(len(part) for part in parts)
        known = torch.full((len(parts), width), -1)  # no token: before each text
        for row, part in zip(known, parts, strict=True):
            row[width - len(part) :] = part
        known = known.to(device)
        self.before = known[:, -2]
        """The last token but one of each text, -1 if there is none: int64 [n]."""
        self._two_before, self._before, self._tokens = known[:, :-2], known[:, 1:-1], known[:, 2:]

    def raised(self, logits: Tensor, before: Tensor, last: Tensor, place: int) -> Tensor:
        """Return `logits` [n, m, vocab] with what followed `before` and `last` [n, m] raised.

        Where these never stood in this order, it is what followed `last` alone. `place` is the
        number of guessed tokens up to `last`: without any the logits stay as they are.
        """
        if not place:
            return logits
        row, path, at = (self._before[:, None] == last[:, :, None]).nonzero(as_tuple=True)
        both = self._two_before[row, at] == before[row, path]
        found = torch.zeros_like(last, dtype=torch.bool)
        found[row[both], path[both]] = True
        kept = both == found[row, path]
        row, path, at = row[kept], path[kept], at[kept]
        where = (row, path, self._tokens[row, at])
        # A token that followed several times is written several times, and raised once.
        return logits.index_put(where, logits[where] + _PER_PLACE * place)
