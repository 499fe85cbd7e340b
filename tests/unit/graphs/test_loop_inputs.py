"""The hidden states of a draft loop's rows, copied on the device."""

from __future__ import annotations

import pytest
import torch

from outrider.drafting.drafters import StatesBehind
from outrider.drafting.graphs.loop_inputs import LoopInputs, LoopShape
from outrider.engine.graphs.staging import PageLayout

WIDTH = 4
STATES = torch.arange(40 * WIDTH, dtype=torch.bfloat16).view(40, WIDTH)


@pytest.mark.parametrize("firsts", [(0, 3, 6), (6, 1, 9), (3, 20, 37), (37, 0, 30)])
def test_states_behind_a_step_are_copied_wherever_they_lie(firsts: tuple[int, ...]) -> None:
    """Some lie behind more rows of others than a loop has room for."""
    shape, layout = LoopShape(4, 3, 2), PageLayout(64, 4, 9, torch.device("cpu"))
    inputs, counts = LoopInputs([shape], layout, 2, WIDTH), (3, 2, 3)
    found = inputs.take_states(StatesBehind(STATES, firsts), counts)
    assert inputs._states is not None
    copied = inputs._states.device("all")
    for first, place, count in zip(firsts, found or (0, 3, 5), counts, strict=True):
        assert torch.equal(copied[place : place + count], STATES[first : first + count])
