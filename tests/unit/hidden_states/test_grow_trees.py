"""Trees that are drafted together, against each drafted alone."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

import pytest
import torch

from outrider.draft_tree import DraftTree
from outrider.drafting.hidden_states.cached_proposer import CachedHeadProposer
from outrider.drafting.hidden_states.recurrent_drafter import RecurrentDrafter
from outrider.drafting.proposer import ProposerLimits, SessionStart
from outrider.engine.kv_cache.pools import KVPools
from outrider.engine.model.attention_backends import choose_backend
from outrider.engine.tree_mask import MAX_TREE_NODES
from outrider.params import SamplingParams
from tests.support.checkpoints import eagle_checkpoints as made
from tests.support.checkpoints.loading import load_eagle3

CPU = torch.device("cpu")
PAGE_SIZE, WIDTH = 4, 8
SIZES = (24, 24, 3, 16, 24, 1)
TEXTS = [[5 + row, 90, 17, 3, 88 - row, 41, 2, 60, 33][: 9 - row % 3] for row in range(len(SIZES))]


@pytest.mark.parametrize("temperature", [0.0, 1.0])
def test_trees_are_the_same_beside_any_others(tmp_path: Path, temperature: float) -> None:
    """Together they would feed more nodes than a row may, if all fed as many as one of them."""
    target = made.save_target(tmp_path / "target")
    tensors = made.eagle3_tensors()
    tensors["lm_head.weight"] *= 14  # sure enough for trees of some depth
    folder = made.save_head(tmp_path / "head", tensors, made.LLAMA)
    head = load_eagle3(folder, target, torch.float64, CPU)
    fed: list[int] = []
    forward = head.forward

    def counted(token_ids: torch.Tensor, *rest: object) -> torch.Tensor:
        fed.append(len(token_ids))
        return forward(token_ids, *rest)  # type: ignore[arg-type]

    head.forward = counted  # type: ignore[method-assign, assignment]

    def drafted(rows: Sequence[int]) -> tuple[dict[int, DraftTree], int]:
        """The trees of rows drafted together, and how many nodes were fed for them."""
        drafter = RecurrentDrafter(
            head,
            KVPools(256, PAGE_SIZE, head.dtype, CPU),
            choose_backend(None, head.attention_traits(), CPU),
            ProposerLimits(max_draft_tokens=max(SIZES), tree_width=WIDTH),
        )
        proposer = CachedHeadProposer(drafter, method="eagle3", name="tiny")
        for row in rows:
            sampling = SamplingParams(temperature=temperature, seed=row)
            proposer.open(row, SessionStart(TEXTS[row], sampling, SIZES[row], 100))
            states = made.features(len(TEXTS[row]) - 1, head.features.width, seed=row)
            proposer.features(row, 0, made.as_bytes(states))
        fed.clear()
        trees = dict(proposer.draft(rows).drafts)
        return trees, sum(fed[1:])

    alone = [drafted([row]) for row in range(len(SIZES))]
    together, num_fed = drafted(range(len(SIZES)))
    for row, (trees, _) in enumerate(alone):
        assert together[row] == trees[row]
    assert [len(together[row].token_ids) for row in range(len(SIZES))] == [*SIZES]
    assert num_fed == sum(count for _, count in alone), "no nodes but those that a row needs"
    assert max(count for _, count in alone) <= MAX_TREE_NODES
