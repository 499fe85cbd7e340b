"""A JSON schema is refused, or every text of it can be ended and satisfies it.

No model is needed: tokens are drawn at random from those that the mask allows.
"""

from __future__ import annotations

import json
import random
from typing import Any

import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from outrider.engine.sampling.constraint import ConstraintCompiler, ConstraintEditor
from outrider.errors import InvalidRequestError
from outrider.params import Constraint, ConstraintKind, StopParams
from tests.support.json_schemas import conforms, json_schemas
from tests.support.models.byte_tokenizer import EOS, byte_tokenizer

TOKENIZER = byte_tokenizer()
VOCAB = TOKENIZER.get_vocab_size()
COMPILER = ConstraintCompiler(TOKENIZER.to_str(), VOCAB, frozenset({EOS}))
SHORT = [EOS, *(TOKENIZER.token_to_id(text) for text in '}]":,nul1234567890')]
QUOTE, IN_STRINGS = TOKENIZER.token_to_id('"'), TOKENIZER.token_to_id("(")
MAX_TOKENS = 400


def editor_of(schema: Any) -> ConstraintEditor:
    return COMPILER.editor(Constraint(ConstraintKind.JSON_SCHEMA, json.dumps(schema)), StopParams())


def drawn(editor: ConstraintEditor, seed: int) -> str:
    """Draw tokens that the mask allows, after some of them the shortest way to the end."""
    rng = random.Random(seed)
    output: list[int] = []
    some = rng.choice((0, 5, 30))
    while len(output) < MAX_TOKENS:
        logits = torch.zeros(1, VOCAB)
        editor.edit(logits, ())
        assert editor.error is None, f"stuck: {TOKENIZER.decode(output)}"
        if editor.end is not None:
            return TOKENIZER.decode(output)
        allowed = (logits[0] == 0).nonzero().flatten().tolist()
        token = rng.choice(allowed)
        if len(output) >= some:
            shortest = [QUOTE] if IN_STRINGS in allowed else SHORT
            token = next((token for token in shortest if token in allowed), token)
        if token == EOS:
            return TOKENIZER.decode(output)
        output.append(token)
        editor.commit((token,))
    raise AssertionError(f"endless: {TOKENIZER.decode(output)}")


@settings(
    max_examples=120, deadline=None, derandomize=True, suppress_health_check=list(HealthCheck)
)
@given(schema=json_schemas(), seed=st.integers(0, 2**16))
def test_json_schema_that_compiles_is_satisfied_to_its_end(schema: Any, seed: int) -> None:
    try:
        editor = editor_of(schema)
    except InvalidRequestError:
        return
    text = drawn(editor, seed)
    assert conforms(json.loads(text), schema, schema), text


SCORE = {"properties": {"score": {"type": "integer"}}, "required": ["score"], "type": "object"}
OBJECT = {"type": "object"}
EVERY_NAME = {"patternProperties": {"": {"type": ["integer", "null"]}}, "minProperties": 1}
CLOSED = {"additionalProperties": False}
ONLY_SCORE = {"patternProperties": {"^score$": {"minimum": 3, "maximum": 5}}}


@pytest.mark.parametrize(
    "schema",
    [
        {**SCORE, **ONLY_SCORE, **CLOSED},
        {"required": ["score"], **ONLY_SCORE, **CLOSED, "type": "object"},
        {"allOf": [{**SCORE, **CLOSED}, ONLY_SCORE]},
        {**SCORE, "patternProperties": {"^(score|rank)$": {"type": "integer"}, "^x": True}},
        {**SCORE, "patternProperties": {r"^[^\s\S]$": {"type": "null"}}, **CLOSED},
        {**SCORE, "patternProperties": {".*": {"minimum": 3}, "^x": {"const": 4}}},
        {"allOf": [{"additionalProperties": {"type": "null"}}, {**OBJECT, **EVERY_NAME}]},
        {"type": "string", "pattern": '^[^"]{1,4}$'},
        {"type": "object", "patternProperties": {'^[^"]{1,2}$': {"type": "null"}}, **CLOSED},
        {"type": ["object", "null"], "properties": {"next": {"$ref": "#"}}, "required": ["next"]},
        {"const": {"properties": {"pattern": '[^"]'}, "$ref": ["\n"]}},
    ],
)
def test_json_schema_with_a_known_trap_is_satisfied_by_every_seed(schema: Any) -> None:
    for seed in range(12):
        text = drawn(editor_of(schema), seed)
        assert conforms(json.loads(text), schema, schema), text


def test_json_schema_with_an_escaped_key_in_output_forbids_it() -> None:
    editor = editor_of({"type": "object", "properties": {"a": {"type": "boolean"}}})
    assert editor.num_allowed(tuple(TOKENIZER.encode('{"b":1}').ids)) > 4
    assert editor.num_allowed(tuple(TOKENIZER.encode(r'{"\u0061":1}').ids)) < 4


NEEDS_ITSELF = {"type": "array", "items": {"$ref": "#/$defs/x"}, "minItems": 1}


@pytest.mark.parametrize(
    ("schema", "message"),
    [
        ({**OBJECT, "properties": {"a": {"$ref": "#"}}, "required": ["a"]}, "needs another"),
        ({"anyOf": [{"type": "null"}, {"$ref": "#/$defs/x"}], "$defs": {"x": NEEDS_ITSELF}}, "/x"),
        ({**OBJECT, "additionalProperties": {"$ref": "#"}, "minProperties": 1}, "of # "),
        ({**OBJECT, "additionalProperties": {"type": "null"}, "minProperties": 2}, "minProp"),
        ({**OBJECT, "patternProperties": {"": False}, "minProperties": 1}, "nsatisfiable"),
        ({"patternProperties": {"^a": 0, "^[^a]": 0, "^$": 0}, "minProperties": 1}, "none matches"),
        ({**OBJECT, "patternProperties": {f"^{i}": True for i in range(65)}}, "too many"),
        (
            {**OBJECT, "properties": {"a": {"enum": ["b"], "type": "null"}}, "required": ["a"]},
            "'a'",
        ),
        ({"enum": ["a\x01"]}, "control characters"),
        ({"type": "string", "pattern": r"^\x7f$"}, "control characters"),
        ({"type": "string", "pattern": "^a", "format": "date"}, "nsatisfiable"),
        ({"oneOf": [{"minimum": 1}, {"maximum": 2}]}, "oneOf"),
    ],
)
def test_json_schema_whose_texts_may_not_end_is_refused_by_name(schema: Any, message: str) -> None:
    with pytest.raises(InvalidRequestError, match=message) as caught:
        editor_of(schema)
    assert caught.value.param == "json_schema"


def test_json_schema_with_a_long_chain_of_references_compiles() -> None:
    """On a usual stack, llguidance's recursion would end the process."""
    chain = {str(i): {"properties": {"a": {"$ref": f"#/$defs/{i + 1}"}}} for i in range(1200)}
    editor_of({"$ref": "#/$defs/0", "$defs": {**chain, "1200": True}})
