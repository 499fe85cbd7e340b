"""How sure methods that copy say they are: by what they matched."""

from __future__ import annotations

from collections.abc import Callable

import pytest

from outrider.draft_tree import DraftTree
from outrider.drafting.copying.base import CopyingProposer
from outrider.drafting.copying.deterministic import DeterministicProposer
from outrider.drafting.copying.ngram import NgramProposer
from outrider.drafting.copying.suffix import SuffixProposer
from outrider.drafting.proposer import NO_PACE, SessionStart
from outrider.params import Advice, SamplingParams

TEXT = tuple(range(40))
K = 8
METHODS: dict[str, tuple[Callable[[], CopyingProposer], Callable[[tuple[int, ...]], Advice]]] = {
    "ngram": (NgramProposer, lambda _: Advice()),
    "ngram of references": (NgramProposer, lambda text: Advice(references=(text,))),
    "suffix": (SuffixProposer, lambda _: Advice()),
    "deterministic": (DeterministicProposer, Advice),
    "edit": (DeterministicProposer, lambda text: Advice(text, edit=True)),
}


def drafted(method: str, again: int, text: tuple[int, ...] = TEXT) -> tuple[DraftTree, DraftTree]:
    """A draft after so many tokens of a text that is repeated, and its tree ahead."""
    make, advice = METHODS[method]
    proposer, advised = make(), advice(text)
    prompt = (99,) if advised.token_ids or advised.references else (*text, 99)
    proposer.open(1, SessionStart(prompt, SamplingParams(), 0, 1000, advice=advised))
    proposer.commit(1, len(prompt), text[:again], K)
    ((_, draft),) = proposer.draft([1]).drafts
    ((_, tree),) = proposer.ahead([1], NO_PACE).trees
    return draft, tree


@pytest.mark.parametrize("method", METHODS)
def test_copies_are_the_surer_the_longer_the_match_before_them(method: str) -> None:
    short, long = (drafted(method, n)[0] for n in (4, 20))
    assert list(long.token_ids) == list(TEXT[20:][: len(long.token_ids)])
    for tree in (short, long):
        assert list(tree.confidences) == sorted(tree.confidences)
        assert 128 < tree.confidences[0] < 255
    assert short.confidences[0] < long.confidences[0]


@pytest.mark.parametrize("method", METHODS)
def test_branches_of_copies_tell_a_confidence_per_node(method: str) -> None:
    """The first token of a branch is of a text that goes another way: nothing was matched."""
    draft, tree = drafted(method, 7, (*TEXT[:10], 50, *TEXT[:10], 60, *TEXT))
    size = len(draft.token_ids)
    assert len(tree.confidences) == len(tree.token_ids)
    assert tree.confidences[:size] == draft.confidences
    assert tree.at_most(size) == draft
    if not tree.is_chain:
        begins = [i for i, parent in enumerate(tree.parents) if parent != i - 1]
        assert {tree.confidences[i] for i in begins} == {0}


def test_suffix_token_after_which_matches_disagree_is_less_sure_than_those_beside_it() -> None:
    """Five matches go on alike, but for one token of which there are two."""
    text = tuple(token for i in range(5) for token in (1, 2, 3, 4, 7 + (i == 4), 5, 6, 90 + i))
    draft, _ = drafted("suffix", 3, text)
    assert draft.token_ids[:2] == (4, 7)
    assert draft.confidences[1] < draft.confidences[0]
