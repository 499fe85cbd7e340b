"""Pydantic AI."""

from __future__ import annotations

from typing import Any, Literal

from cases import API, case, main
from pydantic import BaseModel, ConfigDict
from pydantic_ai import Agent, NativeOutput
from pydantic_ai.models.openai import OpenAIChatModel, OpenAIResponsesModel
from pydantic_ai.providers.openai import OpenAIProvider

PROVIDER = OpenAIProvider(base_url=API, api_key="none")


class Booking(BaseModel):
    model_config = ConfigDict(extra="forbid")  # a weak model would go on

    room: Literal["red", "blue"]


def agent(**more: Any) -> Agent[Any, Any]:
    settings: Any = {"temperature": 0, "max_tokens": 200}
    return Agent(OpenAIChatModel("default", provider=PROVIDER), model_settings=settings, **more)


@case
async def text() -> None:
    whole = await agent().run("Write a function.")
    async with agent().run_stream("Write a function.") as stream:
        assert await stream.get_output() == whole.output
    again = await agent().run("And another.", message_history=whole.all_messages())
    assert again.output


@case
async def tool_output() -> None:
    assert isinstance((await agent(output_type=Booking).run("Book.")).output, Booking)


@case
async def native_output() -> None:
    native = agent(output_type=NativeOutput(Booking))
    assert isinstance((await native.run("Book.")).output, Booking)


@case
async def responses() -> None:
    asked: Any = Agent(OpenAIResponsesModel("default", provider=PROVIDER))
    assert (await asked.run("Write.", model_settings={"max_tokens": 16})).output


main()
