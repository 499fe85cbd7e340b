"""Every parameter of the API through the official client and the whole stack.

The model is random, so what it says has no meaning; what a parameter does to it has.
"""

from __future__ import annotations

import asyncio
import json
import math
import re
from collections.abc import Iterator
from typing import Any, Literal

import openai
import pytest
from pydantic import BaseModel

from tests.support.services.options import GenerateOptions
from tests.support.services.up import Up, service, until_attached
from tests.support.services.up import complete as complete_over_grpc

pytestmark = pytest.mark.timeout(400)

PROMPT = "hello world STOP "
MESSAGES: Any = [{"role": "user", "content": "hello"}]


@pytest.fixture
def client(draft_model_stack: Up) -> Iterator[openai.OpenAI]:
    with openai.OpenAI(
        base_url=f"{draft_model_stack.http}/v1", api_key="none", max_retries=0, timeout=120
    ) as client:
        yield client


def complete(
    client: openai.OpenAI, *, body: dict[str, Any] | None = None, **parameters: Any
) -> Any:
    defaults = {"model": "default", "prompt": PROMPT, "max_tokens": 24, "seed": 3}
    extra = {"ignore_eos": True, "aux_info": True, **(body or {})}
    return client.completions.create(**{**defaults, **parameters}, extra_body=extra)


def text(client: openai.OpenAI, *, body: dict[str, Any] | None = None, **parameters: Any) -> str:
    return str(complete(client, body=body, **parameters).choices[0].text)


# Sampling


SAMPLING: list[dict[str, Any]] = [
    {"temperature": 0},
    {"temperature": 0.7, "top_p": 0.9, "body": {"top_k": 40, "min_p": 0.01}},
    {"temperature": 0, "presence_penalty": 2, "frequency_penalty": 1},
    {"temperature": 0.8, "frequency_penalty": -2},
    {"temperature": 0.8, "body": {"repetition_penalty": 1.8}},
    {"temperature": 0.8, "logit_bias": {"260": 6, "261": -100, "40": 3.5}},
    {"temperature": 0.5, "body": {"min_tokens": 20, "ignore_eos": False}},
    {"temperature": 0.8, "body": {"stop_token_ids": [260, 261, 262, 263]}},
]


def test_request_with_speculation_equals_request_without(
    client: openai.OpenAI, subtests: pytest.Subtests
) -> None:
    num_drafted = 0
    for parameters in SAMPLING:
        body = parameters.get("body", {})
        rest = {name: value for name, value in parameters.items() if name != "body"}
        with subtests.test(str(parameters)):
            drafted = complete(client, body=body, **rest)
            alone = complete(client, body={**body, "speculation": {"enabled": False}}, **rest)
            assert drafted.choices[0].text == alone.choices[0].text
            assert drafted.choices[0].finish_reason == alone.choices[0].finish_reason
            assert drafted.usage.completion_tokens == alone.usage.completion_tokens
            aux = drafted.aux_info
            num_drafted += aux["drafted"]
            assert alone.aux_info["drafted"] == 0
            assert (aux["verification"], aux["exact"]) == ("coupled", True)
            assert sum(counts["drafted"] for counts in aux["by_method"]) == aux["drafted"]
    assert num_drafted > 0


def test_penalties_and_biases_when_set_change_text(client: openai.OpenAI) -> None:
    plain = text(client, temperature=0)
    assert text(client, temperature=0, body={"repetition_penalty": 10}) != plain
    biased = complete(client, temperature=0, logit_bias={"42": 100}, logprobs=0)
    assert len(set(biased.choices[0].logprobs.tokens)) == 1
    banned = biased.choices[0].logprobs.tokens[0]
    spread = complete(
        client, temperature=0, logit_bias={"42": 100}, logprobs=0, presence_penalty=2, max_tokens=9
    )
    assert spread.choices[0].logprobs.tokens[0] == banned


# Choices


def test_choice_when_asked_alone_is_the_same(client: openai.OpenAI) -> None:
    both = complete(client, temperature=0.9, n=2)
    second = (3 + 0x9E3779B97F4A7C15) % 2**64
    assert both.choices[0].text == text(client, temperature=0.9)
    assert both.choices[1].text == text(client, temperature=0.9, seed=second - 2**64)
    assert both.choices[0].text != both.choices[1].text
    assert both.usage.completion_tokens == 48
    assert both.usage.prompt_tokens == complete(client).usage.prompt_tokens


def test_choices_of_one_prompt_share_its_pages(client: openai.OpenAI) -> None:
    answer = complete(client, prompt=PROMPT * 20, n=3, max_tokens=4)
    cached = [aux["cached_prompt_tokens"] for aux in answer.aux_info]
    assert min(cached[1:]) > answer.usage.prompt_tokens // 2
    assert answer.usage.prompt_tokens_details.cached_tokens == cached[0] == 0


def test_best_of_above_n_returns_likeliest(client: openai.OpenAI) -> None:
    every = complete(client, temperature=1.2, n=3, logprobs=0)
    best = complete(client, temperature=1.2, n=1, best_of=3)
    means = {c.text: sum(c.logprobs.token_logprobs) / 24 for c in every.choices}
    assert best.choices[0].text == max(means, key=lambda text: means[text])
    assert best.usage.completion_tokens == 3 * 24


def test_completion_with_echo_returns_prompt_first(client: openai.OpenAI) -> None:
    assert text(client, temperature=0, echo=True) == PROMPT + text(client, temperature=0)


# Logprobs


def test_logprobs_with_and_without_speculation_are_the_models(client: openai.OpenAI) -> None:
    shaped: list[Any] = []
    for body in ({}, {"speculation": {"enabled": False}}):
        stream = client.chat.completions.create(
            **{"model": "default", "messages": MESSAGES, "max_tokens": 24, "temperature": 0},
            **{"logprobs": True, "top_logprobs": 3, "stream": True, "frequency_penalty": 0.5},
            stream_options={"include_usage": True},
            extra_body={"ignore_eos": True, **body},
        )
        entries: list[Any] = []
        usage = None
        for chunk in stream:
            usage = chunk.usage or usage
            for choice in chunk.choices:
                entries += choice.logprobs.content if choice.logprobs else []
        assert usage is not None
        assert len(entries) == usage.completion_tokens == 24
        shaped.append(entries)
    drafted, alone = shaped
    assert [entry.token for entry in drafted] == [entry.token for entry in alone]
    for one, other in zip(drafted, alone, strict=True):
        assert one.logprob == pytest.approx(other.logprob, abs=1e-3)
        assert len(one.top_logprobs) == 3
        tops = [top.logprob for top in one.top_logprobs]
        assert tops == sorted(tops, reverse=True)
        assert one.logprob <= tops[0] + 1e-6
        assert sum(map(math.exp, tops)) <= 1 + 1e-6


def test_logprobs_with_stop_string_end_with_text(client: openai.OpenAI) -> None:
    whole = complete(client, temperature=0, logprobs=1)
    shown = whole.choices[0].text
    stop = shown[len(shown) // 2 :][:3]
    cut = complete(client, temperature=0, logprobs=1, stop=stop)
    assert cut.choices[0].text == shown[: shown.index(stop)]
    assert cut.choices[0].finish_reason == "stop"
    assert len(cut.choices[0].logprobs.tokens) == cut.usage.completion_tokens
    count = cut.usage.completion_tokens
    assert cut.choices[0].logprobs.tokens == whole.choices[0].logprobs.tokens[:count]


# Output formats


class Verdict(BaseModel):
    sure: bool
    kind: Literal["a", "b"]


@pytest.mark.parametrize("temperature", [0, 1])
def test_output_format_when_given_is_kept(client: openai.OpenAI, temperature: float) -> None:
    schema = {
        "type": "object",
        "properties": {"sure": {"type": "boolean"}, "kind": {"enum": ["a", "b"]}},
        "required": ["sure", "kind"],
        "additionalProperties": False,
    }
    common: dict[str, Any] = {"temperature": temperature, "max_tokens": 200}
    body: dict[str, Any] = {"structured_outputs": {"json": schema}, "ignore_eos": False}
    answer = complete(client, body=body, **common)
    assert answer.choices[0].finish_reason == "stop"
    assert set(json.loads(answer.choices[0].text)) == {"sure", "kind"}
    parsed = client.chat.completions.parse(
        **{"model": "default", "messages": MESSAGES, "seed": 3, **common}, response_format=Verdict
    )
    assert isinstance(parsed.choices[0].message.parsed, Verdict)
    for change, pattern in (
        ({"choice": ["yes.", "no"]}, r"yes\.|no"),
        ({"regex": "[0-9]{4}-[ab]{1,3}x"}, "[0-9]{4}-[ab]{1,3}x"),
        ({"grammar": 'start: "a" | "b" "c"'}, "a|bc"),
    ):
        body = {"structured_outputs": change, "ignore_eos": False}
        answer = complete(client, body=body, **common)
        assert answer.choices[0].finish_reason == "stop"
        assert re.fullmatch(pattern, answer.choices[0].text)
    answer = client.chat.completions.create(
        **{"model": "default", "messages": MESSAGES, "max_tokens": 10, "seed": 3},
        response_format={"type": "json_object"},
    )
    assert (answer.choices[0].message.content or "").lstrip().startswith("{")


@pytest.mark.parametrize(
    ("body", "param"),
    [
        (
            {
                "response_format": {
                    "type": "json_schema",
                    "json_schema": {"name": "a", "schema": {"type": "nonsense"}},
                }
            },
            "response_format",
        ),
        ({"structured_outputs": {"regex": "("}}, "structured_outputs.regex"),
        ({"structured_outputs": {"grammar": "start: nothing"}}, "structured_outputs.grammar"),
    ],
)
def test_output_format_that_cannot_be_compiled_is_refused(
    client: openai.OpenAI, body: Any, param: str
) -> None:
    with pytest.raises(openai.BadRequestError) as caught:
        complete(client, body=body)
    assert caught.value.param == param


# Speculation


@pytest.mark.parametrize(
    ("verification", "exact"),
    [
        ("coupled", True),
        ("rejection", True),
        ({"rule": "typical", "epsilon": 0.2, "alpha": 0.5}, False),
        ({"rule": "top_p_window", "max_candidate_len": 3, "verify_window": 1}, False),
    ],
)
def test_verification_rule_when_named_is_used(
    client: openai.OpenAI, verification: Any, exact: bool
) -> None:
    body = {"speculation": {"verification": verification}}
    answer = complete(client, temperature=0.8, body=body)
    rule = verification if isinstance(verification, str) else verification["rule"]
    assert (answer.aux_info["verification"], answer.aux_info["exact"]) == (rule, exact)
    assert answer.usage.completion_tokens == 24
    if exact:
        assert text(client, temperature=0, body=body) == text(client, temperature=0)


def test_methods_when_named_are_tried_in_order(client: openai.OpenAI) -> None:
    body = {"speculation": {"methods": ["deterministic", "suffix", "draft_model"]}}
    assert text(client, temperature=0, body=body) == text(client, temperature=0)


def check_prediction(answer: Any) -> int:
    """How many of its tokens were copied from the prediction, as usage and aux_info agree."""
    details = answer.usage.completion_tokens_details
    drafted = accepted = 0
    for counts in answer.aux_info["by_method"]:
        if counts["method"] == "deterministic":
            drafted, accepted = counts["drafted"], counts["accepted"]
    assert details.accepted_prediction_tokens == accepted
    assert details.rejected_prediction_tokens == drafted - accepted
    return int(accepted)


def predict(client: openai.OpenAI, **prediction: Any) -> Any:
    body: dict[str, Any] = {"ignore_eos": True, "aux_info": True}
    return client.chat.completions.create(
        **{"model": "default", "messages": MESSAGES, "max_tokens": 40, "temperature": 0},
        **prediction,
        extra_body=body,
    )


def test_prediction_without_drafter_is_harmless(client: openai.OpenAI) -> None:
    answer = predict(client, prediction={"type": "content", "content": "hello"})
    assert answer.choices[0].message.content == predict(client).choices[0].message.content
    assert check_prediction(answer) == 0


def test_references_when_given_keep_text(client: openai.OpenAI) -> None:
    shown = text(client, temperature=0)
    body = {"speculation": {"references": [shown, [5, 6]]}}
    assert text(client, temperature=0, body=body) == shown


@pytest.fixture(scope="module")
def copying(draft_model_stack: Up) -> Iterator[None]:
    """A second proposer, which copies from predictions."""
    scorer = draft_model_stack.scorer
    flags = ("--scorer", scorer, "--method", "deterministic", "--proposer-id", "copying")
    with service("proposer_service", *flags):
        asyncio.run(until_attached(scorer, 120, "copying"))
        yield


@pytest.mark.usefixtures("copying")
async def test_prediction_that_comes_true_is_copied(
    client: openai.OpenAI, draft_model_stack: Up
) -> None:
    options = GenerateOptions(prompt=PROMPT, max_tokens=60, temperature=0, ignore_eos=True)
    plain = await complete_over_grpc(draft_model_stack.grpc, options)
    ids = plain.token_ids  # what a random model says does not survive tokenising its text again
    for expected, least in ((ids, 40), (ids[:20] + ids[30:], 15), ((5, 6), 0)):
        extra_config = {"sp_advice_prompt_token_ids": expected, "sp_edit": 1}
        answer = complete(client, max_tokens=60, temperature=0, body={"extra_config": extra_config})
        assert answer.choices[0].text == plain.text
        assert check_prediction(answer) >= least


@pytest.mark.usefixtures("copying")
def test_prediction_when_given_changes_only_usage(client: openai.OpenAI) -> None:
    plain = predict(client)
    assert plain.usage.completion_tokens_details is None
    shown = plain.choices[0].message.content
    answer = predict(client, prediction={"type": "content", "content": shown})
    assert answer.choices[0].message.content == shown
    check_prediction(answer)


# Tools


TOOLS: Any = [
    {
        "type": "function",
        "function": {
            "name": "book",
            "parameters": {
                "type": "object",
                "properties": {
                    "room": {"enum": ["red", "blue"]},
                    "hours": {"type": "integer", "minimum": 1, "maximum": 9},
                    "guests": {"type": "array", "items": {"enum": ["a", "b"]}, "maxItems": 2},
                },
                "required": ["room", "hours"],
                "additionalProperties": False,
            },
        },
    },
    {"type": "function", "function": {"name": "leave"}},
]


@pytest.mark.parametrize("temperature", [0, 0.9])
def test_forced_calls_satisfy_their_schemas_and_are_the_same_with_speculation(
    client: openai.OpenAI, temperature: float
) -> None:
    named = {"type": "function", "function": {"name": "book"}}
    for choice in ("required", named):
        answers: list[Any] = []
        for enabled in (True, False):
            request: Any = {
                **{"model": "default", "messages": MESSAGES, "tools": TOOLS, "seed": 5},
                **{"tool_choice": choice, "temperature": temperature, "max_tokens": 400},
                "parallel_tool_calls": False,
                "extra_body": {"speculation": {"enabled": enabled}, "aux_info": True},
            }
            answers.append(client.chat.completions.create(**request))
            with client.chat.completions.stream(
                **request, stream_options={"include_usage": True}
            ) as stream:
                answers.append(stream.get_final_completion())
        calls = [
            [(call.function.name, call.function.arguments) for call in each.message.tool_calls]
            for answer in answers
            for each in answer.choices
        ]
        assert calls == calls[:1] * 4
        assert len({answer.usage.completion_tokens for answer in answers}) == 1
        assert answers[0].aux_info["drafted"] > answers[2].aux_info["drafted"] == 0
        for answer in answers:
            assert answer.choices[0].finish_reason == "tool_calls"
            assert not answer.choices[0].message.content
        ((name, arguments),) = calls[0]
        assert name in ("book", "leave")
        assert choice == "required" or name == "book"
        booked = json.loads(arguments)
        if name == "book":
            assert booked["room"] in ("red", "blue")
            assert booked["hours"] in range(1, 10)
            assert set(booked.get("guests", ())) <= {"a", "b"}
        else:
            assert booked == {}
