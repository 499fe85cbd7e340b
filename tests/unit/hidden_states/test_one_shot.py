"""Sessions of the one-shot methods, and the trees their heads grow, against all paths tried."""

from __future__ import annotations

import itertools
from collections import Counter
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from outrider.draft_tree import DraftTree
from outrider.drafting.hidden_states.heads.base import OneShotHead
from outrider.drafting.hidden_states.heads.medusa import MedusaHead
from outrider.drafting.hidden_states.heads.mlp_speculator import MlpSpeculatorHead, SpeculatorStage
from outrider.drafting.hidden_states.one_shot import OneShotProposer
from outrider.drafting.hidden_states.trees import TargetDraws
from outrider.drafting.masks import DraftMasks
from outrider.drafting.proposer import ProposerLimits, SessionStart
from outrider.engine.layers.linear import Linear, PackedLinear
from outrider.engine.sampling.constraint import ConstraintCompiler
from outrider.engine.sampling.noise import Lane, gumbel_noise
from outrider.engine.sampling.sample import SamplingBatch
from outrider.errors import ConfigError
from outrider.params import Constraint, ConstraintKind, SamplingParams, VerificationRule
from tests.support.checkpoints.one_shot_checkpoints import (
    HIDDEN,
    INNER,
    VOCAB,
    medusa,
    medusa_reference,
    mlp_config,
    mlp_reference,
    mlp_speculator,
    random,
)
from tests.support.models.byte_tokenizer import EOS, byte_tokenizer

DEPTH = 3
MEDUSA = medusa(heads=DEPTH)
MLP_CONFIG = mlp_config(n_predict=DEPTH, tied=False, scaled=True)
MLP = mlp_speculator(MLP_CONFIG)
GREEDY = SamplingParams(temperature=0.0)
STATES = random(40, HIDDEN, seed=9, std=1.0).bfloat16()


def medusa_head() -> OneShotHead:
    blocks = [
        ((MEDUSA[f"{i}.0.linear.weight"], MEDUSA[f"{i}.0.linear.bias"]),) for i in range(DEPTH)
    ]
    heads = [MEDUSA[f"{i}.1.weight"] for i in range(DEPTH)]
    return MedusaHead(blocks, heads, VOCAB)


def mlp_head() -> OneShotHead:
    def stage(i: int) -> SpeculatorStage:
        names = ("emb", "proj", "ln", "head")
        emb, proj, ln, head = (MLP[f"speculator.{name}.{i}.weight"] for name in names)
        return SpeculatorStage(emb, proj, ln, MLP[f"speculator.ln.{i}.bias"], head)

    return MlpSpeculatorHead([stage(i) for i in range(DEPTH)], scale_input=True)


def shared_head() -> OneShotHead:
    """One output layer for all heads, which knows half of the tokens."""
    blocks = [
        ((MEDUSA[f"{i}.0.linear.weight"], MEDUSA[f"{i}.0.linear.bias"]),) for i in range(DEPTH)
    ]
    known = torch.arange(0, VOCAB, 2)
    return MedusaHead(blocks, [MEDUSA["0.1.weight"][known]], VOCAB, known)


HEADS = {"medusa": medusa_head(), "shared": shared_head(), "mlp_speculator": mlp_head()}


@pytest.mark.parametrize("method", HEADS)
def test_one_shot_head_uses_after_a_draft_name_each_linear_that_ran(
    method: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    head, made = HEADS[method], Counter[Linear]()
    forward = PackedLinear.forward

    def counted(self: PackedLinear, *args: Any) -> Tensor:
        made[self] += 1
        return forward(self, *args)

    monkeypatch.setattr(PackedLinear, "forward", counted)
    head.guess(STATES[:1], torch.ones(1, dtype=torch.int64), TargetDraws(None), DEPTH, 1)
    assert made == Counter(use.linear for use in head.uses)
    assert all(use.alone for use in head.uses)


def proposer(method: str, *, tree_width: int = 8, max_sessions: int = 256) -> OneShotProposer:
    return OneShotProposer(
        HEADS[method],
        method=method,
        name="test",
        limits=ProposerLimits(
            max_model_len=64, max_sessions=max_sessions, max_draft_tokens=32, tree_width=tree_width
        ),
    )


def logits(method: str, state: torch.Tensor, tokens: list[int]) -> torch.Tensor:
    """float64 logits of the token after `tokens`, the first of which was drawn from `state`."""
    if method == "medusa":
        return medusa_reference(MEDUSA, len(tokens) - 1, state)
    if method == "shared":
        said = medusa_reference(MEDUSA, len(tokens) - 1, state, MEDUSA["0.1.weight"])
        said[1::2] = -torch.inf
        return said
    return mlp_reference(MLP, MLP_CONFIG, state, tokens)


def scores(
    method: str, state: torch.Tensor, tokens: list[int], sampling: SamplingParams, position: int
) -> torch.Tensor:
    """Log probabilities that the target draws each token at `position` after `tokens`."""
    said = logits(method, state, tokens)
    if not sampling.greedy:
        batch = SamplingBatch.build([sampling], [position])
        said = said + sampling.temperature * gumbel_noise(batch.seed, batch.position, VOCAB)[0]
    return said.log_softmax(-1)


def feed(method: OneShotProposer, session: int, start: int, end: int) -> None:
    method.features(session, start, STATES[start:end].view(torch.int16).numpy().tobytes())


def drafted(method: OneShotProposer, *sessions: int) -> dict[int, DraftTree]:
    round_ = method.draft(sessions)
    assert not round_.unfinished
    assert not round_.lost
    return dict(round_.drafts)


@pytest.mark.parametrize("sampling", [GREEDY, SamplingParams(temperature=0.8, seed=5)])
@pytest.mark.parametrize("name", HEADS)
def test_one_shot_chain_of_any_head_has_the_best_token_at_each_depth(
    name: str, sampling: SamplingParams
) -> None:
    method = proposer(name, tree_width=1)
    assert method.traits.max_draft_tokens == DEPTH
    assert not method.traits.runs_ahead
    prefix = [3, 1, 4, 1, 5]
    method.open(1, SessionStart(prefix, sampling, 8, 64))
    feed(method, 1, 0, 4)
    tree = drafted(method, 1)[1]
    path, odds = [5], []
    for depth in range(DEPTH):
        best = scores(name, STATES[3], path, sampling, 5 + depth).max(dim=-1)
        path.append(int(best.indices))
        odds.append(float(best.values - torch.log(-torch.expm1(best.values))))
    assert tree._replace(confidences=b"") == DraftTree.chain(5, path[1:])
    assert list(tree.confidences) == pytest.approx([128 + 16 * each for each in odds], abs=1)


@pytest.mark.parametrize("sampling", [GREEDY, SamplingParams(temperature=1.0, seed=6)])
@pytest.mark.parametrize("name", HEADS)
def test_one_shot_tree_of_any_head_has_the_best_of_all_paths(
    name: str, sampling: SamplingParams
) -> None:
    method = proposer(name, tree_width=VOCAB)
    method.open(1, SessionStart([7, 8, 9], sampling, 12, 64))
    feed(method, 1, 0, 2)
    tree = drafted(method, 1)[1]
    every: dict[tuple[int, ...], float] = {(): 0.0}
    for depth in range(2):  # what the best of the third depth follow is among these
        for path in [path for path in every if len(path) == depth]:
            ahead = scores(name, STATES[1], [9, *path], sampling, 3 + depth)
            every |= {(*path, token): every[path] + float(ahead[token]) for token in range(VOCAB)}
    for path in sorted((p for p in every if len(p) == 2), key=lambda p: -every[p])[:12]:
        ahead = scores(name, STATES[1], [9, *path], sampling, 5)
        every |= {(*path, token): every[path] + float(ahead[token]) for token in range(VOCAB)}
    expected = sorted(every, key=lambda path: -every[path])[1:13]  # all but the root
    found: list[tuple[int, ...]] = []
    for token, parent in zip(tree.token_ids, tree.parents, strict=True):
        found.append((*(found[parent] if parent >= 0 else ()), token))
    assert tree.base_len == 3
    assert found == expected, "the best come first"
    assert not tree.is_chain
    rates = torch.tensor([every[path] - every[path[:-1]] for path in expected])
    odds = (rates - torch.log(-torch.expm1(rates))).tolist()
    assert list(tree.confidences) == pytest.approx([128 + 16 * each for each in odds], abs=1)


@pytest.mark.parametrize("name", HEADS)
@settings(max_examples=25)
@given(
    rows=st.lists(
        st.tuples(st.integers(2, 20), st.integers(1, 16), st.sampled_from((0.0, 0.6, 1.0))),
        min_size=2,
        max_size=6,
    ),
    width=st.sampled_from((1, 3, 8)),
)
def test_one_shot_drafts_in_any_batch_are_the_same(
    name: str, rows: list[tuple[int, int, float]], width: int
) -> None:
    together, alone = proposer(name, tree_width=width), proposer(name, tree_width=width)
    for i, (length, wanted, temperature) in enumerate(rows):
        sampling = SamplingParams(temperature=temperature, top_k=i, seed=i)
        for method in (together, alone):
            start = SessionStart([(i + p) % VOCAB for p in range(length)], sampling, wanted, 64)
            method.open(i, start)
            feed(method, i, 0, length - 1)
    batch = drafted(together, *range(len(rows)))
    for i, (_, wanted, _) in enumerate(rows):
        assert batch[i] == drafted(alone, i)[i]
        assert 0 < len(batch[i].token_ids) <= wanted
    assert drafted(together, *reversed(range(len(rows)))) == batch, "and not on the order"
    together._at_once = 2  # as many as large vocabularies leave room for
    assert drafted(together, *range(len(rows))) == batch


@pytest.mark.parametrize("name", HEADS)
def test_one_shot_proposer_from_open_to_close_drafts_each_round(name: str) -> None:
    method = proposer(name)
    method.open(1, SessionStart([1, 2, 3, 4], GREEDY, 6, 20))
    assert method.draft([1, 99]).unfinished == [1], "no state yet; nobody knows session 99"
    feed(method, 1, 0, 2)
    assert method.draft([1]).unfinished == [1], "the row before the last token's is missing"
    feed(method, 1, 1, 3)  # overlaps
    first = drafted(method, 1)[1]
    assert drafted(method, 1)[1] == first
    feed(method, 1, 3, 6)  # rows come before the tokens that were drawn from them
    assert drafted(method, 1)[1] == first, "not drafted from a state that is ahead of the text"
    method.commit(1, 4, [5, 6, 7], 6)
    second = drafted(method, 1)[1]
    assert second.base_len == 7
    other = proposer(name)
    other.open(5, SessionStart([1, 2, 3, 4, 5, 6, 7], GREEDY, 6, 20))
    feed(other, 5, 0, 6)
    assert drafted(other, 5)[5] == second, "a session opened anew drafts the same"
    method.commit(1, 7, [1] * 11, 6)
    feed(method, 1, 6, 17)
    assert len(drafted(method, 1)[1].token_ids) == 1, "one token is left besides the target's own"
    method.commit(1, 18, [1], 6)
    assert drafted(method, 1)[1].token_ids == ()
    method.close(1)
    assert method.num_sessions == 0


def test_one_shot_proposer_with_gap_or_broken_row_loses_session() -> None:
    method = proposer("medusa")
    for session in (1, 2, 3):
        method.open(session, SessionStart([1, 2, 3, 4], GREEDY, 4, 20))
        feed(method, session, 0, 2)
    feed(method, 1, 3, 4)
    method.features(2, 2, b"\0" * (2 * HIDDEN - 1))
    feed(method, 3, 2, 3)
    round_ = method.draft([1, 2, 3])
    assert sorted(round_.lost) == [1, 2]
    assert [session for session, _ in round_.drafts] == [3]


def test_one_shot_proposer_of_long_prompt_keeps_one_row() -> None:
    method = proposer("medusa")
    method.open(1, SessionStart(list(range(40)), GREEDY, 4, 64))
    for start in range(0, 39, 13):
        feed(method, 1, start, start + 13)
    (state,) = method._sessions.values()
    assert state.num_held == 1
    assert drafted(method, 1)[1].base_len == 40


@pytest.mark.parametrize("name", HEADS)
def test_one_shot_proposer_under_rejection_sends_distributions(name: str) -> None:
    method = proposer(name)
    sampling = SamplingParams(temperature=0.7, top_k=9, seed=4)
    method.open(1, SessionStart([1, 2], sampling, 2, 64, rule=VerificationRule.REJECTION))
    method.open(2, SessionStart([1, 2, 3], sampling, 8, 64, rule=VerificationRule.REJECTION))
    feed(method, 1, 0, 1)
    feed(method, 2, 0, 2)
    trees = drafted(method, 1, 2)
    for session, state, depth in ((1, STATES[0], 2), (2, STATES[1], DEPTH)):
        tree = trees[session]
        assert tree.is_chain
        assert len(tree.token_ids) == len(tree.probs) == depth
        path = [session + 1]
        for token, drawn_from in zip(tree.token_ids, tree.probs, strict=True):
            said = logits(name, state, path) / 0.7
            top = said.topk(9)
            assert drawn_from is not None
            assert list(drawn_from.token_ids) == top.indices.tolist()
            torch.testing.assert_close(
                torch.tensor(drawn_from.probs), top.values.softmax(-1).float(), rtol=1e-3, atol=1e-4
            )
            assert token in drawn_from.token_ids
            path.append(token)


@pytest.mark.parametrize("rule", [VerificationRule.COUPLED, VerificationRule.REJECTION])
def test_one_shot_proposer_with_constraint_drafts_allowed_tokens(rule: VerificationRule) -> None:
    tokenizer = byte_tokenizer()
    vocab_size = tokenizer.get_vocab_size()
    compiler = ConstraintCompiler(tokenizer.to_str(), vocab_size, frozenset({EOS}))
    lm_heads = [random(vocab_size, HIDDEN, seed=i) for i in range(DEPTH)]
    first = tokenizer.token_to_id("3")
    blocks = ((),) * DEPTH  # x as it is
    method = OneShotProposer(
        MedusaHead(blocks, lm_heads, vocab_size),
        method="medusa",
        name="test",
        masks=DraftMasks(compiler),
    )
    constraint = Constraint(ConstraintKind.REGEX, "[3-9]{9}")
    sampling = SamplingParams(temperature=1.0, seed=8)
    start = SessionStart(
        [5, 6, first], sampling, 8, 64, constraint=constraint, rule=rule, num_output_tokens=1
    )
    method.open(1, start)
    method.open(2, SessionStart([5, 6, first], sampling, 8, 64))
    for session in (1, 2):
        feed(method, session, 0, 2)
    mask = method._sessions[1].mask
    assert mask is not None
    mask._future.exception(timeout=60)  # compiled
    trees = drafted(method, 1, 2)
    lane = Lane.DRAFT if rule is VerificationRule.REJECTION else Lane.SHARED
    expected = []
    for depth, lm_head in enumerate(lm_heads):
        batch = SamplingBatch.build([sampling], [3 + depth], lanes=[lane])
        said = (lm_head.double() @ STATES[1].double())[first : first + 7]
        noise = gumbel_noise(batch.seed, batch.position, vocab_size)[0, first : first + 7]
        expected.append(first + int((said + noise).argmax()))
    assert trees[1].is_chain
    drawn = list(trees[1].token_ids)
    if rule is VerificationRule.COUPLED:
        assert drawn == expected
    else:
        assert all(first <= token < first + 7 for token in drawn)
        assert all(each is not None and len(each.token_ids) == 7 for each in trees[1].probs)
    assert any(not first <= token < first + 7 for token in trees[2].token_ids)
    method.commit(1, 3, [first + 1] * 4, 8)
    feed(method, 1, 2, 6)
    assert all(first <= token < first + 7 for token in drafted(method, 1)[1].token_ids)
    method.close(1)
    assert mask.after([5, 6]) is None, "closed"


def test_one_shot_proposer_with_cuts_drafts_no_cut_token() -> None:
    method = proposer("medusa")
    method.open(1, SessionStart([1, 2], SamplingParams(temperature=1.0, top_k=1), 9, 64))
    feed(method, 1, 0, 1)
    tree = drafted(method, 1)[1]
    expected = [int(medusa_reference(MEDUSA, i, STATES[0]).argmax()) for i in range(DEPTH)]
    assert tree == DraftTree.chain(2, expected, (), bytes([255] * DEPTH)), "nothing else may come"


def test_one_shot_proposer_without_room_loses_newcomer() -> None:
    method = proposer("medusa", max_sessions=2)
    for session in (1, 2, 3):
        method.open(session, SessionStart([1, 2], GREEDY, 4, 20))
        feed(method, session, 0, 1)
    round_ = method.draft([1, 2, 3])
    assert round_.lost == [3]
    assert len(round_.drafts) == 2


def test_proposer_limits_with_zero_tree_width_are_refused() -> None:
    with pytest.raises(ConfigError):
        proposer("medusa", tree_width=0)


def test_one_shot_heads_of_every_kind_equal_the_formulas() -> None:
    head, mlp = HEADS["medusa"], HEADS["mlp_speculator"]
    assert isinstance(head, MedusaHead)
    assert isinstance(mlp, MlpSpeculatorHead)
    assert mlp.features.hidden_size == HIDDEN
    assert mlp.features.final_norm
    for depth, row in itertools.product(range(DEPTH), range(4)):
        state = STATES[row : row + 1]
        expected = medusa_reference(MEDUSA, depth, state[0])
        found = head.logits(state.float(), depth)[0]
        torch.testing.assert_close(found.double(), expected, rtol=1e-4, atol=1e-4)
    for row in range(4):
        states, tokens = mlp.begin(STATES[row : row + 1]), [5, 17, row]
        for depth in range(DEPTH):
            states, found = mlp.step(states, torch.tensor(tokens[depth : depth + 1]), depth)
            expected = mlp_reference(MLP, MLP_CONFIG, STATES[row], tokens[: depth + 1])
            torch.testing.assert_close(found[0].double(), expected, rtol=1e-4, atol=1e-4)
        assert states.shape == (1, INNER)


def test_one_shot_proposer_after_failure_reports_lost_sessions(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    method = proposer("medusa")
    for session, start in ((1, 1), (2, 0)):
        method.open(session, SessionStart(range(6), GREEDY, 3, 64))
        feed(method, session, start, 5)  # 1: with a gap

    def fail(*_: object) -> None:
        raise RuntimeError("out of memory")

    with monkeypatch.context() as patch:
        patch.setattr(HEADS["medusa"], "guess", fail)
        with pytest.raises(RuntimeError, match="out of memory"):
            method.draft([1, 2])
    assert method.draft([2]).lost == [1]
