"""Captured loops of draft modules equal eager ones, whatever fills up their rows."""

from __future__ import annotations

import random
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from outrider.draft_tree import DraftTree
from outrider.drafting.building.loops import recurrent_shapes
from outrider.drafting.graphs.loop_inputs import LoopShape
from outrider.drafting.graphs.loops import DraftSampler, LoopCapture
from outrider.drafting.hidden_states.cached_proposer import CachedHeadProposer
from outrider.drafting.hidden_states.heads.base import RecurrentHead
from outrider.drafting.hidden_states.recurrent_drafter import RecurrentDrafter
from outrider.drafting.proposer import ProposerLimits, SessionStart
from outrider.engine.graphs.capture import Capture
from outrider.engine.kv_cache.pools import KVPools
from outrider.engine.layers.linear import Linear, PackedLinear
from outrider.engine.model.attention_backends import choose_backend
from outrider.engine.tree_mask import MAX_TREE_NODES
from outrider.params import SamplingParams, VerificationRule
from tests.support.checkpoints import eagle_checkpoints, mtp_checkpoints
from tests.support.checkpoints.loading import load_eagle, load_eagle3, load_mtp
from tests.support.models.recordable import (
    Counted,
    MetaAttention,
    launch_without_waiting,
    rerun_strictly,
    run_each,
)

CPU = torch.device("cpu")
PAGE_SIZE, MAX_LEN, VOCAB_SIZE = 4, 64, 97
SAMPLINGS = (
    SamplingParams(temperature=0.0),
    SamplingParams(temperature=1.0, seed=5),
    SamplingParams(temperature=1.2, seed=2**31, top_k=12, top_p=0.9, min_p=0.01),
)


def eagle(kind: str, folder: Path, device: torch.device) -> RecurrentHead:
    if not folder.exists():
        made = eagle_checkpoints
        made.save_target(folder / "target")
        made.save_head(
            folder / "eagle",
            made.eagle_tensors(num_layers=2),
            made.LLAMA | {"num_hidden_layers": 2},
        )
        made.save_head(folder / "eagle3", made.eagle3_tensors(), made.LLAMA)
    load = load_eagle if kind == "eagle" else load_eagle3
    return load(folder / kind, folder / "target", torch.float64, device)


def mtp(
    checkpoint: mtp_checkpoints.MtpCheckpoint, folder: Path, device: torch.device
) -> RecurrentHead:
    return load_mtp(*checkpoint.write(folder), torch.float64, device)


HEADS: dict[str, Callable[[Path, torch.device], RecurrentHead]] = {
    "eagle": partial(eagle, "eagle"),
    "eagle3": partial(eagle, "eagle3"),
    "mtp": partial(mtp, mtp_checkpoints.qwen("qwen3_5")),
    "mtp, two modules": partial(
        mtp, mtp_checkpoints.rtp_qwen2(num_modules=2, draft_ids=list(range(0, 90, 2)))
    ),
}


def proposer_of(
    head: RecurrentHead, tree_width: int, capture: Capture | None
) -> CachedHeadProposer:
    shapes = [
        LoopShape(rows, query_len, num_tokens, cut=cut, width=tree_width)
        for rows in (1, 3)
        for query_len in (2, 6)
        for num_tokens in (1, 5)
        for cut in (False, True)
    ]
    drafter = RecurrentDrafter(
        head,
        KVPools(200 + (capture is not None), PAGE_SIZE, head.dtype, CPU),
        choose_backend("sdpa", head.attention_traits(), CPU),
        ProposerLimits(
            max_model_len=MAX_LEN,
            max_draft_tokens=6,  # one more than loops have
            prefill_budget=20,
            tree_width=tree_width,
        ),
        # Every loop runs over zeros once, too.
        None
        if capture is None
        else LoopCapture(shapes, capture, DraftSampler(), precompile=run_each),
    )
    return CachedHeadProposer(drafter, method="eagle", name="tiny")


class Said:
    """What a proposer drafts for random requests, which do not depend on it."""

    def __init__(self, proposer: CachedHeadProposer, width: int, seed: int) -> None:
        self.drafts: list[tuple[int, DraftTree]] = []
        self._proposer, self._width = proposer, width
        rng = random.Random(seed)
        shared = [rng.randrange(VOCAB_SIZE) for _ in range(12)]
        texts: dict[int, list[int]] = {}
        for key in range(1, 6):
            more = [rng.randrange(VOCAB_SIZE) for _ in range(rng.choice((1, 4, 30)))]
            texts[key] = shared[: rng.choice((1, 12))] + more
            rejected = key == 5
            proposer.open(
                key,
                SessionStart(
                    texts[key],
                    SAMPLINGS[1] if rejected else rng.choice(SAMPLINGS),
                    rng.randint(1, 6),
                    MAX_LEN,
                    rule=VerificationRule.REJECTION if rejected else VerificationRule.COUPLED,
                ),
            )
            self._feed(texts[key], key, 0)
        for _ in range(14):
            # Who is left out for some rounds has more to catch up.
            wanting = [key for key in texts if rng.random() < 0.7]
            while wanting:
                done = proposer.draft(wanting)
                assert not done.lost
                self.drafts += sorted(done.drafts)
                wanting = done.unfinished
            proposer.check_invariants()
            for key, text in texts.items():
                known = len(text)
                count = min(rng.randint(1, 6), MAX_LEN - known)
                text.extend(rng.randrange(VOCAB_SIZE) for _ in range(count))
                self._feed(text, key, known - 1)
                proposer.commit(key, known, text[known:], rng.randint(1, 6))

    def _feed(self, text: list[int], key: int, start: int) -> None:
        rows = [
            eagle_checkpoints.features(1, self._width, hash(tuple(text[: position + 1])) % 2**31)
            for position in range(start, len(text) - 1)
        ]
        if rows:
            states = eagle_checkpoints.as_bytes(torch.cat(rows))
            self._proposer.features(key, start, states)


@pytest.mark.parametrize("tree_width", [1, 4])
@pytest.mark.parametrize("kind", HEADS)
def test_captured_recurrent_drafts_for_any_rows_equal_eager_drafts(
    kind: str, tree_width: int, tmp_path: Path
) -> None:
    """Prompts, catch-ups, numbers of rows and drafts that loops hold and that none holds."""
    counted = Counted()
    eager, captured = (
        Said(proposer_of(head, tree_width, record), head.features.width, seed=tree_width)
        for record in (None, counted)
        for head in [HEADS[kind](tmp_path / "files", CPU)]
    )
    if tree_width == 1:  # captured chains tell no confidences
        for said in (eager, captured):
            said.drafts = [(key, tree._replace(confidences=b"")) for key, tree in said.drafts]
    assert captured.drafts == eager.drafts
    assert sum(len(tree.token_ids) for _, tree in eager.drafts) > 60
    assert counted.repeated > 10
    branched = any(not tree.is_chain for key, tree in eager.drafts if key != 5)
    assert branched == (tree_width > 1)


@pytest.mark.parametrize("tree_width", [1, 4])
@pytest.mark.parametrize("kind", HEADS)
def test_recurrent_loop_under_capture_and_its_launch_never_wait_for_device(
    kind: str, tree_width: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    device = torch.device("meta")
    head = HEADS[kind](tmp_path / "files", device)
    assert head.capturable
    cuts = (False, True) if tree_width > 1 else (False,)  # cuts of chains are Triton's alone
    shapes = [LoopShape(2, 3, 4, cut=cut, width=tree_width) for cut in cuts]
    drafter = RecurrentDrafter(
        head,
        KVPools(20, PAGE_SIZE, head.dtype, device),
        MetaAttention,
        ProposerLimits(max_model_len=MAX_LEN, max_draft_tokens=4, tree_width=tree_width),
        LoopCapture(shapes, rerun_strictly, DraftSampler()),
    )
    loop = launch_without_waiting(drafter, monkeypatch)
    assert loop is not None
    assert loop.nodes is not None
    assert loop.nodes.tokens.shape == (2, 3)
    assert (loop.nodes.parents is None) == (tree_width == 1)


@pytest.mark.parametrize("width", [1, 8])
@pytest.mark.parametrize("max_rows", [1, 5, 256])
def test_recurrent_shapes_for_any_limits_fit_all_rounds(max_rows: int, width: int) -> None:
    """After a draft of k tokens at most k + 1 rows are to be fed."""
    shapes = recurrent_shapes(max_rows=max_rows, max_draft_tokens=16, width=width)
    assert len(shapes) == len(set(shapes))
    assert all(shape.num_fed <= MAX_TREE_NODES for shape in shapes)
    for k in range(1, 17 if width == 1 else 10):
        assert any(
            shape.rows >= max_rows and shape.query_len > k and shape.num_tokens >= k
            for shape in shapes
            if not shape.cut
        )


@pytest.mark.parametrize("kind", HEADS)
def test_recurrent_head_uses_after_a_draft_name_its_linears_in_order(
    kind: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    head = HEADS[kind](tmp_path / "heads", CPU)
    proposer = proposer_of(head, 1, None)
    proposer.open(1, SessionStart(range(5), SAMPLINGS[0], 1, MAX_LEN))
    proposer.features(1, 0, bytes(4 * head.features.row_bytes))
    made: list[tuple[Linear, bool]] = []  # and whether it was added to something
    forward, add = PackedLinear.forward, PackedLinear.add

    def alone(self: PackedLinear, *args: Any) -> Tensor:
        made.append((self, False))
        return forward(self, *args)

    def added(self: PackedLinear, *args: Any) -> Tensor:
        made.append((self, True))
        return add(self, *args)

    monkeypatch.setattr(PackedLinear, "forward", alone)
    monkeypatch.setattr(PackedLinear, "add", added)
    assert proposer.draft([1]).drafts
    assert made == [(use.linear, use.norm is None and not use.alone) for use in head.uses]
