"""Drafting with multi-token prediction heads over their paged cache, through rejected drafts."""

from __future__ import annotations

import random
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from torch import Tensor

from outrider.draft_tree import DraftTree
from outrider.drafting.hidden_states.cached_proposer import CachedHeadProposer
from outrider.drafting.hidden_states.heads.mtp import MtpHead
from outrider.drafting.hidden_states.recurrent_drafter import RecurrentDrafter
from outrider.drafting.proposer import ProposerLimits, SessionStart
from outrider.engine.kv_cache.pools import KVPools
from outrider.engine.model.attention_backends import choose_backend
from outrider.params import SamplingParams
from tests.support.checkpoints import mtp_reference as reference
from tests.support.checkpoints.loading import load_mtp
from tests.support.checkpoints.mtp_checkpoints import (
    HIDDEN_SIZE,
    VOCAB_SIZE,
    MtpCheckpoint,
    deepseek,
    qwen,
    rtp_qwen2,
)

CPU = torch.device("cpu")
PAGE_SIZE = 4
GREEDY = SamplingParams(temperature=0.0)
CASES: dict[
    str,
    tuple[Callable[[], MtpCheckpoint], Callable[[MtpCheckpoint], reference.Reference]],
] = {
    "latents": (deepseek, reference.deepseek),
    "gated": (lambda: qwen("qwen3_5"), reference.qwen),
    "two modules": (
        lambda: rtp_qwen2(num_modules=2, draft_ids=list(range(0, 90, 2))),
        reference.rtp_qwen2,
    ),
}


class Text:
    """One session's true tokens and a made-up target's states, longer than what is committed."""

    def __init__(self, seed: int, length: int = 48) -> None:
        generator = torch.Generator().manual_seed(seed)
        self.tokens: list[int] = torch.randint(VOCAB_SIZE, (length,), generator=generator).tolist()
        self.states: Tensor = torch.randn(length, HIDDEN_SIZE, generator=generator).bfloat16()

    def features(self, start: int, end: int) -> bytes:
        return self.states[start:end].contiguous().view(torch.int16).numpy().tobytes()

    def check(self, tree: DraftTree, of: reference.Reference) -> None:
        """The children of every node are its likeliest tokens, the best one first."""
        rows = self.tokens[1 : tree.base_len], self.states[: tree.base_len - 1]
        paths: list[list[int]] = [[]]  # of the root and of each node
        children: list[list[int]] = [[]]
        for token, parent in zip(tree.token_ids, tree.parents, strict=True):
            paths.append([*paths[parent + 1], token])
            children.append([])
            children[parent + 1].append(token)
        for path, tokens in zip(paths, children, strict=True):
            if tokens:
                best = of.after(*rows, path).argsort(descending=True)
                assert tokens == best[: len(tokens)].tolist()


def proposer_of(head: MtpHead, tree_width: int, num_draft_tokens: int = 4) -> CachedHeadProposer:
    drafter = RecurrentDrafter(
        head,
        KVPools(64, PAGE_SIZE, torch.float32, CPU),
        choose_backend(None, head.attention_traits(), CPU),
        ProposerLimits(max_draft_tokens=num_draft_tokens, prefill_budget=7, tree_width=tree_width),
    )
    return CachedHeadProposer(drafter, method="mtp", name="tiny")


@pytest.mark.parametrize("tree_width", [1, 3])
@pytest.mark.parametrize("case", CASES)
def test_mtp_drafts_after_any_rejection_equal_the_formula(
    case: str, tree_width: int, tmp_path: Path
) -> None:
    make, as_reference = CASES[case]
    checkpoint = make()
    expected = as_reference(checkpoint)
    head = load_mtp(*checkpoint.write(tmp_path), torch.float32, CPU)
    proposer = proposer_of(head, tree_width)
    chance = random.Random(4)
    texts = {key: Text(key) for key in (1, 2, 3)}
    lengths = {1: 21, 2: 3, 3: 9}  # the first prompt takes more than one round's budget
    for key, text in texts.items():
        prompt = text.tokens[: lengths[key]]
        proposer.open(key, SessionStart(prompt, GREEDY, 4, 64))
        proposer.features(key, 0, text.features(0, lengths[key] - 1))
    checked, branched = dict.fromkeys(texts, 0), 0
    for _ in range(9):
        asked = [key for key in texts if chance.random() < 0.8]
        done = proposer.draft(asked)
        assert not done.lost
        for key, tree in done.drafts:
            text, length = texts[key], lengths[key]
            assert (tree.base_len, len(tree.token_ids)) == (length, 4)
            assert tree_width > 1 or tree.parents == (-1, 0, 1, 2)
            text.check(tree, expected)
            checked[key] += 1
            branched += len(set(tree.parents)) < 4
            more = chance.randint(1, 4)  # what a target would have committed: never mind the draft
            proposer.features(key, length - 1, text.features(length - 1, length + more - 1))
            proposer.commit(key, length, text.tokens[length : length + more], 4)
            lengths[key] += more
        proposer.check_invariants()
    assert all(count >= 3 for count in checked.values())
    assert bool(branched) == (tree_width > 1)
