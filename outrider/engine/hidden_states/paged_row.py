"""A request as `HiddenStateStreams` sees it, in any engine."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Protocol

from outrider.policy.row import Drafting


class PagedRow(Protocol):
    """A request whose states are in the pages of its keys and values."""

    session_id: int
    drafting: Drafting

    @property
    def num_computed(self) -> int:
        """Return up to which position, exclusive, states are computed and committed."""

    @property
    def block_table(self) -> Sequence[int]:
        """Return its pages, in order of position."""
