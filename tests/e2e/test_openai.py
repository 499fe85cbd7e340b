"""The official client through the whole stack, and the errors it gets."""

from __future__ import annotations

from collections.abc import Iterator

import httpx
import openai
import pytest

from tests.support.services.options import GenerateOptions
from tests.support.services.up import Up, complete, until_idle

pytestmark = pytest.mark.timeout(400)

PROMPT = "hello world STOP "


@pytest.fixture
def client(draft_model_stack: Up) -> Iterator[openai.OpenAI]:
    with openai.OpenAI(
        base_url=f"{draft_model_stack.http}/v1", api_key="none", max_retries=0, timeout=60
    ) as client:
        yield client


async def test_completion_over_http_equals_that_over_grpc(
    client: openai.OpenAI, draft_model_stack: Up
) -> None:
    answer = client.completions.create(
        model="default",
        prompt=PROMPT,
        max_tokens=30,
        temperature=0.7,
        seed=9,
        extra_body={"aux_info": True, "ignore_eos": True},
    )
    over_grpc = await complete(
        draft_model_stack.grpc,
        GenerateOptions(
            prompt=PROMPT, max_tokens=30, temperature=0.7, seed=9, ignore_eos=True, aux_info=True
        ),
    )
    assert answer.choices[0].text == over_grpc.text
    assert answer.choices[0].finish_reason == "length"
    assert answer.usage is not None
    assert answer.usage.completion_tokens == 30
    aux = answer.model_extra["aux_info"] if answer.model_extra else None
    if isinstance(aux, list):
        aux = aux[0]
    assert aux["output_len"] == 30
    assert aux["iter_count"] > 0
    assert aux["avg_tokens_per_iter"] == pytest.approx(30 / aux["iter_count"])
    assert aux["cost_time"] > 0


def test_stream_of_request_equals_whole_answer(client: openai.OpenAI) -> None:
    messages = [{"role": "user", "content": "hello"}]
    settings = {"model": "default", "max_tokens": 24, "temperature": 0}
    whole = client.chat.completions.create(messages=messages, **settings)
    pieces = client.chat.completions.create(
        messages=messages, stream=True, stream_options={"include_usage": True}, **settings
    )
    text, usage = "", None
    for piece in pieces:
        text += "".join(choice.delta.content or "" for choice in piece.choices)
        usage = piece.usage or usage
    assert text == whole.choices[0].message.content
    assert usage is not None
    assert whole.usage is not None
    assert usage.total_tokens == whole.usage.total_tokens


def test_request_without_speculation_returns_same_text(client: openai.OpenAI) -> None:
    texts = [
        client.completions.create(
            model="default",
            prompt=PROMPT,
            max_tokens=20,
            temperature=0,
            extra_body={"speculation": speculation},
        )
        .choices[0]
        .text
        for speculation in ({"enabled": False}, {"num_speculative_tokens": 7}, {"enabled": True})
    ]
    assert len(set(texts)) == 1


def test_gateway_when_ready_serves_models_health_and_metrics(
    client: openai.OpenAI, draft_model_stack: Up
) -> None:
    assert [model.id for model in client.models.list()] == ["default"]
    assert httpx.get(f"{draft_model_stack.http}/health").status_code == 200
    metrics = httpx.get(f"{draft_model_stack.http}/metrics")
    assert metrics.status_code == 200
    assert "gen_ai_server_request_duration" in metrics.text


def test_request_for_unknown_model_is_404(client: openai.OpenAI) -> None:
    with pytest.raises(openai.NotFoundError, match="gpt-99"):
        client.completions.create(model="gpt-99", prompt="hello")


@pytest.mark.parametrize(
    ("body", "param"),
    [
        ({"prompt": ""}, "prompt"),
        ({"prompt": "hello " * 2000}, "prompt"),
        ({"max_tokens": 0}, "max_tokens"),
        ({"max_tokens": 100_000}, None),
        ({"temperature": -1}, "temperature"),
        ({"temperature": 2.5}, "temperature"),
        ({"top_p": 0}, "top_p"),
        ({"stop": [""]}, "stop"),
        ({"extra_body": {"speculation": {"num_speculative_tokens": 1000}}}, None),
        ({"extra_body": {"speculation": {"method": "magic"}}}, None),
    ],
)
def test_bad_request_names_the_field(
    client: openai.OpenAI, body: dict[str, object], param: str | None
) -> None:
    with pytest.raises(openai.BadRequestError) as caught:
        client.completions.create(**{"model": "default", "prompt": "hello", **body})
    assert caught.value.type == "invalid_request_error"
    if param is not None:
        assert caught.value.param == param


async def test_scorer_after_requests_keeps_nothing(draft_model_stack: Up) -> None:
    info = await until_idle(draft_model_stack.scorer)
    assert info.free_pages == info.total_pages
