"""Masks of constraints, one request at a time."""

from __future__ import annotations

import asyncio
import json
import random
import threading
from pathlib import Path

import pytest
import torch
from torch import Tensor

from outrider.engine.sampling import constraint
from outrider.engine.sampling.constraint import ConstraintCompiler, ConstraintEditor
from outrider.errors import CapacityError, ConfigError, InvalidRequestError
from outrider.params import Constraint, ConstraintKind, StopParams, TokenIds
from outrider.types import FinishReason, Request
from scorer_service import constraints
from scorer_service.constraints import Constraints
from tests.support.models.byte_tokenizer import EOS, byte_tokenizer
from tests.support.models.tokenizers import sentencepiece_bpe, word_piece

TOKENIZER = byte_tokenizer()
PADDED = TOKENIZER.get_vocab_size() + 11
COMPILER = ConstraintCompiler(TOKENIZER.to_str(), PADDED, frozenset({EOS}))
REGEX, GRAMMAR = ConstraintKind.REGEX, ConstraintKind.GRAMMAR


def ids(text: str) -> TokenIds:
    return tuple(TOKENIZER.encode(text).ids)


def token(text: str) -> int:
    (only,) = ids(text)
    return only


def editor(kind: ConstraintKind, source: str = "", **stop: object) -> ConstraintEditor:
    return COMPILER.editor(Constraint(kind, source), StopParams(**stop))  # type: ignore[arg-type]


def masked(edited: ConstraintEditor, draft: TokenIds = ()) -> Tensor:
    logits = torch.zeros(len(draft) + 1, PADDED)
    edited.edit(logits, draft)
    return logits


def allowed(edited: ConstraintEditor, draft: TokenIds = ()) -> list[set[str]]:
    """What may follow the output and each prefix of the draft, as text; EOS is ''."""
    return [
        {TOKENIZER.decode([i]) for i in (row == 0).nonzero().flatten().tolist()}
        for row in masked(edited, draft)
    ]


def test_draft_with_constraint_is_masked_like_output() -> None:
    text = ids('{"ab": [12, true]}')
    drafted, followed = editor(ConstraintKind.JSON_OBJECT), editor(ConstraintKind.JSON_OBJECT)
    rows = masked(drafted, text)
    assert drafted.end == len(text), "a whole object: nothing may follow"
    for row, next_token in zip(rows, text, strict=False):
        assert torch.equal(masked(followed)[0], row)
        assert row[next_token] == 0
        followed.commit((next_token,))
    assert followed.finish(None) is FinishReason.STOP
    assert drafted.finish(None) is None, "a draft is not output"
    assert torch.equal(masked(drafted), rows[:1])


def test_draft_with_constraint_when_wrong_keeps_the_rows_before_it() -> None:
    edited = editor(REGEX, "[a-c]{3}")
    right, wrong = masked(edited, ids("cba")), masked(edited, ids("c!a"))
    assert torch.equal(right[:2], wrong[:2])
    assert edited.end is None
    assert torch.equal(masked(edited, ids("cba")), right), "nothing of it is kept"


def test_draft_with_constraint_ends_at_the_first_forbidden_token() -> None:
    edited = editor(REGEX, "(abc)*")
    assert edited.num_allowed(ids("abc")) == len(ids("abc"))
    assert edited.num_allowed(ids("abx")) == 1
    assert edited.num_allowed(ids("x")) == 0
    assert edited.num_allowed((*ids("abc"), EOS, *ids("abc"))) == len(ids("abc"))
    assert edited.num_allowed(()) == 0


def test_constraint_ends_output_only_where_it_is_complete() -> None:
    edited = editor(REGEX, "ab?")
    assert allowed(edited) == [{"a", "ab"}]
    edited.commit((token("a"),))
    assert allowed(edited) == [{"", "b"}]
    edited.commit((token("b"),))
    assert edited.finish(None) is FinishReason.STOP


def test_constraint_with_stop_tokens_ends_like_eos() -> None:
    stop = frozenset({token("!"), token("b")})
    edited = editor(REGEX, "cbd?", stop_token_ids=stop, ignore_eos=True)
    assert allowed(edited) == [{"c"}]
    edited.commit(ids("c"))
    masked(edited)
    assert edited.end == 0, "only b may follow, which ends the request"
    assert edited.error is None
    edited = editor(REGEX, "cd.?", stop_token_ids=stop, ignore_eos=True)
    edited.commit(ids("cd"))
    assert {"b", "!", "x"} < allowed(edited)[0]
    assert "" not in allowed(edited)[0]


def test_constraint_without_eos_or_stop_token_continues_until_complete() -> None:
    edited = editor(REGEX, "a{1,2}", ignore_eos=True)
    for _ in range(2):
        assert allowed(edited) == [{"a"}]
        edited.commit(ids("a"))
    assert edited.finish(FinishReason.LENGTH) is FinishReason.STOP


def test_constraint_with_padded_vocabulary_never_allows_padding() -> None:
    edited = editor(REGEX, r"(?s:.*)")
    row = masked(edited)[0]
    assert (row[TOKENIZER.get_vocab_size() :] == -torch.inf).all()
    assert (row[1 : TOKENIZER.get_vocab_size()] == 0).any()


def test_constraint_of_model_with_fewer_tokens_than_its_tokenizer_works() -> None:
    compiler = ConstraintCompiler(TOKENIZER.to_str(), 100, frozenset({EOS}))
    edited = compiler.editor(Constraint(REGEX, "a"), StopParams())
    logits = torch.zeros(1, 100)
    edited.edit(logits, ())
    assert (logits == 0).sum() == (logits[0, token("a")] == 0).sum() == 1


def test_constraint_of_resumed_output_is_replayed() -> None:
    done = ids('{"ab":')
    constraint = Constraint(ConstraintKind.JSON_OBJECT)
    followed = editor(ConstraintKind.JSON_OBJECT)
    followed.commit(done)
    resumed = COMPILER.editor(constraint, StopParams(), done)
    assert torch.equal(masked(resumed), masked(followed))
    with pytest.raises(InvalidRequestError, match="num_resumed_tokens") as caught:
        COMPILER.editor(constraint, StopParams(), ids("[1]"))
    assert caught.value.param == "json_object"


@pytest.mark.parametrize(
    ("kind", "source", "message"),
    [
        (ConstraintKind.JSON_SCHEMA, "{", "EOF"),
        (ConstraintKind.JSON_SCHEMA, "[1]", "object"),
        (ConstraintKind.JSON_SCHEMA, '{"type": "strin"}', "Invalid type: strin"),
        (ConstraintKind.JSON_SCHEMA, '{"not": {"type": "string"}}', "not"),
        (ConstraintKind.JSON_SCHEMA, '{"type": "string", "enum": []}', "nsatisfiable|empty|enum"),
        (ConstraintKind.REGEX, "[a", "unclosed character class"),
        (ConstraintKind.REGEX, "a(?=b)", "look-around"),
        (ConstraintKind.REGEX, "(a{0})*", "no text"),
        (ConstraintKind.GRAMMAR, "start: other", "unknown name"),
        (ConstraintKind.GRAMMAR, 'start: start "a"', "no text"),
        (ConstraintKind.GRAMMAR, "start: X\nX: /.*a.{31}/ & /.*b.{32}/", "& or ~"),
        (ConstraintKind.GRAMMAR, "start: X\nX: ~(/.*a.{31}/ | /.*b.{32}/)", "& or ~"),
    ],
)
def test_constraint_that_cannot_be_compiled_is_refused_by_name(
    kind: ConstraintKind, source: str, message: str
) -> None:
    with pytest.raises(InvalidRequestError, match=message) as caught:
        editor(kind, source)
    assert caught.value.param == kind.value


def test_constraint_that_looks_like_an_intersection_compiles() -> None:
    edited = editor(GRAMMAR, 'start: "&~" X  // a & b, ~c\nX: /[&~\\/]~&/')
    assert edited.num_allowed(ids("&~/~&")) == len(ids("&~/~&"))


def test_constraint_with_ambiguous_grammar_is_too_complex_before_it_is_slow() -> None:
    edited = editor(GRAMMAR, 'start: e\ne: e e | "a" | e e e')
    for _ in range(200):
        masked(edited)
        if edited.error is None:
            edited.commit(ids("a"))
    assert edited.error is not None
    assert "too complex" in edited.error.message


@pytest.mark.parametrize(
    ("kind", "source"),
    [
        (REGEX, "".join(random.Random(1).choices("abcdefgh ", k=250_000))),
        (REGEX, "(abcdefghi){50000}"),
        (ConstraintKind.JSON_SCHEMA, json.dumps({"const": "ab" * 120_000})),
    ],
)
def test_constraint_whose_masks_are_slow_is_refused_and_then_known(
    kind: ConstraintKind, source: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    compiler = ConstraintCompiler(TOKENIZER.to_str(), PADDED, frozenset({EOS}))
    for _ in range(2):
        with pytest.raises(InvalidRequestError, match=f"^{kind.value} takes too long at each"):
            compiler.editor(Constraint(kind, source), StopParams())
        monkeypatch.setattr(compiler, "_compile", None)


def test_constraint_whose_masks_prove_slow_ends_its_request_and_is_refused(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    compiler = ConstraintCompiler(TOKENIZER.to_str(), PADDED, frozenset({EOS}))
    slow, other = Constraint(REGEX, "a{1,9}"), Constraint(REGEX, "b{1,9}")
    edited = compiler.editor(slow, StopParams())
    monkeypatch.setattr(constraint, "_MASK_S", -0.4)  # each mask takes so much more
    for _ in range(3):
        assert edited.error is None
        masked(edited)
    assert edited.error is not None
    assert "takes too long" in edited.error.message
    monkeypatch.undo()
    with pytest.raises(InvalidRequestError, match="takes too long"):
        compiler.editor(slow, StopParams())
    assert masked(compiler.editor(other, StopParams())).isfinite().any()


def test_constraint_of_many_optional_fields_compiles() -> None:
    fields = {f"field_{i}": {"type": ["string", "null"]} for i in range(400)}
    schema = {"type": "object", "properties": fields, "additionalProperties": False}
    edited = editor(ConstraintKind.JSON_SCHEMA, json.dumps(schema))
    text = ids(json.dumps({f"field_{i}": None for i in range(7, 400, 90)}))
    assert edited.num_allowed(text) == len(text)
    edited.commit(text)
    assert edited.finish(None) is FinishReason.STOP


def test_constraint_without_a_possible_next_token_is_an_error() -> None:
    edited = editor(GRAMMAR, 'start: "ab" x\nx: "!" y | "d"\ny: y "e"')
    rows = masked(edited, ids("ab!"))
    assert edited.end == len(ids("ab!"))
    edited.commit(ids("ab!"))
    assert edited.finish(None) is None
    assert edited.error is not None
    assert edited.error.param == "grammar"
    assert torch.isfinite(rows).any(dim=1).all(), "something can always be drawn"


def test_draft_without_a_possible_next_token_is_no_error() -> None:
    edited = editor(GRAMMAR, 'start: "ab" x\nx: "!" y | "d"\ny: y "e"')
    before = masked(edited)
    masked(edited, ids("ab!"))
    assert edited.error is None
    assert torch.equal(masked(edited), before)
    edited.commit(ids("abd"))
    assert edited.finish(None) is FinishReason.STOP
    assert edited.error is None


def test_constraint_seen_by_other_requests_ends_no_request() -> None:
    """The states of a lexer add up over all requests of a constraint, and over their drafts."""
    rng = random.Random(1)
    compiler = ConstraintCompiler(TOKENIZER.to_str(), PADDED, frozenset({EOS}))
    constraint = Constraint(REGEX, "[ab]*a[ab]{18}")  # 2^19 states

    def some(length: int) -> TokenIds:
        return ids("".join(rng.choices("ab", k=length)))

    bystander = compiler.editor(constraint, StopParams())
    bystander.commit(some(40))
    first = compiler.compiled(constraint)
    for _ in range(40):
        edited = compiler.editor(constraint, StopParams())
        for _ in range(200):
            masked(edited, some(8))
            edited.commit(some(1))
            assert edited.finish(None) is None
            assert edited.error is None
    assert compiler.compiled(constraint) is not first, "it was full"
    for _ in range(40):
        assert masked(bystander, some(8)).isfinite().sum(dim=1).min() >= 2
        bystander.commit(some(1))
        assert bystander.error is None


def test_constraint_too_complex_ends_only_its_own_request() -> None:
    rng = random.Random(1)
    compiler = ConstraintCompiler(TOKENIZER.to_str(), PADDED, frozenset({EOS}))
    constraint = Constraint(REGEX, "(.*a.{200}b.{200}){5}")
    for _ in range(4):
        edited = compiler.editor(constraint, StopParams())
        while edited.error is None and len(edited._output) < 1500:
            masked(edited, ids("".join(rng.choice("ab") for _ in range(4))))
            edited.commit(ids(rng.choice("ab")))
            edited.finish(None)
        following = compiler.editor(constraint, StopParams())
        masked(following)
        assert following.error is None
        if edited.error is not None:
            return
    raise AssertionError("none was too complex")


def test_constraint_lexer_that_compiles_slowly_is_left_to_the_next_request() -> None:
    rng = random.Random(1)
    compiler = ConstraintCompiler(TOKENIZER.to_str(), PADDED, frozenset({EOS}))
    constraint = Constraint(REGEX, f"[ab]*a[ab]{{18}}({'c' * 2**14})?")
    edited = compiler.editor(constraint, StopParams())
    while edited.error is None:
        masked(edited, ids("".join(rng.choices("ab", k=8))))
        edited.commit(ids(rng.choice("ab")))
        assert edited.finish(None) is None
    assert "too complex" in edited.error.message
    following = compiler.editor(constraint, StopParams())
    masked(following, ids("abab"))
    assert following.error is None


def test_constraint_whose_new_lexer_is_slower_ends_its_request_alone(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """The engine's thread, which other requests share, must not raise."""
    rng = random.Random(1)
    compiler = ConstraintCompiler(TOKENIZER.to_str(), PADDED, frozenset({EOS}))
    slower = Constraint(REGEX, "[ab]*a[ab]{18}")
    edited = compiler.editor(slower, StopParams())
    monkeypatch.setattr(compiler, "_mask_s", lambda _: 1.0)
    while edited.error is None:
        masked(edited, ids("".join(rng.choices("ab", k=8))))
        edited.commit(ids(rng.choice("ab")))
        assert edited.finish(None) is None
    with pytest.raises(InvalidRequestError, match="takes too long"):
        compiler.editor(slower, StopParams())


def test_constraint_that_is_measured_slow_once_is_measured_again(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    compiler = ConstraintCompiler(TOKENIZER.to_str(), PADDED, frozenset({EOS}))
    seconds = iter([1.0, 0.001])
    monkeypatch.setattr(compiler, "_mask_s", lambda _: next(seconds))
    assert masked(compiler.editor(Constraint(REGEX, "b{1,9}"), StopParams())).isfinite().any()
    assert next(seconds, None) is None


def test_constraint_with_tokenizers_of_other_kinds_works() -> None:
    pieces = sentencepiece_bpe()
    compiler = ConstraintCompiler(pieces.to_str(), pieces.get_vocab_size(), frozenset({2}))
    edited = compiler.editor(Constraint(REGEX, "a(b|é)"), StopParams())
    logits = torch.zeros(2, pieces.get_vocab_size())
    edited.edit(logits, (pieces.token_to_id("a"),))
    after_a = {pieces.id_to_token(i) for i in (logits[1] == 0).nonzero().flatten().tolist()}
    assert after_a >= {"b", "é", "<0x62>", "<0xC3>"}
    assert "a" not in after_a
    with pytest.raises(ConfigError, match="llguidance"):
        ConstraintCompiler(word_piece().to_str(), 12, frozenset())


def test_constraint_in_folder_without_tokenizer_is_refused(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=r"tokenizer\.json"):
        ConstraintCompiler.load(tmp_path, 32, frozenset())


def request(source: str) -> Request:
    return Request(session_id=1, prompt_token_ids=(1,), constraint=Constraint(REGEX, source))


class Blocked(ConstraintCompiler):
    """Compiles once it is let go."""

    def __init__(self) -> None:
        super().__init__(TOKENIZER.to_str(), PADDED, frozenset({EOS}))
        self.go_on = threading.Event()

    def _compile(self, constraint: Constraint):  # type: ignore[no-untyped-def]
        if constraint.source == "slow":
            assert self.go_on.wait(60)
        return super()._compile(constraint)


async def test_constraints_when_compilation_is_slow_have_a_deadline_and_a_bound(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    compiler = Blocked()
    service = Constraints(compiler, timeout_s=0.5)  # threads begin by then on a busy machine, too
    try:
        slow = [asyncio.create_task(service.editor(request("slow"))) for _ in range(3)]
        done = await asyncio.gather(*slow, return_exceptions=True)
        kinds = sorted(type(error).__name__ for error in done)
        assert kinds == ["CapacityError", "InvalidRequestError", "InvalidRequestError"]
        monkeypatch.setattr(constraints, "_MAX_PENDING", 2)
        with pytest.raises(CapacityError, match="Too many"):
            await service.editor(request("a"))
    finally:
        compiler.go_on.set()
        service.close()


def test_schema_with_options_of_a_wrong_type_in_a_grammar_is_refused() -> None:
    with pytest.raises(InvalidRequestError, match="invalid type"):
        editor(GRAMMAR, 'start: %json {"x-guidance": 5}')


async def test_constraints_service_with_any_constraint_compiles_or_refuses_it() -> None:
    service = Constraints(COMPILER)
    edited = await service.editor(request("a+"))
    assert edited is not None
    assert edited.num_allowed(ids("aa")) == 2
    with pytest.raises(InvalidRequestError) as caught:
        await service.editor(request("[a"))
    assert caught.value.param == "regex"
    assert await service.editor(Request(session_id=2, prompt_token_ids=(1,))) is None
    service.close()
    without = Constraints(None)
    with pytest.raises(InvalidRequestError, match=r"tokenizer\.json"):
        await without.editor(request("a"))
    without.close()


def test_constraints_service_with_a_known_schema_compiles_it_once() -> None:
    compiler = ConstraintCompiler(TOKENIZER.to_str(), PADDED, frozenset({EOS}), max_cached=2)
    compiled: list[str] = []
    compile_anew = compiler._compile

    def counting(constraint: Constraint):  # type: ignore[no-untyped-def]
        compiled.append(json.loads(constraint.source)["title"])
        return compile_anew(constraint)

    compiler._compile = counting  # type: ignore[method-assign]
    for name in "aabacaba":
        schema = json.dumps({"type": "null", "title": name})
        compiler.editor(Constraint(ConstraintKind.JSON_SCHEMA, schema), StopParams())
    assert "".join(compiled) == "abcb", "the one that was not used for longest goes"
