"""Reasoning apart from answers through the whole stack, with a model that thinks at random."""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import openai
import pytest

from gateway.openai.parse import parse
from gateway.openai.requests import ChatRequest
from outrider import LLM
from outrider.models.tokenizer import Tokenizer
from tests.support.checkpoints.tiny_pair import save_pair
from tests.support.services.up import EVERY_ROUND, running

pytestmark = pytest.mark.timeout(400)

TEMPLATE = (
    "{{ bos_token }}{% for message in messages %}<|{{ message['role'] }}|>"
    "{{ message['content'].split('</think>')[-1] }}\n{% endfor %}<|assistant|><think>\n"
)
CLOSE = "</think>"


@pytest.fixture(scope="module")
def target(tmp_path_factory: pytest.TempPathFactory) -> Path:
    target, draft = save_pair(
        tmp_path_factory.mktemp("thinking"), eps=0.15, special=("<think>", CLOSE)
    )
    for folder in (target, draft):
        (folder / "chat_template.jinja").write_text(TEMPLATE)
    return target


@pytest.fixture(scope="module")
def client(target: Path) -> Iterator[openai.OpenAI]:
    draft = target.parent / "draft"
    with (
        running("--model", target, "--draft-model", draft, *EVERY_ROUND) as up,
        openai.OpenAI(
            base_url=f"{up.http}/v1", api_key="none", max_retries=0, timeout=120
        ) as client,
    ):
        yield client


@pytest.fixture(scope="module")
def llm(target: Path) -> Iterator[LLM]:
    with LLM(str(target), device="cpu", kv_cache_memory=16) as llm:
        yield llm


def answer_of(client: openai.OpenAI, request: dict[str, Any], *, stream: bool) -> Any:
    """The answer as a client sees it: reasoning, content, finish reason, usage."""
    if not stream:
        whole: Any = client.chat.completions.create(**request)
        (choice,) = whole.choices
        assert choice.message.reasoning == choice.message.reasoning_content
        usage = whole.usage.completion_tokens
        return choice.message.reasoning, choice.message.content, choice.finish_reason, usage
    reasoning = content = ""
    reason = usage = None
    options = {"include_usage": True}
    for chunk in client.chat.completions.create(**request, stream=True, stream_options=options):
        usage = chunk.usage.completion_tokens if chunk.usage else usage
        for choice in chunk.choices:
            thought = getattr(choice.delta, "reasoning_content", None) or ""
            assert not (thought and content), "reasoning comes before the answer"
            reasoning += thought
            content += choice.delta.content or ""
            reason = choice.finish_reason or reason
    return reasoning, content, reason, usage


def offline_answer_of(llm: LLM, request: dict[str, Any]) -> Any:
    """The same of a line of a batch."""
    body = {**request, **request["extra_body"]}
    del body["extra_body"]
    whole = llm._model.engine.answer(parse(ChatRequest, body)).result(60)
    [choice] = whole["choices"]
    message, usage = choice["message"], whole["usage"]["completion_tokens"]
    return message["reasoning"], message["content"], choice["finish_reason"], usage


@pytest.mark.parametrize(
    "asked",
    [
        {"temperature": 0.9},
        {"temperature": 0.9, "response_format": {"type": "json_object"}},
        {"temperature": 0, "thinking_token_budget": 12},
        {"temperature": 0.9, "thinking_token_budget": 3},
    ],
    ids=["ends by itself", "a format behind it", "greedy with a budget", "sampled with a budget"],
)
def test_reasoning_is_the_same_whole_streamed_offline_and_with_any_draft(
    client: openai.OpenAI, llm: LLM, target: Path, asked: dict[str, Any]
) -> None:
    (close,) = Tokenizer.load(target).special_ids([CLOSE])
    answers = []
    for k in (0, 5):
        request = {
            **{"model": "default", "messages": [{"role": "user", "content": "hello"}]},
            **{"seed": 4, "max_tokens": 80, "temperature": asked["temperature"]},
            "extra_body": {
                "speculation": {"num_speculative_tokens": k},
                **{name: value for name, value in asked.items() if name != "temperature"},
            },
        }
        if "thinking_token_budget" not in asked:
            request["logit_bias"] = {str(close): 2}
        answers += [answer_of(client, request, stream=stream) for stream in (False, True)]
        answers.append(offline_answer_of(llm, request))
    assert answers == answers[:1] * 6
    reasoning, content, reason, usage = answers[0]
    assert reasoning
    assert content
    assert CLOSE not in reasoning + content
    if "response_format" in asked:
        assert isinstance(json.loads(content), dict) if reason == "stop" else content[0] == "{"
    else:
        assert (reason, usage) in (("length", 80), ("stop", usage))
