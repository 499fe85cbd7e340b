"""A draft module's drafts are those of a text and its states alone: not of how it came to them,
of what was drafted before and rejected, of pages that are shared, nor of sessions beside it."""

from __future__ import annotations

import random
from collections.abc import Callable, Sequence
from functools import cache, partial
from pathlib import Path

import pytest
import torch
from torch import Tensor

from outrider.draft_tree import DraftTree
from outrider.drafting.hidden_states import cached_proposer
from outrider.drafting.hidden_states.block_drafter import BlockDrafter
from outrider.drafting.hidden_states.cached_drafter import CachedDrafter
from outrider.drafting.hidden_states.cached_proposer import CachedHeadProposer
from outrider.drafting.hidden_states.heads.base import RecurrentHead
from outrider.drafting.hidden_states.heads.block import BlockHead
from outrider.drafting.hidden_states.heads.dflash import DFlashHead
from outrider.drafting.hidden_states.recurrent_drafter import RecurrentDrafter
from outrider.drafting.proposer import NO_PACE, DraftRound, ProposerLimits, SessionStart
from outrider.engine.kv_cache.pools import KVPools
from outrider.engine.model.attention_backends import choose_backend
from outrider.params import SamplingParams, VerificationRule
from tests.support.checkpoints import block_checkpoints as blocks
from tests.support.checkpoints import eagle_checkpoints as made
from tests.support.checkpoints.loading import (
    load_dflash,
    load_dspark,
    load_eagle,
    load_eagle3,
    load_peagle,
)

CPU = torch.device("cpu")
PAGE_SIZE = 4
GREEDY = SamplingParams(temperature=0.0, seed=3)
SAMPLED = SamplingParams(temperature=1.0, top_k=20, seed=9)


Head = RecurrentHead | BlockHead


@pytest.fixture(scope="module")
def files(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A target and a head of every kind."""
    folder = tmp_path_factory.mktemp("files")
    made.save_target(folder / "target")
    made.save_head(folder / "eagle", made.eagle_tensors(), made.LLAMA)
    made.save_head(folder / "eagle3", made.eagle3_tensors(), made.LLAMA)
    made.save_head(folder / "dflash", blocks.dflash_tensors(), blocks.DFLASH)
    made.save_head(folder / "dspark", blocks.dspark_tensors(), blocks.DSPARK)
    rnn = blocks.dspark_tensors(markov="rnn")
    made.save_head(folder / "dspark-rnn", rnn, blocks.DSPARK_RNN)
    made.save_head(folder / "peagle", blocks.peagle_tensors(), blocks.PEAGLE)
    return folder


def _load(kind: str, folder: Path) -> Head:
    kind, _, padded = kind.partition(" ")
    loaders: dict[str, Callable[..., Head]] = {
        **{"eagle": load_eagle, "eagle3": load_eagle3, "peagle": load_peagle},
        **{"dflash": load_dflash, "dspark": load_dspark, "dspark-rnn": load_dspark},
    }
    head: Head = loaders[kind](folder / kind, folder / "target", torch.float64, CPU)
    if padded:  # as on a GPU
        assert isinstance(head, DFlashHead)
        head.pads = True
    return head


def _proposer(
    head: Head, num_pages: int, prefill_budget: int, tree_width: int = 4
) -> CachedHeadProposer:
    pools = KVPools(num_pages, PAGE_SIZE, head.dtype, CPU)
    backend = choose_backend(None, head.attention_traits(), CPU)
    limits = ProposerLimits(
        max_sessions=4,
        max_draft_tokens=6,
        prefill_budget=prefill_budget,
        tree_width=tree_width,
    )
    drafter: CachedDrafter
    if isinstance(head, BlockHead):
        drafter = BlockDrafter(head, pools, backend, limits)
    else:
        drafter = RecurrentDrafter(head, pools, backend, limits)
    return CachedHeadProposer(drafter, method="eagle3", name="tiny")


_row = cache(partial(made.features, 1))


def _rows(tokens: Sequence[int], start: int, end: int, width: int) -> bytes:
    """States of a text: row p is a function of its first p + 1 tokens."""
    made_up: list[Tensor] = []
    for position in range(start, end):
        seed = hash(tuple(tokens[: position + 1]))
        made_up.append(_row(width, seed % 2**31))
    return made.as_bytes(torch.cat(made_up)) if made_up else b""


class _Session:
    """A request: its text, and how much of it the proposer was told."""

    def __init__(self, tokens: list[int], sampling: SamplingParams) -> None:
        self.tokens = tokens
        self.sampling = sampling
        self.num_rows = 0
        self.tree: DraftTree | None = None


def _path(tree: DraftTree, node: int) -> list[int]:
    """The tokens from the root to a node; -1 is the root."""
    path: list[int] = []
    while node >= 0:
        path.insert(0, tree.token_ids[node])
        node = tree.parents[node]
    return path


def _alone(head: Head, session: _Session, wanted: int, tree_width: int) -> DraftTree:
    """The draft of a proposer that sees nothing but the text and all its states, at once."""
    proposer = _proposer(head, 64, 1000, tree_width)
    width = head.features.width
    proposer.open(1, SessionStart(session.tokens, session.sampling, wanted, 120))
    proposer.features(1, 0, _rows(session.tokens, 0, len(session.tokens) - 1, width))
    ((_, tree),) = proposer.draft([1]).drafts
    return tree


@pytest.mark.parametrize(
    "kind", ["eagle", "eagle3", "dflash", "dflash padded", "dspark", "dspark-rnn", "peagle"]
)
@pytest.mark.parametrize("tree_width", [1, 4])
@pytest.mark.parametrize("seed", range(2))
def test_recurrent_proposer_after_any_history_drafts_as_from_a_fresh_start(
    files: Path, monkeypatch: pytest.MonkeyPatch, kind: str, tree_width: int, seed: int
) -> None:
    rng = random.Random(seed)
    monkeypatch.setattr(cached_proposer, "_PART", 5)  # prompts here are short
    # A module keeps keys and values in one place: whoever drafts beside it needs another.
    head, fresh_head = _load(kind, files), _load(kind, files)
    width = head.features.width
    proposer = _proposer(head, num_pages=40, prefill_budget=7, tree_width=tree_width)
    sessions: dict[int, _Session] = {}
    shared = [rng.randrange(made.VOCAB_SIZE) for _ in range(20)]
    num_drafted = 0
    for key in range(1, 60):
        if rng.random() < 0.3:
            prompt = shared[: rng.randint(1, 20)] + [
                rng.randrange(made.VOCAB_SIZE) for _ in range(rng.randint(1, 20))
            ]
            sessions[key] = _Session(prompt, rng.choice((GREEDY, SAMPLED)))
            proposer.open(key, SessionStart(prompt, sessions[key].sampling, rng.randint(1, 6), 120))
        for name, session in sessions.items():
            if session.num_rows < len(session.tokens) - 1 and rng.random() < 0.8:
                start = max(0, session.num_rows - rng.randint(0, 2))  # repeats are harmless
                end = rng.randint(session.num_rows + 1, len(session.tokens) - 1)
                proposer.features(name, start, _rows(session.tokens, start, end, width))
                session.num_rows = end
        asked = [name for name in sessions if rng.random() < 0.7]
        done = proposer.draft(asked)
        proposer.check_invariants()
        for name in done.lost:
            del sessions[name]
        assert {*done.unfinished, *(name for name, _ in done.drafts)} == set(asked) - {*done.lost}
        if rng.random() < 0.5:
            assert proposer.ahead((), NO_PACE) == DraftRound()
            proposer.check_invariants()
        for name, tree in done.drafts:
            session = sessions[name]
            assert tree == _alone(fresh_head, session, len(tree.token_ids), tree_width)
            assert tree.is_chain or tree_width > 1
            num_drafted += 1
            accepted = _path(tree, rng.randint(-1, len(tree.token_ids) - 1))
            fresh = [*accepted, rng.randrange(made.VOCAB_SIZE)]
            length = len(session.tokens)
            if length + len(fresh) > 100:
                proposer.close(name)
                del sessions[name]
                continue
            session.tokens += fresh
            rows = _rows(session.tokens, length - 1, len(session.tokens) - 1, width)
            proposer.features(name, length - 1, rows)
            session.num_rows = len(session.tokens) - 1
            proposer.commit(name, length, fresh, rng.randint(1, 6))
    assert num_drafted > 20
    for name in list(sessions):
        proposer.close(name)
    proposer.check_invariants()


def test_recurrent_proposer_in_spare_time_feeds_sessions_without_drafts(
    files: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    head, fresh_head = (_load("eagle3", files) for _ in range(2))
    proposer = _proposer(head, 60, prefill_budget=16)
    monkeypatch.setattr(proposer, "_max_held", 80)  # rows
    sessions = {key: _Session([key + i % 7 for i in range(30)], GREEDY) for key in range(1, 5)}
    for key, session in sessions.items():
        proposer.open(key, SessionStart(session.tokens, GREEDY, 3, 50))
        proposer.features(key, 0, _rows(session.tokens, 0, 29, head.features.width))
        for _ in range(4):
            proposer.ahead((), NO_PACE)
        proposer.check_invariants()
    done = proposer.draft(list(sessions))
    assert not done.lost, "116 rows came, of which 80 may wait"
    assert not done.unfinished, "a draft feeds 16"
    for key, tree in done.drafts:
        assert tree == _alone(fresh_head, sessions[key], len(tree.token_ids), 4)


def test_recurrent_proposer_with_gap_or_wrong_row_size_loses_the_session(files: Path) -> None:
    head = _load("eagle", files)
    proposer = _proposer(head, 32, 100)
    tokens = list(range(1, 9))
    width = head.features.width
    for key, start, rows in (
        (1, 1, _rows(tokens, 1, 4, width)),
        (2, 0, _rows(tokens, 0, 4, width)[:-2]),
    ):
        proposer.open(key, SessionStart(tokens, GREEDY, 3, 50))
        proposer.features(key, start, rows)
        assert proposer.draft([key]).lost == [key]
    assert proposer.num_sessions == 0
    proposer.features(3, 0, b"anything")  # of a session that nobody knows
    proposer.check_invariants()


def test_recurrent_proposer_after_failure_reports_lost_sessions(
    files: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    head = _load("eagle", files)
    proposer = _proposer(head, 32, 100)
    tokens = list(range(1, 9))
    width = head.features.width
    for key, start in ((1, 1), (2, 0)):
        proposer.open(key, SessionStart(tokens, GREEDY, 3, 50))
        proposer.features(key, start, _rows(tokens, start, 7, width))  # 1: with a gap
    with monkeypatch.context() as patch:
        patch.setattr(head, "logits", _fail)
        with pytest.raises(RuntimeError, match="out of memory"):
            proposer.draft([1, 2])
    done = proposer.draft([2])
    assert done.lost == [1]
    assert [key for key, _ in done.drafts] == [2]


def _fail(*_: object) -> Tensor:
    raise RuntimeError("out of memory")


def test_recurrent_proposer_without_all_rows_has_no_draft_yet(files: Path) -> None:
    head = _load("eagle3", files)
    proposer = _proposer(head, 32, 100)
    tokens = list(range(1, 9))
    proposer.open(1, SessionStart(tokens, GREEDY, 3, 50))
    assert proposer.draft([1]).unfinished == [1]
    proposer.features(1, 0, _rows(tokens, 0, 6, head.features.width))
    waiting = proposer.draft([1])
    assert waiting.unfinished == [1]
    assert waiting.forward_s == 0.0, "too few for a forward: a prompt's rows come in parts"
    proposer.features(1, 6, _rows(tokens, 6, 7, head.features.width))
    ((_, tree),) = proposer.draft([1]).drafts
    assert len(tree.token_ids) == 3
    # Nothing came since, but another draft is wanted.
    ((_, again),) = proposer.draft([1]).drafts
    assert again == tree


def test_recurrent_proposer_without_room_for_a_whole_prompt_loses_its_session(
    files: Path,
) -> None:
    head = _load("eagle3", files)
    proposer = _proposer(head, 40, prefill_budget=16)  # pages of 4 tokens
    texts = {key: [key + i % 7 for i in range(length)] for key, length in enumerate((64, 100, 80))}
    for key, text in texts.items():
        proposer.open(key, SessionStart(text, GREEDY, 3, 120))
        proposer.features(key, 0, _rows(text, 0, len(text) - 1, head.features.width))
    done = proposer.draft([0, 1])
    assert (done.lost, done.unfinished) == ([1], [0])
    proposer.check_invariants()
    assert proposer.draft([2]).unfinished == [2]
    proposer.open(3, SessionStart(list(range(30, 50)), GREEDY, 3, 120))
    assert proposer.draft([3]).lost == [3], "it wants a page more than the prompts leave"
    drafted: list[int] = []
    while len(drafted) < 2:
        done = proposer.draft([key for key in (0, 2) if key not in drafted])
        assert not done.lost
        drafted += [key for key, _ in done.drafts]
        proposer.check_invariants()


def test_recurrent_proposer_with_text_of_one_token_drafts_nothing(files: Path) -> None:
    head = _load("eagle3", files)
    proposer = _proposer(head, 32, 100)
    proposer.open(1, SessionStart([5], GREEDY, 3, 50))
    assert proposer.draft([1]).drafts == [(1, DraftTree.chain(1, ()))]


@pytest.mark.parametrize("kind", ["eagle3", "dflash", "dspark", "dspark-rnn", "peagle"])
def test_recurrent_proposer_under_rejection_sends_distributions(files: Path, kind: str) -> None:
    head = _load(kind, files)
    proposer = _proposer(head, 32, 100)
    tokens = list(range(1, 9))
    for key, sampling in ((1, SAMPLED), (2, GREEDY)):
        proposer.open(key, SessionStart(tokens, sampling, 4, 50, rule=VerificationRule.REJECTION))
        proposer.features(key, 0, _rows(tokens, 0, 7, head.features.width))
    trees = dict(proposer.draft([1, 2]).drafts)
    assert len(trees[1].probs) == 4
    for token, drawn_from in zip(trees[1].token_ids, trees[1].probs, strict=True):
        assert drawn_from is not None
        assert token in drawn_from.token_ids
        assert len(drawn_from.token_ids) <= 20  # its top_k
        assert abs(sum(drawn_from.probs) - 1.0) < 1e-5
    assert trees[2].probs == ()


def test_recurrent_proposer_with_known_prompt_computes_only_the_rest(files: Path) -> None:
    head = _load("eagle3", files)
    proposer = _proposer(head, 32, prefill_budget=8)
    tokens = list(range(1, 40))
    num_rounds: list[int] = []
    for key, last in ((1, 50), (2, 60)):
        text = [*tokens, last]
        proposer.open(key, SessionStart(text, GREEDY, 3, 60))
        proposer.features(key, 0, _rows(text, 0, len(text) - 1, head.features.width))
        num_rounds.append(1)
        while proposer.draft([key]).unfinished:
            num_rounds[-1] += 1
        proposer.check_invariants()
    assert num_rounds == [4, 1]
