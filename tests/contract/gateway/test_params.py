"""Parameters that are wrong: OpenAI's error, naming the parameter, before any work is done."""

from __future__ import annotations

import json
from collections.abc import AsyncIterator
from typing import Any

import httpx
import pytest

from outrider.errors import InvalidRequestError
from tests.support.services.fake_scorer import Script
from tests.support.services.gateway import MAX_MODEL_LEN, Running, running_gateway, tokens

Case = tuple[dict[str, Any], str]

COMMON: list[Case] = [
    ({"temperature": 3}, "temperature"),
    ({"temperature": "hot"}, "temperature"),
    ({"top_p": 0}, "top_p"),
    ({"top_k": -2}, "top_k"),
    ({"min_p": 1.5}, "min_p"),
    ({"presence_penalty": 2.5}, "presence_penalty"),
    ({"frequency_penalty": -3}, "frequency_penalty"),
    ({"repetition_penalty": 0}, "repetition_penalty"),
    ({"logit_bias": {"5": 101}}, "logit_bias"),
    ({"logit_bias": {"five": 1}}, "logit_bias"),
    ({"logit_bias": {"100000": 1}}, "logit_bias"),
    ({"logit_bias": {"5": 1, "05": 2}}, "logit_bias"),
    ({"logit_bias": {"5": "x"}}, "logit_bias.5"),
    ({"logit_bias": {str(n): 1 for n in range(1025)}}, "logit_bias"),
    ({"seed": 2**70}, "seed"),
    ({"max_tokens": 0}, "max_tokens"),
    ({"max_tokens": True}, "max_tokens"),
    ({"min_tokens": 9, "max_tokens": 3}, "min_tokens"),
    ({"min_tokens": -1}, "min_tokens"),
    ({"stop": ["a"] * 17}, "stop"),
    ({"stop": ""}, "stop"),
    ({"stop": ["a", "b" * 1025]}, "stop"),
    ({"stop": [1]}, "stop"),
    ({"stop_token_ids": [-1]}, "stop_token_ids.0"),
    ({"stop_token_ids": list(range(1025))}, "stop_token_ids"),
    ({"ignore_eos": "yes"}, "ignore_eos"),
    ({"n": 0}, "n"),
    ({"n": 129}, "n"),
    ({"stream_options": {"include_usage": True}}, "stream_options"),
    ({"functions": [{"name": "f"}]}, "functions"),
    ({"no_such_parameter": 1}, "no_such_parameter"),
    # Output formats
    ({"response_format": {"type": "xml"}}, "response_format.type"),
    ({"response_format": {"type": "json_schema"}}, "response_format.json_schema"),
    (
        {"response_format": {"type": "json_schema", "json_schema": {"name": "a"}}},
        "response_format.json_schema.schema",
    ),
    (
        {"response_format": {"type": "json_schema", "json_schema": {"name": "a b", "schema": {}}}},
        "response_format.json_schema.name",
    ),
    ({"structured_outputs": {}}, "structured_outputs"),
    ({"structured_outputs": {"regex": "a", "grammar": "b"}}, "structured_outputs"),
    ({"structured_outputs": {"regex": ""}}, "structured_outputs.regex"),
    ({"structured_outputs": {"regex": "a" * 300_000}}, "structured_outputs.regex"),
    ({"structured_outputs": {"choice": []}}, "structured_outputs.choice"),
    ({"structured_outputs": {"json": 5}}, "structured_outputs.json"),
    ({"structured_outputs": {"structural_tag": "x"}}, "structured_outputs.structural_tag"),
    (
        {
            "response_format": {"type": "json_object"},
            "structured_outputs": {"regex": "a"},
        },
        "structured_outputs",
    ),
    ({"guided_json": {}}, "guided_json"),
    # Speculation
    ({"speculation": {"method": "magic"}}, "speculation.method"),
    ({"speculation": {"methods": ["ngram", "magic"]}}, "speculation.methods"),
    ({"speculation": {"methods": ["ngram", "ngram"]}}, "speculation.methods"),
    ({"speculation": {"method": "ngram", "methods": ["ngram"]}}, "speculation.methods"),
    ({"speculation": {"k": 4}}, "speculation.k"),
    ({"speculation": {"num_speculative_tokens": 1000}}, "speculation.num_speculative_tokens"),
    ({"speculation": {"verification": "magic"}}, "speculation.verification.rule"),
    (
        {"speculation": {"verification": {"rule": "typical", "epsilon": 0}}},
        "speculation.verification.epsilon",
    ),
    ({"speculation": {"verification": {"alpha": 2}}}, "speculation.verification.alpha"),
    (
        {"speculation": {"verification": {"max_candidate_len": 0}}},
        "speculation.verification.max_candidate_len",
    ),
    (
        {"speculation": {"verification": {"verify_window": 1000}}},
        "speculation.verification.verify_window",
    ),
    ({"speculation": {"references": ["a"] * 17}}, "speculation.references"),
    ({"speculation": {"references": [[100_000]]}}, "speculation.references"),
    ({"speculation": {"references": [5]}}, "speculation.references"),
    ({"speculation": {"references": ["x" * 1_000_000]}}, "speculation.references"),
    ({"prediction": {"type": "content"}}, "prediction.content"),
    ({"prediction": {"type": "content", "content": 5}}, "prediction.content"),
    ({"prediction": {"type": "text", "content": "a"}}, "prediction.type"),
    (
        {
            "prediction": {"type": "content", "content": "a"},
            "extra_config": {"sp_advice_prompt": "b"},
        },
        "prediction",
    ),
    (
        {"extra_config": {"sp_advice_prompt": "b", "sp_advice_prompt_token_ids": [5]}},
        "extra_config.sp_advice_prompt",
    ),
    (
        {"extra_config": {"sp_advice_prompt_token_ids": [100_000]}},
        "extra_config.sp_advice_prompt_token_ids",
    ),
    ({"extra_config": {"sp_edit": 2}}, "extra_config.sp_edit"),
    ({"extra_config": {"sp_min_token_match": 0}}, "extra_config.sp_min_token_match"),
    (
        {"extra_config": {"sp_min_token_match": 3, "sp_max_token_match": 2}},
        "extra_config.sp_max_token_match",
    ),
    ({"extra_config": {"top_k": 3}}, "extra_config.top_k"),
]
COMPLETION: list[Case] = [
    *COMMON,
    ({"best_of": 0}, "best_of"),
    ({"best_of": 2, "n": 3}, "best_of"),
    ({"best_of": 2, "stream": True}, "best_of"),
    ({"logprobs": 21}, "logprobs"),
    ({"logprobs": -1}, "logprobs"),
    ({"logprobs": True}, "logprobs"),
    ({"echo": True, "logprobs": 1, "stream": True}, "stream"),
    ({"prompt_logprobs": 21}, "prompt_logprobs"),
    ({"max_tokens": 0}, "max_tokens"),
    ({"suffix": "x"}, "suffix"),
    ({"prompt": ""}, "prompt"),
    ({"prompt": []}, "prompt"),
    ({"prompt": [[]]}, "prompt"),
    ({"prompt": ["a", ""]}, "prompt"),
    ({"prompt": 5}, "prompt"),
    ({"prompt": [100_000]}, "prompt"),
    ({"prompt": ["x"] * 1000}, "prompt"),
    ({"prompt": ["x"] * 3, "n": 100}, "prompt"),
]
CHAT: list[Case] = [
    *COMMON,
    ({"messages": []}, "messages"),
    ({"messages": [{"role": "function", "content": "x"}]}, "messages.0.role"),
    ({"messages": [{"role": "tool"}]}, "messages.0.content"),
    ({"tools": [{"type": "function"}]}, "tools.0.function"),
    ({"tools": [{"type": "function", "function": {"name": "f"}}]}, "tools"),
    ({"tools": [{"type": "function", "function": {"name": "a b"}}]}, "tools.0.function.name"),
    ({"tools": [{"type": "function", "function": {"name": "f"}}] * 2}, "tools"),
    ({"tool_choice": "required"}, "tool_choice"),
    ({"tool_choice": {"type": "function", "function": {"name": "f"}}}, "tool_choice"),
    ({"tool_choice": {"type": "allowed_tools"}}, "tool_choice"),
    ({"reasoning_effort": "much"}, "reasoning_effort"),
    ({"chat_template_kwargs": {"messages": []}}, "chat_template_kwargs.messages"),
    ({"thinking_token_budget": 5}, "thinking_token_budget"),
    ({"messages": [{"role": "user", "content": None}]}, "messages.0.content"),
    ({"messages": [{"role": "assistant"}, {"role": "system"}]}, "messages.1.content"),
    ({"messages": [{"role": "user", "content": "x", "name": "x" * 1_000_000}]}, "messages"),
    ({"logprobs": 3}, "logprobs"),
    ({"logprobs": True, "top_logprobs": 21}, "top_logprobs"),
    ({"logprobs": False, "top_logprobs": 1}, "top_logprobs"),
    ({"max_completion_tokens": 0}, "max_completion_tokens"),
    ({"best_of": 2}, "best_of"),
]
TOO_LONG: list[dict[str, Any]] = [
    {"prompt": "x" * 5000},
    {"prompt": "x" * 1_000_000},
    {"max_tokens": MAX_MODEL_LEN},
]
BODIES: dict[str, dict[str, Any]] = {
    "/v1/completions": {"prompt": "x"},
    "/v1/chat/completions": {"messages": [{"role": "user", "content": "x"}]},
}


@pytest.fixture
async def gateway() -> AsyncIterator[Running]:
    async with running_gateway(Script(tokens("hello world"))) as running:
        yield running


async def post(gateway: Running, path: str, change: dict[str, Any]) -> httpx.Response:
    """By the client's connections: new ones for each of some 200 requests take long."""
    url, content = gateway.http + path, json.dumps(BODIES[path] | change).encode()
    return await gateway.client._client.post(url, content=content)


@pytest.mark.parametrize(
    ("path", "cases"), [("/v1/completions", COMPLETION), ("/v1/chat/completions", CHAT)]
)
async def test_request_with_bad_parameter_names_it(
    gateway: Running, path: str, cases: list[Case], subtests: pytest.Subtests
) -> None:
    for change, param in cases:
        with subtests.test(change=str(change)[:80]):
            response = await post(gateway, path, change)
            assert response.status_code == 400, response.text
            error = response.json()["error"]
            assert set(error) == {"message", "type", "param", "code"}
            assert error["type"] == "invalid_request_error"
            assert error["param"] == param, error
            assert error["message"]
    assert not gateway.scorer.requests


@pytest.mark.parametrize("change", TOO_LONG)
async def test_request_over_context_has_openai_code(
    gateway: Running, change: dict[str, Any]
) -> None:
    response = await post(gateway, "/v1/completions", change)
    assert response.status_code == 400
    error = response.json()["error"]
    assert (error["param"], error["code"]) == ("prompt", "context_length_exceeded")
    assert not gateway.scorer.requests


LONG = "x" * 20_000
_ASKED = {"messages": [{"role": "user", "content": "x"}], "max_tokens": 1}


@pytest.mark.parametrize(
    ("path", "body", "says"),
    [
        ("/v1/completions", {"prompt": "x", "model": LONG}, "is not served here; 'default' is."),
        ("/v1/messages", {**_ASKED, "model": LONG}, "is not served here; 'default' is."),
        ("/v1/chat/completions", {**_ASKED, LONG: 1}, "Unrecognized request argument"),
        ("/v1/messages", {**_ASKED, LONG: 1}, "Unrecognized request argument"),
        ("/v1/responses", {"input": "x", LONG: 1}, "Unrecognized request argument"),
        (f"/{LONG}", {}, "There is no /xxx"),
    ],
)
async def test_error_that_quotes_a_long_word_is_short(
    gateway: Running, path: str, body: dict[str, Any], says: str
) -> None:
    async with httpx.AsyncClient(base_url=gateway.http) as client:
        response = await client.post(path, json=body)
    assert response.status_code in (400, 404)
    assert says in response.text
    assert len(response.content) < 2500


@pytest.mark.parametrize(
    "part", [{"type": "image_url", "image_url": {"url": "x"}}, {"type": "text"}, "x"]
)
async def test_chat_with_other_than_text_parts_is_refused(gateway: Running, part: Any) -> None:
    change = {"messages": [{"role": "user", "content": [part]}]}
    response = await post(gateway, "/v1/chat/completions", change)
    assert response.status_code == 400
    error = response.json()["error"]
    assert error["param"] == "messages.0.content"
    assert "must be a string or a list of text parts; images" in error["message"]


@pytest.mark.parametrize("path", BODIES)
async def test_request_with_neutral_values_is_accepted(gateway: Running, path: str) -> None:
    nothing = (
        *("n", "stop", "logprobs", "seed", "tools", "response_format", "prediction", "logit_bias"),
        *("structured_outputs", "extra_config", "speculation", "top_k", "stop_token_ids"),
    )
    change = {
        **dict.fromkeys(nothing),
        **{"presence_penalty": 0.0, "metadata": {"a": "b"}, "user": "u", "tool_choice": "auto"},
        **{"extra_config": {}, "speculation": {"references": None, "verification": None}},
    }
    response = await post(gateway, path, change)
    assert response.status_code == 200, response.text
    assert not gateway.scorer.requests[-1].HasField("constraint")


@pytest.mark.parametrize("stream", [False, True])
@pytest.mark.parametrize(
    ("change", "kind", "param"),
    [
        ({"response_format": {"type": "json_object"}}, "json_object", "response_format"),
        (
            {"structured_outputs": {"json_object": True}},
            "json_object",
            "structured_outputs.json_object",
        ),
        ({"structured_outputs": {"regex": "("}}, "regex", "structured_outputs.regex"),
        ({"structured_outputs": {"choice": ["a"]}}, "regex", "structured_outputs.choice"),
    ],
)
async def test_request_refused_by_scorer_has_the_clients_name(
    gateway: Running, stream: bool, change: dict[str, Any], kind: str, param: str
) -> None:
    gateway.scorer.script.refuse = InvalidRequestError(f"{kind} is too slow", param=kind)
    response = await post(gateway, "/v1/completions", {"stream": stream, **change})
    assert response.status_code == 400, response.text
    error = response.json()["error"]
    assert (error["param"], error["message"]) == (param, f"{param} is too slow")
