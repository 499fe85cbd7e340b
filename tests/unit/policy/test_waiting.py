"""How long ready rows wait for those of others."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

import pytest

from outrider.draft_port import DraftOffer
from outrider.policy.adaptive import AdaptivePolicy
from outrider.policy.row import Drafting, Offered
from outrider.policy.waiting import Waiting

ROWS, DEADLINE_S = 32, 0.110
KNOWN = [(0.004, None), (None, 0.006), (0.004, 0.0039), (0.004, 0.0041)]
"""Seconds of drafts alone and beside steps."""


@dataclass
class Decoding:
    """Has the fact that waiting asks of a row."""

    drafting: Drafting = field(
        default_factory=lambda: Drafting(
            Offered(4, proposer=DraftOffer("a", 4)), num_draft_tokens=4, drafter="a draft_model"
        )
    )

    def __post_init__(self) -> None:
        self.drafting.round.deadline = DEADLINE_S


def waiting(alone_s: float | None, beside_s: float | None) -> Waiting:
    measured = AdaptivePolicy(4).measured
    for tokens, seconds in ((1, 0.010), (ROWS, 0.012), (5 * ROWS, 0.020)):
        measured.steps.observe_step(min(tokens, ROWS), tokens, seconds)
    times = measured.draft_times(Decoding().drafting)
    for i in range(20):
        for delay_s, at in ((alone_s, float(i)), (beside_s, i + 0.5)):
            if delay_s is not None:
                times.observe(at, delay_s, delay_s, 4, alone=delay_s is alone_s)
    return Waiting(measured)


@pytest.mark.parametrize(("alone_s", "beside_s"), KNOWN)
def test_ready_rows_do_not_wait_for_one_whose_draft_is_overdue(
    alone_s: float | None, beside_s: float | None
) -> None:
    ready: list[Any] = [Decoding() for _ in range(ROWS - 1)]
    overdue: list[Any] = [Decoding()]
    found = waiting(alone_s, beside_s)
    assert found.start_at(ready, overdue, 0, now=0.05) == 0.05


@pytest.mark.parametrize(("alone_s", "beside_s"), KNOWN)
@pytest.mark.parametrize("num_ready", [1, ROWS - 1])
def test_ready_rows_wait_for_drafts_that_come_soon(
    num_ready: int, alone_s: float | None, beside_s: float | None
) -> None:
    ready: list[Any] = [Decoding() for _ in range(num_ready)]
    others: list[Any] = [Decoding() for _ in range(ROWS - num_ready)]
    start_at = waiting(alone_s, beside_s).start_at(ready, others, 0, now=0.001)
    assert 0.0035 < start_at < 0.0065
