"""Drafting with multi-token prediction heads over their paged cache, through rejected drafts."""

from __future__ import annotations

import random
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from torch import Tensor

from outrider.draft_tree import DraftTree
from outrider.drafting.heads.mtp import MtpHead
from outrider.drafting.heads.mtp_loader import load_mtp
from outrider.drafting.recurrent import RecurrentProposer
from outrider.engine.backends import choose_backend
from outrider.engine.kv_cache import KVPools
from outrider.params import SamplingParams
from tests.support import mtp_reference as reference
from tests.support.mtp_checkpoints import (
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

    def expected(self, of: reference.Reference, length: int, count: int) -> list[int]:
        rows = self.tokens[1:length], self.states[: length - 1]
        return [int(logits.argmax()) for logits in of.draft(*rows, count)]


def proposer_of(head: MtpHead, num_draft_tokens: int = 4) -> RecurrentProposer:
    return RecurrentProposer(
        head,
        KVPools(64, PAGE_SIZE, torch.float32, CPU),
        choose_backend(None, head.attention_traits(PAGE_SIZE), CPU),
        method="mtp",
        name="tiny",
        max_draft_tokens=num_draft_tokens,
        prefill_budget=7,
    )


@pytest.mark.parametrize("case", CASES)
def test_drafts_are_those_of_the_formula_whatever_was_rejected(case: str, tmp_path: Path) -> None:
    make, as_reference = CASES[case]
    checkpoint = make()
    expected = as_reference(checkpoint)
    head = load_mtp(*checkpoint.write(tmp_path), torch.float32, CPU)
    proposer = proposer_of(head)
    chance = random.Random(4)
    texts = {key: Text(key) for key in (1, 2, 3)}
    lengths = {1: 21, 2: 3, 3: 9}  # the first prompt takes more than one round's budget
    for key, text in texts.items():
        prompt = text.tokens[: lengths[key]]
        proposer.open(key, prompt, GREEDY, 4, 64)
        proposer.features(key, 0, text.features(0, lengths[key] - 1))
    checked = dict.fromkeys(texts, 0)
    for _ in range(12):
        asked = [key for key in texts if chance.random() < 0.8]
        done = proposer.draft(asked)
        assert not done.lost
        for key, tree in done.drafts:
            text, length = texts[key], lengths[key]
            assert tree == DraftTree.chain(length, text.expected(expected, length, 4))
            checked[key] += 1
            more = chance.randint(1, 4)  # what a target would have committed: never mind the draft
            proposer.features(key, length - 1, text.features(length - 1, length + more - 1))
            proposer.commit(key, length, text.tokens[length : length + more], 4)
            lengths[key] += more
        proposer.check_invariants()
    assert all(count >= 3 for count in checked.values())
