"""A draft model that drafts within the constraint that the scorer will mask by."""

from __future__ import annotations

import threading
from concurrent.futures import Future

import pytest
import torch

from outrider.drafting.copying.ngram import NgramProposer
from outrider.drafting.draft_model.loops import EagerForks
from outrider.drafting.draft_model.proposer import DraftModelProposer
from outrider.drafting.hybrid import HybridProposer
from outrider.drafting.masks import DraftMask, DraftMasks
from outrider.drafting.proposer import Pace, ProposerLimits, SessionStart
from outrider.engine.sampling.constraint import ConstraintCompiler, ConstraintEditor
from outrider.engine.sampling.noise import Lane
from outrider.engine.sampling.sample import SamplingBatch, sample
from outrider.params import (
    Constraint,
    ConstraintKind,
    SamplingParams,
    StopParams,
    VerificationRule,
)
from tests.support.models.byte_tokenizer import EOS, byte_tokenizer
from tests.support.models.hash_model import HashModel

TOKENIZER = byte_tokenizer()
VOCAB = TOKENIZER.get_vocab_size()
COMPILER = ConstraintCompiler(TOKENIZER.to_str(), VOCAB, frozenset({EOS}))
SCHEMA = Constraint(
    ConstraintKind.JSON_SCHEMA, '{"type": "array", "items": {"type": "integer"}, "minItems": 9}'
)
K = 5
GREEDY = SamplingParams(temperature=0.0)
OTHER = SamplingParams(temperature=1.0, seed=99)


class Ready(DraftMasks):
    """Compiles at once, so that no draft is made before."""

    def open(self, constraint: Constraint, tokens: tuple[int, ...], num_output: int) -> DraftMask:
        mask = super().open(constraint, tokens, num_output)
        mask._future.exception(timeout=60)
        return mask


def proposer() -> DraftModelProposer:
    model = HashModel(VOCAB, num_pages=512, max_model_len=256)
    return DraftModelProposer(
        model, name="hash", fork_drafter=EagerForks(model), masks=Ready(COMPILER)
    )


def masked_chain(
    context: list[int], num_output: int, sampling: SamplingParams, lane: Lane = Lane.SHARED
) -> list[int]:
    """The definition: the draft model's next K tokens, each from masked logits."""
    model = HashModel(VOCAB, num_pages=1)
    editor = COMPILER.editor(SCHEMA, StopParams(), context[len(context) - num_output :])
    text = list(context)
    for _ in range(K):
        logits = torch.from_numpy(model.logits_of(text))[None]
        editor.edit(logits, ())
        batch = SamplingBatch.build([sampling], [len(text)], lanes=[lane])
        token = int(sample(logits, batch))
        text.append(token)
        editor.commit((token,))
    return text[len(context) :]


@pytest.mark.parametrize("rule", [VerificationRule.COUPLED, VerificationRule.REJECTION])
@pytest.mark.parametrize("temperature", [0.0, 1.0])
def test_draft_mask_with_constraint_gives_drafts_of_the_masked_model(
    temperature: float, rule: VerificationRule
) -> None:
    sampling = SamplingParams(temperature=temperature, seed=4, top_k=20)
    samples = temperature > 0 and rule is VerificationRule.REJECTION
    lane = Lane.DRAFT if samples else Lane.SHARED
    method = proposer()
    text = [7, 7, 7]
    method.open(1, SessionStart(text, sampling, K, 250, constraint=SCHEMA, rule=rule))
    method.open(2, SessionStart(text, sampling, K, 250))  # beside one without a constraint
    for accepted in (2, 0, K, 1):
        done = method.draft([1, 2])
        drafts = dict(done.drafts)
        expected = masked_chain(text, len(text) - 3, sampling, lane)
        assert list(drafts[1].token_ids) == expected
        assert 2 in done.at_hand or list(drafts[2].token_ids) != expected
        assert bool(drafts[1].probs) == samples
        method.ahead([1, 2], Pace())
        method.check_invariants()
        came_true = expected[:accepted]
        after = masked_chain([*text, *came_true], len(text) - 3 + accepted, OTHER)
        came_true.append(after[0])
        for session in (1, 2):
            method.commit(session, len(text), came_true, K)
        text += came_true


def test_draft_mask_of_resumed_session_knows_its_output() -> None:
    text = [7, 7, *TOKENIZER.encode("[12").ids]
    method = proposer()
    start = SessionStart(text, GREEDY, K, 250, constraint=SCHEMA, num_output_tokens=len(text) - 2)
    method.open(1, start)
    ((_, tree),) = method.draft([1]).drafts
    assert list(tree.token_ids) == masked_chain(text, len(text) - 2, GREEDY)


@pytest.mark.parametrize(
    ("constraint", "output"),
    [
        (Constraint(ConstraintKind.REGEX, "[a"), ""),
        (SCHEMA, "no array"),  # before `open`
    ],
)
def test_draft_mask_when_not_compilable_is_left_out(constraint: Constraint, output: str) -> None:
    text = [7, 7, *TOKENIZER.encode(output).ids]
    method = proposer()
    start = SessionStart(
        text, GREEDY, K, 250, constraint=constraint, num_output_tokens=len(text) - 2
    )
    method.open(1, start)
    method.open(2, SessionStart(text, GREEDY, K, 250))
    drafts = dict(method.draft([1, 2]).drafts)
    assert drafts[1].token_ids == drafts[2].token_ids


def test_draft_mask_when_output_breaks_it_ends() -> None:
    method = proposer()
    method.open(1, SessionStart([7], GREEDY, K, 250, constraint=SCHEMA))
    method.open(2, SessionStart([7], GREEDY, K, 250))
    wrong = TOKENIZER.encode("no array").ids
    method.draft([1, 2])
    for session in (1, 2):
        method.commit(session, 1, wrong, K)
    drafts = dict(method.draft([1, 2]).drafts)
    assert drafts[1].token_ids == drafts[2].token_ids


def test_draft_mask_while_compiling_delays_no_draft() -> None:
    compiling: Future[ConstraintEditor] = Future()
    mask = DraftMask(compiling, 1)
    assert mask.after([7]) is None
    compiling.set_result(COMPILER.editor(SCHEMA, StopParams()))
    array = TOKENIZER.encode("[1").ids
    editor = mask.after([7, *array])
    assert editor is not None
    assert editor.num_allowed(tuple(TOKENIZER.encode(",2x").ids)) == 2


def test_draft_mask_when_closed_early_is_not_compiled() -> None:
    masks, compiling, go_on = DraftMasks(COMPILER), threading.Event(), threading.Event()
    masks._pool.submit(lambda: (compiling.set(), go_on.wait(60)))
    assert compiling.wait(60)
    model = HashModel(VOCAB, num_pages=512, max_model_len=256)
    method = DraftModelProposer(model, name="hash", masks=masks)
    method.open(1, SessionStart([7], GREEDY, K, 250, constraint=SCHEMA))
    mask = method._sessions[1].mask
    assert mask is not None
    method.close(1)
    go_on.set()
    assert mask._future.cancelled()
    assert mask.after([7]) is None


def test_draft_mask_when_compilation_fails_is_left_out() -> None:
    compiled: Future[ConstraintEditor] = Future()
    compiled.set_exception(RuntimeError("llguidance fell over"))
    assert DraftMask(compiled, 3).after([7, 7, 7]) is None


def test_draft_mask_of_returned_session_knows_its_output() -> None:
    model = HashModel(VOCAB, num_pages=512, max_model_len=256)
    small = DraftModelProposer(
        model, name="hash", limits=ProposerLimits(max_sessions=1), masks=Ready(COMPILER)
    )
    method = HybridProposer([NgramProposer(), small])
    start = SessionStart([7, 7], GREEDY, K, 250, constraint=SCHEMA, methods=("draft_model",))
    method.open(1, start)
    output = TOKENIZER.encode("[12,").ids
    method.commit(1, 2, output, K)
    small.open(2, start)  # at the cost of 1
    method.draft([])
    ((session, tree),) = method.draft([1]).drafts
    assert session == 1
    assert list(tree.token_ids) == masked_chain([7, 7, *output], len(output), GREEDY)
