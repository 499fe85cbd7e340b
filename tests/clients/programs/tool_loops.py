"""Agents that call two tools, one after the other, and then answer.

Their server's model asks for the weather, then for the forecast, then speaks.
"""

from __future__ import annotations

from typing import Any

import agents
import anthropic
import openai
from cases import API, BASE_URL, case, main
from langchain_core.messages import HumanMessage, ToolMessage
from langchain_core.tools import tool
from langchain_openai import ChatOpenAI
from pydantic_ai import Agent
from pydantic_ai.models.openai import OpenAIChatModel
from pydantic_ai.providers.openai import OpenAIProvider

ANSWER = "Sunny, then rain."
agents.set_tracing_disabled(True)


class Tools:
    """Tools that note their calls, in order."""

    def __init__(self) -> None:
        self.called: list[tuple[str, Any]] = []

    def weather(self, city: str) -> str:
        """Tell the weather of a city."""
        self.called.append(("weather", city))
        return "sunny"

    def forecast(self, city: str, days: int) -> str:
        """Tell the weather of a city in some days."""
        self.called.append(("forecast", (city, days)))
        return "rain"

    def check(self, answer: object) -> None:
        """Demand that both were called, and the answer came."""
        assert self.called == [("weather", "Paris"), ("forecast", ("Paris", 2))], self.called
        assert answer == ANSWER, answer


async def run_agent(kind: Any, *, stream: bool) -> None:
    tools = Tools()
    model = kind("default", openai.AsyncOpenAI(base_url=API, api_key="none", max_retries=0))
    functions = [agents.function_tool(tools.weather), agents.function_tool(tools.forecast)]
    agent = agents.Agent(name="guide", instructions="Help.", model=model, tools=functions)
    if stream:
        result: Any = agents.Runner.run_streamed(agent, "Weather in Paris?", max_turns=5)
        async for _ in result.stream_events():
            pass
    else:
        result = await agents.Runner.run(agent, "Weather in Paris?", max_turns=5)
    tools.check(result.final_output)


@case
async def openai_agents_chat() -> None:
    for stream in (False, True):
        await run_agent(agents.OpenAIChatCompletionsModel, stream=stream)


@case
async def openai_agents_responses() -> None:
    for stream in (False, True):
        await run_agent(agents.OpenAIResponsesModel, stream=stream)


@case
async def pydantic_ai() -> None:
    tools = Tools()
    provider = OpenAIProvider(base_url=API, api_key="none")
    agent = Agent(
        OpenAIChatModel("default", provider=provider), tools=[tools.weather, tools.forecast]
    )
    tools.check((await agent.run("Weather in Paris?")).output)


@case
def langchain() -> None:
    tools = Tools()
    known = {each.__name__: tool(each) for each in (tools.weather, tools.forecast)}
    model: Any = ChatOpenAI(model="default", base_url=API, api_key="none", max_retries=0)
    model = model.bind_tools([*known.values()])
    turns: list[Any] = [HumanMessage("Weather in Paris?")]
    for _ in range(3):
        turns.append(model.invoke(turns))
        for call in turns[-1].tool_calls:
            said = known[call["name"]].invoke(call["args"])
            turns.append(ToolMessage(said, tool_call_id=call["id"]))
    tools.check(turns[-1].content)


@case
def anthropic_client() -> None:
    client = anthropic.Anthropic(base_url=BASE_URL, api_key="none", max_retries=0)
    parameters = {"city": {"type": "string"}, "days": {"type": "integer"}}
    for stream in (False, True):
        tools = Tools()
        offered: Any = [
            {"name": name, "input_schema": {"type": "object", "properties": parameters}}
            for name in ("weather", "forecast")
        ]
        turns: list[Any] = [{"role": "user", "content": "Weather in Paris?"}]
        for _ in range(3):
            asked: Any = {"model": "default", "max_tokens": 99, "messages": turns, "tools": offered}
            if stream:
                with client.messages.stream(**asked) as events:
                    answer: Any = events.get_final_message()
            else:
                answer = client.messages.create(**asked)
            calls = [block for block in answer.content if block.type == "tool_use"]
            results = [
                {
                    "type": "tool_result",
                    "tool_use_id": call.id,
                    "content": getattr(tools, call.name)(**call.input),
                }
                for call in calls
            ]
            turns += [{"role": "assistant", "content": answer.content}]
            turns += [{"role": "user", "content": results}]
        tools.check(answer.content[0].text)


main()
