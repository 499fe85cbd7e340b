"""LiteLLM, which puts many APIs in front of ours."""

from __future__ import annotations

import os
from typing import Any

os.environ["LITELLM_LOCAL_MODEL_COST_MAP"] = "True"

import litellm
from cases import API, case, main, raises
from pydantic import BaseModel, ConfigDict

USER: Any = [{"role": "user", "content": "Write a function."}]
HERE: Any = {"model": "openai/default", "api_base": API, "api_key": "none", "num_retries": 0}
HERE |= {"temperature": 0}


class Room(BaseModel):
    model_config = ConfigDict(extra="forbid")  # a weak model would go on

    number: bool


@case
def completion() -> None:
    asked = {**HERE, "messages": USER, "max_tokens": 16}
    text = litellm.completion(**asked).choices[0].message.content
    pieces = litellm.completion(**asked, stream=True)
    assert "".join(piece.choices[0].delta.content or "" for piece in pieces) == text
    hosted = asked | {"model": "hosted_vllm/default"}
    assert litellm.completion(**hosted).choices[0].message.content == text


@case
def text_completion() -> None:
    asked = HERE | {"model": "text-completion-openai/default"}
    assert litellm.text_completion(**asked, prompt="def f(", max_tokens=8).choices[0].text


@case
def tools() -> None:
    tool = {"type": "function", "function": {"name": "f", "parameters": Room.model_json_schema()}}
    answer = litellm.completion(
        **HERE, messages=USER, tools=[tool], tool_choice="required", parallel_tool_calls=False
    )
    (call,) = answer.choices[0].message.tool_calls
    Room.model_validate_json(call.function.arguments)


@case
def response_format() -> None:
    answer = litellm.completion(**HERE, messages=USER, response_format=Room)
    Room.model_validate_json(answer.choices[0].message.content)


@case
def errors() -> None:
    long = [{"role": "user", "content": "word " * 9000}]
    raises(
        *(litellm.ContextWindowExceededError, "maximum context length"),
        lambda: litellm.completion(**HERE, messages=long),
    )
    other = HERE | {"model": "openai/gpt-99"}
    raises(litellm.NotFoundError, "gpt-99", lambda: litellm.completion(**other, messages=USER))
    raises(
        litellm.BadRequestError,
        "not_served",
        lambda: litellm.embedding(**HERE, drop_params=True, input=["a"]),
    )


@case
def responses() -> None:
    answer = litellm.responses(**HERE, input="Write a function.", max_output_tokens=16)
    assert any(item.type == "message" for item in answer.output)


@case
async def messages() -> None:
    asked = HERE | {"model": "hosted_vllm/default"}
    answer: Any = await litellm.anthropic.messages.acreate(**asked, messages=USER, max_tokens=16)
    assert answer["content"][0]["text"]


main()
