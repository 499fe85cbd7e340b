"""Constrained output is what its constraint allows, and the same with any drafts.

The truth is the model masked step by step, with neither engine nor drafts; whether it is valid is
checked by other means than the masks: a JSON parser, Python's regular expressions.
"""

from __future__ import annotations

import json
import random
import re
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from gateway.answers.lark import Lark
from outrider.config import EngineConfig
from outrider.draft_port import DraftOffer, PostedBlock
from outrider.draft_tree import DraftProbs, DraftTree
from outrider.engine.engine import Engine
from outrider.engine.sampling.constraint import ConstraintCompiler
from outrider.engine.sampling.sample import SamplingBatch, sample
from outrider.params import (
    REQUEST_RULES,
    Constraint,
    ConstraintKind,
    SamplingParams,
    SpeculationParams,
    StopParams,
    TokenIds,
    Verification,
    VerificationRule,
)
from outrider.policy.base import FixedPolicy
from outrider.types import FinishReason, Request
from tests.support.json_schemas import conforms
from tests.support.models.byte_tokenizer import EOS, byte_tokenizer
from tests.support.models.hash_model import HashModel

TOKENIZER = byte_tokenizer()
VOCAB = TOKENIZER.get_vocab_size() + 5
COMPILER = ConstraintCompiler(TOKENIZER.to_str(), VOCAB, frozenset({EOS}))
MAX_LEN, PAGE = 320, 16
LIKED = [token for text in '"{}[]:,0e' for token in TOKENIZER.encode(text).ids]


class Terse(HashModel):
    """Rather ends what it began: outputs stay short."""

    def _logits(self, states: Any) -> Any:
        logits = super()._logits(states)
        logits[:, LIKED] += 2.0
        return logits


MODEL = Terse(VOCAB, PAGE, num_pages=1)


def truth(request: Request) -> tuple[list[int], FinishReason]:
    """The masked model, one token at a time."""
    assert request.constraint is not None
    stop = request.stop
    resumed = request.prompt_token_ids[len(request.prompt_token_ids) - request.num_resumed_tokens :]
    editor = COMPILER.editor(request.constraint, stop, resumed)
    output: list[int] = []
    ends = stop.stop_token_ids | (frozenset() if stop.ignore_eos else {EOS})
    while True:
        context = [*request.prompt_token_ids, *output]
        logits = torch.from_numpy(MODEL.logits_of(context))[None]
        editor.edit(logits, ())
        assert editor.error is None
        if editor.end is not None:
            return output, FinishReason.STOP
        if len(output) == min(stop.max_tokens, MAX_LEN - len(request.prompt_token_ids)):
            return output, FinishReason.LENGTH
        masked = logits.clone()
        if len(output) < stop.min_tokens:
            masked[:, list(ends)] = -torch.inf
        logits = masked if (masked > -torch.inf).any() else logits
        token = int(sample(logits, SamplingBatch.build([request.sampling], [len(context)])))
        if token in ends:
            return output, FinishReason.STOP
        output.append(token)
        editor.commit((token,))


def run(
    requests: list[Request],
    k: int,
    rng: random.Random,
    truths: list[list[int]],
    num_pages: int = 80,
) -> list[tuple[list[int], FinishReason]]:
    """All requests at once, drafted for with what is mostly right, often wrong."""
    model = Terse(VOCAB, PAGE, num_pages, MAX_LEN)
    config = EngineConfig(
        page_size=PAGE,
        num_pages=num_pages,
        max_model_len=MAX_LEN,
        max_num_batched_tokens=64,
        num_speculative_tokens=k,
    )
    policy = FixedPolicy(k, max_wait_s=0)
    engine = Engine(model, config, eos_token_ids=frozenset({EOS}), policy=policy)
    outputs: dict[int, list[int]] = {}
    reasons: dict[int, FinishReason] = {}
    for request in requests:
        assert request.constraint is not None
        done = request.prompt_token_ids[
            len(request.prompt_token_ids) - request.num_resumed_tokens :
        ]
        engine.submit(request, COMPILER.editor(request.constraint, request.stop, done))
        engine.set_drafting(request.session_id, DraftOffer("p", k))
        outputs[request.session_id] = []
    while len(reasons) < len(requests):
        for request, true in zip(requests, truths, strict=True):
            session = request.session_id
            if k and session not in reasons:
                base = len(request.prompt_token_ids) + len(outputs[session])
                path = true[len(outputs[session]) :][: k + 2]
                path += rng.choices(range(VOCAB), k=rng.randint(0, 2)) + [EOS] * rng.randint(0, 1)
                path = [t if rng.random() < 0.9 else rng.randrange(VOCAB) for t in path]
                parents = list(range(-1, len(path) - 1))
                tree = DraftTree.validated(base, path, parents, vocab_size=VOCAB, max_nodes=64)
                engine.post_block(PostedBlock(session, tree, "p", 1))
        events = engine.step()
        engine.check_invariants()
        assert events is not None
        assert not events.failures
        for commit in events.commits:
            outputs[commit.session_id] += commit.token_ids
            if commit.finish_reason is not None:
                reasons[commit.session_id] = commit.finish_reason
    return [(outputs[r.session_id], reasons[r.session_id]) for r in requests]


leaves = st.sampled_from(
    [
        {"type": "boolean"},
        {"type": "null"},
        {"type": "integer", "minimum": -20, "maximum": 300},
        {"type": "string", "maxLength": 4},
        {"enum": ["red", "ré日", 7, None]},
        {"type": "string", "pattern": "^[ab]{2}-[0-9]$"},
    ]
)


def nested(inner: st.SearchStrategy[Any]) -> st.SearchStrategy[Any]:
    objects = st.dictionaries(st.sampled_from(("ab", "k", "ключ")), inner, min_size=1, max_size=2)
    return objects.map(
        lambda properties: {
            "type": "object",
            "properties": properties,
            "required": list(properties),
            "additionalProperties": False,
        }
    ) | inner.map(lambda items: {"type": "array", "items": items, "maxItems": 2})


schemas = st.recursive(leaves, nested, max_leaves=3)


@settings(max_examples=25, deadline=None, derandomize=True)
@given(schema=schemas, k=st.integers(0, 6), seed=st.integers(0, 2**16))
def test_constraint_of_json_schema_with_any_drafts_is_satisfied(
    schema: Any, k: int, seed: int
) -> None:
    rng = random.Random(seed)
    constraint = Constraint(ConstraintKind.JSON_SCHEMA, json.dumps(schema))
    requests = [
        Request(
            session_id=i,
            prompt_token_ids=(1 + seed % 100, i),
            sampling=SamplingParams(temperature=temperature, seed=seed),
            stop=StopParams(
                max_tokens=rng.choice((300, 300, 12)),
                ignore_eos=rng.random() < 0.2,
                min_tokens=rng.choice((0, 0, 9)),
            ),
            constraint=constraint,
        )
        for i, temperature in enumerate((0.0, 1.0))
    ]
    truths = [truth(request) for request in requests]
    assert run(requests, k, rng, [output for output, _ in truths]) == truths
    for output, reason in truths:
        if reason is FinishReason.STOP:
            assert conforms(json.loads(TOKENIZER.decode(output)), schema, schema)


@pytest.mark.parametrize("rule", [rule for rule in REQUEST_RULES if rule.value != "coupled"])
def test_constraint_under_every_rule_is_satisfied(rule: VerificationRule) -> None:
    """Also where a proposer claims to have drawn what the grammar forbids."""
    rng = random.Random(rule.value)
    constraint = Constraint(ConstraintKind.REGEX, "([ab]{2}-){4,9}(true|null)")
    model = Terse(VOCAB, PAGE, num_pages=80, max_model_len=MAX_LEN)
    config = EngineConfig(page_size=PAGE, num_pages=80, max_model_len=MAX_LEN)
    policy = FixedPolicy(4, max_wait_s=0)
    engine = Engine(model, config, eos_token_ids=frozenset({EOS}), policy=policy)
    outputs: dict[int, list[int]] = {}
    for session in range(12):
        request = Request(
            session_id=session,
            prompt_token_ids=(session,),
            sampling=SamplingParams(temperature=1.2, seed=session),
            stop=StopParams(max_tokens=60),
            speculation=SpeculationParams(verification=Verification(rule)),
            constraint=constraint,
        )
        engine.submit(request, COMPILER.editor(constraint, request.stop))
        engine.set_drafting(session, DraftOffer("p", 4))
        outputs[session] = []
    running, accepted = set(outputs), 0
    likely = (EOS, *TOKENIZER.encode("a-b").ids, *TOKENIZER.encode("true").ids)
    while running:
        for session in running:
            path = rng.choices(likely, k=4)
            probs = [DraftProbs(likely, (1 / len(likely),) * len(likely))] * 4
            tree = DraftTree.chain(1 + len(outputs[session]), path, probs)
            engine.post_block(PostedBlock(session, tree, "p", 1))
        events = engine.step()
        engine.check_invariants()
        assert events is not None
        assert not events.failures
        for commit in events.commits:
            outputs[commit.session_id] += commit.token_ids
            if commit.stats is not None:
                assert commit.finish_reason is FinishReason.STOP
                running.discard(commit.session_id)
                accepted += commit.stats.accepted
    assert accepted > 0
    for output in outputs.values():
        assert re.fullmatch(constraint.source, TOKENIZER.decode(output))


@pytest.mark.parametrize("k", [0, 5])
def test_constraint_of_preempted_requests_stays_in_force(k: int) -> None:
    requests = [
        Request(
            session_id=seed,
            prompt_token_ids=(7, seed),
            sampling=SamplingParams(temperature=seed % 2, seed=seed),
            stop=StopParams(max_tokens=130, min_tokens=120),
            constraint=Constraint(ConstraintKind.REGEX, "([a-c]{3} )*"),
        )
        for seed in range(4)
    ]
    truths = [truth(request) for request in requests]
    assert sum(len(output) for output, _ in truths) > 1.5 * MAX_LEN  # more than there are pages for
    pages = MAX_LEN // PAGE
    assert run(requests, k, random.Random(k), [output for output, _ in truths], pages) == truths


def test_constraint_of_json_object_ends_with_a_whole_object() -> None:
    finished = 0
    for seed in range(6):
        request = Request(
            session_id=seed,
            prompt_token_ids=(1, seed),
            sampling=SamplingParams(temperature=0.7, seed=seed),
            constraint=Constraint(ConstraintKind.JSON_OBJECT),
        )
        expected = truth(request)
        assert run([request], 4, random.Random(seed), [expected[0]]) == [expected]
        if expected[1] is FinishReason.STOP:
            finished += 1
            assert isinstance(json.loads(TOKENIZER.decode(expected[0])), dict)
    assert finished >= 3


@pytest.mark.parametrize(
    ("kind", "source", "pattern"),
    [
        (ConstraintKind.REGEX, r"(yes|no)( [a-f0-9]{2}){1,3}", r"(yes|no)( [a-f0-9]{2}){1,3}"),
        (ConstraintKind.REGEX, r"[0-9]{4}-[0-9]{2}", r"\d{4}-\d{2}"),
        (ConstraintKind.GRAMMAR, 'start: "(" start ")" | /[xy]/', r"(\()*[xy](\))*"),
    ],
)
@pytest.mark.parametrize("temperature", [0.0, 1.0])
def test_constraint_of_regex_or_grammar_with_any_drafts_is_satisfied(
    kind: ConstraintKind, source: str, pattern: str, temperature: float
) -> None:
    for seed in range(4):
        request = Request(
            session_id=seed,
            prompt_token_ids=(7, seed),
            sampling=SamplingParams(temperature=temperature, seed=seed),
            stop=StopParams(max_tokens=200),
            constraint=Constraint(kind, source),
        )
        output, reason = truth(request)
        text = TOKENIZER.decode(output)
        if reason is FinishReason.STOP:
            assert re.fullmatch(pattern, text)
            assert text.count("(") == text.count(")")
        for k in (0, 1, 5):
            assert run([request], k, random.Random(seed), [output]) == [(output, reason)]


@pytest.mark.parametrize("k", [0, 1, 5])
def test_language_behind_free_text_begins_after_its_first_mark_with_any_drafts(k: int) -> None:
    """As formats do behind reasoning, and strict calls behind text."""
    begun = 0
    for optional in (False, True):
        grammar = Lark({})
        thought = grammar.until("o_thought", "}")
        answer = grammar.json("o_answer", {"enum": [1, 22, None]})
        source = grammar.constraint(
            f"{thought} {answer}" + (f" | {grammar.text()}" if optional else "")
        )
        for seed in range(4):
            request = Request(
                session_id=seed,
                prompt_token_ids=(7, seed),
                sampling=SamplingParams(temperature=seed % 2, seed=seed),
                stop=StopParams(max_tokens=200),
                constraint=source,
            )
            output, reason = truth(request)
            assert run([request], k, random.Random(seed), [output]) == [(output, reason)]
            before, mark, after = TOKENIZER.decode(output).partition("}")
            begun += bool(mark)
            if reason is FinishReason.STOP:
                assert after in ("1", "22", "null") if mark else optional
            assert mark or before
    assert begun > 4


@pytest.mark.parametrize("temperature", [0.0, 1.0])
def test_constraint_of_resumed_request_continues(temperature: float) -> None:
    schema = '{"type": "array", "items": {"type": "integer"}, "minItems": 3, "maxItems": 5}'
    request = Request(
        session_id=1,
        prompt_token_ids=(9, 9),
        sampling=SamplingParams(temperature=temperature, seed=3),
        stop=StopParams(max_tokens=200),
        constraint=Constraint(ConstraintKind.JSON_SCHEMA, schema),
    )
    output, reason = truth(request)
    assert reason is FinishReason.STOP
    for done in (1, len(output) // 2, len(output) - 1):
        resumed: TokenIds = tuple(output[:done])
        rest = Request(
            session_id=1,
            prompt_token_ids=(*request.prompt_token_ids, *resumed),
            sampling=request.sampling,
            stop=request.stop,
            constraint=request.constraint,
            num_resumed_tokens=done,
        )
        assert run([rest], 3, random.Random(done), [output[done:]]) == [(output[done:], reason)]


@pytest.mark.parametrize("k", [0, 3])
def test_constraint_complete_at_the_last_token_finishes_with_stop(k: int) -> None:
    """Also where a stop token is all that could follow."""
    for source, stops in (("[ab]-cd", set()), ("[ab]-cd!", {"!"})):
        request = Request(
            session_id=1,
            prompt_token_ids=(4,),
            stop=StopParams(
                max_tokens=4,
                stop_token_ids=frozenset(TOKENIZER.token_to_id(stop) for stop in stops),
            ),
            constraint=Constraint(ConstraintKind.REGEX, source),
        )
        output, reason = truth(request)
        assert (len(output), reason) == (4, FinishReason.STOP)
        for true in (output, output[:-1], [*output, TOKENIZER.token_to_id("!")]):
            assert run([request], k, random.Random(0), [true]) == [(output, reason)]


def test_constraint_with_forbidden_drafts_lets_only_allowed_ones_be_verified() -> None:
    model = Terse(VOCAB, PAGE, num_pages=80, max_model_len=MAX_LEN)
    config = EngineConfig(page_size=PAGE, num_pages=80, max_model_len=MAX_LEN)
    engine = Engine(model, config, policy=FixedPolicy(4, max_wait_s=0))
    constraint = Constraint(ConstraintKind.REGEX, "[01]{20}")
    request = Request(
        session_id=1, prompt_token_ids=(4,), running_stats=True, constraint=constraint
    )
    engine.submit(request, COMPILER.editor(constraint, request.stop))
    engine.set_drafting(1, DraftOffer("p", 4))
    drafted, length = [], 1
    for text in ("", "01x1", "x", "", "0101"):
        path = TOKENIZER.encode(text).ids
        if path:
            engine.post_block(PostedBlock(1, DraftTree.chain(length, path), "p", 1))
        events = engine.step()
        assert events is not None
        (commit,) = events.commits
        assert commit.stats is not None
        drafted.append(commit.stats.drafted)
        length += len(commit.token_ids)
    assert drafted == [0, 2, 2, 2, 6]


def test_constraint_with_lexer_full_within_a_draft_replaces_it() -> None:
    constraint = Constraint(ConstraintKind.REGEX, "[ab]*a[ab]{18}")
    tokens = [TOKENIZER.token_to_id(text) for text in "ab"]
    request = Request(
        session_id=1,
        prompt_token_ids=(4,),
        sampling=SamplingParams(seed=2),
        stop=StopParams(max_tokens=200, ignore_eos=True),
        constraint=constraint,
    )
    expected, rng = truth(request), random.Random(0)
    assert expected[1] is FinishReason.LENGTH
    first = COMPILER.compiled(constraint)
    while COMPILER.compiled(constraint) is first:
        other = COMPILER.editor(constraint, request.stop)
        for _ in range(200):
            other.edit(torch.zeros(9, VOCAB), tuple(rng.choices(tokens, k=8)))
            other.commit((rng.choice(tokens),))
    for k in range(1, 7):
        COMPILER._cached[constraint] = first
        assert run([request], k, rng, [expected[0]]) == [expected]
        assert COMPILER.compiled(constraint) is not first


@pytest.mark.parametrize("drafted", ["", "ab!", "ab!ee", "abd"])
def test_constraint_without_a_possible_next_token_fails_only_its_request(drafted: str) -> None:
    """Also where a draft leads there, or past it. The other request gets the same draft."""
    model = HashModel(VOCAB, PAGE, num_pages=80, max_model_len=MAX_LEN)
    config = EngineConfig(page_size=PAGE, num_pages=80, max_model_len=MAX_LEN)
    policy = FixedPolicy(4, max_wait_s=0)
    engine = Engine(model, config, eos_token_ids=frozenset({EOS}), policy=policy)
    dead = Constraint(ConstraintKind.GRAMMAR, 'start: "ab" x\nx: "!" y | "d"\ny: y "e"')
    for session, biases in enumerate((((TOKENIZER.token_to_id("!"), 100.0),), ())):
        request = Request(
            session_id=session,
            prompt_token_ids=(5,),
            sampling=SamplingParams(temperature=0.0, logit_bias=biases),
            stop=StopParams(max_tokens=20, ignore_eos=True),
            constraint=dead if biases else None,
        )
        engine.submit(request, COMPILER.editor(dead, request.stop) if biases else None)
        if path := TOKENIZER.encode(drafted).ids:
            engine.set_drafting(session, DraftOffer("p", 4))
            parents = list(range(-1, len(path) - 1))
            tree = DraftTree.validated(1, path, parents, vocab_size=VOCAB, max_nodes=64)
            engine.post_block(PostedBlock(session, tree, "p", 1))
    failed, finished, outputs = [], [], {0: [], 1: []}
    while len(failed) + len(finished) < 2:
        events = engine.step()
        engine.check_invariants()
        assert events is not None
        failed += [(failure.session_id, failure.error) for failure in events.failures]
        for commit in events.commits:
            outputs[commit.session_id] += commit.token_ids
            finished += [commit.session_id] if commit.finish_reason else []
    assert finished == [1]
    ((session, error),) = failed
    assert session == 0
    assert error.param == "grammar"
    assert TOKENIZER.decode(outputs[0]) == "ab!"
