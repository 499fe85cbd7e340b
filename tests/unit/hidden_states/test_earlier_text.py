"""What followed a path's last tokens earlier in the text, against a plain search."""

from __future__ import annotations

import numpy as np
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor

from outrider.draft_tree import DraftTree
from outrider.drafting.hidden_states.earlier_text import WINDOW, EarlierText
from outrider.drafting.hidden_states.trees import TargetDraws, best_nodes, guess_paths

VOCAB = 5
CPU = torch.device("cpu")
TEXTS = st.lists(
    st.lists(st.integers(0, VOCAB - 1), min_size=2, max_size=30), min_size=1, max_size=3
)


def followers(text: list[int], before: int, last: int) -> set[int]:
    """The tokens after both, or after `last` alone if both never stood there."""
    after = {text[i] for i in range(2, len(text)) if text[i - 2 : i] == [before, last]}
    return after or {text[i] for i in range(1, len(text)) if text[i - 1] == last}


@given(texts=TEXTS, seed=st.integers(0, 2**31), place=st.integers(0, 15))
def test_just_the_tokens_that_followed_are_raised_by_the_same(
    texts: list[list[int]], seed: int, place: int
) -> None:
    generator = torch.Generator().manual_seed(seed)
    before, last = torch.randint(VOCAB, (2, len(texts), 4), generator=generator)
    logits = torch.randn(len(texts), 4, VOCAB, generator=generator)
    given_logits = logits.clone()
    raised = EarlierText(texts, CPU).raised(logits, before, last, place)
    assert torch.equal(logits, given_logits)
    gains: set[float] = set()
    for row, text in enumerate(texts):
        for path in range(4):
            gain = (raised - logits)[row, path]
            wanted = followers(text, int(before[row, path]), int(last[row, path]))
            assert {i for i in range(VOCAB) if gain[i] > 0.01} == (wanted if place else set())
            gains |= {round(float(each), 3) for each in gain}
    assert len(gains) <= 2


def test_only_the_window_counts() -> None:
    text = [1, 2, 3, *[0] * (WINDOW - 2)]
    one, two, logits = torch.tensor([[1]]), torch.tensor([[2]]), torch.zeros(1, 1, VOCAB)
    assert EarlierText([text], CPU).raised(logits, one, two, 3)[0, 0, 3] > 0
    assert not EarlierText([[*text, 0]], CPU).raised(logits, one, two, 3).any()


def grown(texts: EarlierText | None, logits: Tensor, tokens: Tensor) -> list[DraftTree]:
    """Trees of 12 nodes over logits [n, depth, vocab] that no token changes."""

    def step(states: Tensor, last: Tensor, place: int) -> tuple[Tensor, Tensor]:
        of_row = logits[:, place, None].expand(-1, len(last) // len(tokens), -1)
        return states, of_row.flatten(0, 1)

    draws, depth = TargetDraws(None, texts=texts), logits.shape[1]
    found = guess_paths(step, torch.empty(len(tokens), 0), tokens, draws, depth, 4).numpy()
    chosen = (best_nodes(ids, up, sure.view(np.float32), 12) for ids, up, sure in found)
    return [DraftTree.validated(0, ids, up, VOCAB, 12) for ids, up, _ in chosen]


@given(texts=TEXTS, seed=st.integers(0, 2**31))
def test_trees_are_well_formed_and_do_not_depend_on_other_texts(
    texts: list[list[int]], seed: int
) -> None:
    logits = torch.randn(len(texts), 6, VOCAB, generator=torch.Generator().manual_seed(seed))
    tokens = torch.tensor([text[-1] for text in texts])
    together = grown(EarlierText(texts, CPU), logits, tokens)
    for row, text in enumerate(texts):
        alone = grown(EarlierText([text], CPU), logits[row, None], tokens[row, None])
        assert alone == [together[row]]


def test_a_tree_follows_what_stood_in_the_text() -> None:
    text = [0, 1, 2, 3, 4, 0]
    flat = torch.zeros(1, 4, VOCAB)
    flat[0, :, 0] = 0.3  # the best by itself, but at the first place
    flat[0, 0, 1] = 9.0
    (plain,), (tree,) = (
        grown(each, flat, torch.tensor([0])) for each in (None, EarlierText([text], CPU))
    )
    assert plain.descend([1, 2, 3]) is None
    assert tree.descend([1, 2, 3]) is not None
