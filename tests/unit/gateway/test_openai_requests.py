"""Request bodies: whatever a client sends is taken, or refused by name."""

from __future__ import annotations

import json
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from pydantic import ValidationError

from gateway.openai.parse import parse
from gateway.openai.requests import ChatRequest, CompletionRequest, Request
from outrider.errors import InvalidRequestError

NUMBERS = st.one_of(
    st.integers(-3, 130), st.sampled_from([2**31, 2**32, 2**63, 2**64, 10**30, -(2**63)])
)
LEAVES = st.one_of(
    st.none(),
    st.booleans(),
    NUMBERS,
    st.floats(allow_nan=False, allow_infinity=False),
    st.sampled_from(["", "a", "5", "ngram", "typical", "json_schema", "content", "["]),
    st.text(max_size=5),
)
KEYS = st.sampled_from(
    [
        *("type", "json_schema", "name", "schema", "strict", "json", "regex", "choice", "grammar"),
        *("content", "text", "rule", "epsilon", "alpha", "max_candidate_len", "verification"),
        *("method", "methods", "references", "enabled", "num_speculative_tokens", "5", "007"),
        *("sp_edit", "sp_advice_prompt", "sp_min_token_match", "sp_max_token_match"),
    ]
)
VALUES = st.recursive(
    LEAVES,
    lambda inner: st.one_of(st.lists(inner, max_size=3), st.dictionaries(KEYS, inner, max_size=3)),
    max_leaves=8,
)


def names(kind: type[Request]) -> list[str]:
    return sorted(kind.model_fields)


def use(body: Request) -> None:
    """All that the gateway asks of a body."""
    body.num_choices()
    body.wanted_logprobs()
    body.sampling(7)
    body.limits()
    body.speculation_params()
    body.constraint()
    if isinstance(body, CompletionRequest):
        body.prompts()


@pytest.mark.parametrize(
    ("kind", "base"),
    [
        (CompletionRequest, {"prompt": "x"}),
        (ChatRequest, {"messages": [{"role": "user", "content": "x"}]}),
    ],
)
@given(data=st.data())
@settings(max_examples=150)
def test_openai_body_with_any_value_is_accepted_or_refused_by_name(
    kind: type[Request], base: dict[str, Any], data: st.DataObject
) -> None:
    changes = data.draw(st.dictionaries(st.sampled_from(names(kind)), VALUES, max_size=3))
    refused: InvalidRequestError | None = None
    try:
        use(parse(kind, json.dumps(base | changes).encode()))
    except InvalidRequestError as error:
        refused = error
    assert refused is None or (refused.param and refused.message)


@given(st.binary(max_size=40))
def test_openai_body_of_any_bytes_is_refused(body: bytes) -> None:
    with pytest.raises(InvalidRequestError):
        parse(ChatRequest, body)


def test_chat_template_of_named_messages_gets_names() -> None:
    messages = [
        {"role": "developer", "content": "x"},
        {"role": "user", "content": [{"type": "text", "text": "y"}], "name": "alice"},
    ]
    body = parse(ChatRequest, json.dumps({"messages": messages}).encode())
    assert [message.for_template() for message in body.messages] == [
        {"role": "system", "content": "x"},
        {"role": "user", "content": "y", "name": "alice"},
    ]


MANY = 200_000
NULLS = [None] * MANY
UNKNOWN = {f"unknown_{n}": 1 for n in range(MANY)}
CHAT = {"messages": [{"role": "user", "content": "x"}]}


@pytest.mark.parametrize(
    ("kind", "body", "param"),
    [
        (CompletionRequest, {"prompt": NULLS}, "prompt"),
        (CompletionRequest, {"prompt": [NULLS]}, "prompt"),
        (ChatRequest, {"messages": [{}] * MANY}, "messages.0.role"),
        (ChatRequest, {"messages": [CHAT["messages"][0] | UNKNOWN]}, "messages.0.unknown_0"),
        (
            ChatRequest,
            {"messages": [{"role": "user", "content": [{}] * MANY}]},
            "messages.0.content",
        ),
        (ChatRequest, CHAT | {"stop": NULLS}, "stop"),
        (ChatRequest, CHAT | {"stop_token_ids": NULLS}, "stop_token_ids.0"),
        (
            ChatRequest,
            CHAT | {"prediction": {"type": "content", "content": [{}] * MANY}},
            "prediction.content",
        ),
        (
            ChatRequest,
            CHAT | {"structured_outputs": {"choice": NULLS}},
            "structured_outputs.choice.0",
        ),
        (ChatRequest, CHAT | {"speculation": {"methods": NULLS}}, "speculation.methods.0"),
        (ChatRequest, CHAT | {"speculation": {"references": NULLS}}, "speculation.references"),
        (ChatRequest, CHAT | {"speculation": {"references": [NULLS]}}, "speculation.references"),
        (
            ChatRequest,
            CHAT | {"speculation": {"verification": UNKNOWN}},
            "speculation.verification.unknown_0",
        ),
        (
            ChatRequest,
            CHAT | {"extra_config": {"sp_advice_prompt_token_ids": NULLS}},
            "extra_config.sp_advice_prompt_token_ids.0",
        ),
        (ChatRequest, CHAT | {"extra_config": UNKNOWN}, "extra_config.unknown_0"),
        (ChatRequest, CHAT | {"logit_bias": {str(n): None for n in range(MANY)}}, "logit_bias"),
    ],
)
def test_openai_body_with_many_faults_is_refused_for_the_first(
    kind: type[Request], body: dict[str, Any], param: str
) -> None:
    """Every error is an object, a hundred times the size of what it is about."""
    with pytest.raises(InvalidRequestError) as refused:
        parse(kind, json.dumps(body).encode())
    assert refused.value.param == param
    found = refused.value.__cause__
    assert found is None or (isinstance(found, ValidationError) and found.error_count() < 10)
