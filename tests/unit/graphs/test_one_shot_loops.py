"""Captured guesses of Medusa and MLP-speculator heads make the trees of those that are not."""

from __future__ import annotations

import pytest
import torch

from outrider.drafting.building.loops import one_shot_shapes
from outrider.drafting.graphs.loops import DraftSampler, LoopCapture
from outrider.drafting.hidden_states.one_shot import OneShotLoops
from tests.support.checkpoints.one_shot_drafts import DEPTH, HEADS, drafts
from tests.support.models.recordable import Counted, rerun_strictly


@pytest.mark.parametrize("tree_width", [1, 4])
@pytest.mark.parametrize("name", HEADS)
def test_captured_one_shot_drafts_for_any_rows_equal_eager_drafts(
    name: str, tree_width: int
) -> None:
    """Also of more rows than a loop holds."""
    head = HEADS[name](torch.float64, torch.device("cpu"))  # near ties are decided alike
    counted = Counted()
    shapes = one_shot_shapes(max_rows=4, max_depth=DEPTH)
    capture = LoopCapture(shapes, counted, DraftSampler())
    expected = drafts(head, tree_width, None)
    assert drafts(head, tree_width, capture) == expected
    assert counted.repeated > 10
    assert any(len(tree.token_ids) > DEPTH for tree in expected) == (tree_width > 1)


@pytest.mark.parametrize("name", HEADS)
def test_one_shot_loop_under_capture_never_waits_for_device(name: str) -> None:
    head = HEADS[name](torch.float32, torch.device("meta"))
    shapes = one_shot_shapes(max_rows=2, max_depth=DEPTH)
    OneShotLoops(head, LoopCapture(shapes, rerun_strictly, DraftSampler()), 4)


@pytest.mark.parametrize("max_rows", [1, 5, 256])
def test_one_shot_shapes_for_any_limit_fit_all_batches(max_rows: int) -> None:
    shapes = one_shot_shapes(max_rows=max_rows, max_depth=4)
    assert len(shapes) == len(set(shapes))
    for cut in (False, True):
        depths = {shape.num_tokens for shape in shapes if shape.cut == cut}
        assert depths == {1, 2, 3, 4}
    assert max(shape.rows for shape in shapes) >= max_rows
