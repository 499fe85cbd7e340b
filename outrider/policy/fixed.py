"""K draft tokens in every round, to compare drafts; with K = 0 none."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import TypeVar

from outrider.policy.base import Policy, Row

P = TypeVar("P", bound=Policy)


class FixedPolicy(Policy):
    """Every round drafts as much as it may, and each row waits `max_wait_s` for its draft."""

    def __init__(self, num_speculative_tokens: int, *, max_wait_s: float = 0.02) -> None:
        super().__init__(num_speculative_tokens)
        self.max_wait_s = max_wait_s

    def patience_s(self, row: Row) -> float:  # noqa: ARG002
        return self.max_wait_s


def policies(
    adaptive: Callable[[int], P], fixed: Callable[..., P]
) -> dict[str, Callable[[int], P]]:
    """Return the policies of `--speculation-policy` by name, with an engine's own classes."""
    return {
        "adaptive": adaptive,
        # Longer than a draft takes on a busy machine: what is compared is not to come late.
        "fixed": partial(fixed, max_wait_s=1.0),
        "off": lambda _: fixed(0),
    }
