"""Bodies of POST /v1/messages and count_tokens: each is a chat under other names."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from typing import Annotated, Any, Final, Literal

from pydantic import BaseModel, ConfigDict, Field

from gateway.anthropic.content import Message, TextBlocks, turns
from gateway.intake import Limits
from gateway.openai.request_objects import Items, Strict
from gateway.openai.requests import ChatRequest
from gateway.openai.tools import ToolName
from gateway.openai.translation import as_chat
from outrider.errors import InvalidRequestError

NAMES: Final = {
    "max_completion_tokens": "max_tokens",
    "stop": "stop_sequences",
    "response_format": "output_config.format",
    "reasoning_effort": "output_config.effort",
    "thinking_token_budget": "thinking.budget_tokens",
    "parallel_tool_calls": "tool_choice.disable_parallel_tool_use",
}
"""Parameters of chats -> their names here."""

_HARMLESS: Final = frozenset({"inference_geo", "speed", "user_profile_id", "workspace_id"})
"""Anthropic's ways to route and bill a request."""


NO_THREADS: Final = "THREAD_UNSUPPORTED_REQUEST"
"""Reason of a refusal after which Anthropic's clients send whole conversations."""


class ToolObject(Strict):
    """A function that the model may call."""

    harmless = frozenset({"cache_control", "eager_input_streaming"})

    type: Literal["custom"] | None = None
    name: ToolName
    description: str | None = None
    input_schema: dict[str, Any]
    strict: bool | None = None

    def for_chat(self) -> dict[str, Any]:
        function = {
            "name": self.name,
            "description": self.description,
            "parameters": self.input_schema,
            "strict": self.strict,
        }
        return {"type": "function", "function": function}


class _Choice(Strict):
    disable_parallel_tool_use: bool | None = None


class AnyChoice(_Choice):
    """A choice that names no tool."""

    type: Literal["auto", "any", "none"]


class ToolChoice(_Choice):
    """The tool that must be called."""

    type: Literal["tool"]
    name: str


class Thinking(Strict):
    """Thinking as the model's template has it, or none."""

    type: Literal["adaptive", "disabled"]
    display: Literal["summarized", "omitted"] | None = None


class ThinkingBudget(Strict):
    """Thinking of so many tokens at most."""

    type: Literal["enabled"]
    budget_tokens: Annotated[int, Field(ge=1)]
    display: Literal["summarized", "omitted"] | None = None


class JsonFormat(Strict):
    """JSON that satisfies a schema."""

    type: Literal["json_schema"]
    schema_: dict[str, Any] = Field(alias="schema")


class OutputConfig(Strict):
    """Effort, and the format of the answer's text."""

    effort: str | None = None
    format: JsonFormat | None = None

    def response_format(self) -> dict[str, Any] | None:
        """Return the format as a chat's."""
        if self.format is None:
            return None
        schema = {"name": "answer", "schema": self.format.schema_}
        return {"type": "json_schema", "json_schema": schema}


class _Chat(ChatRequest):
    """A chat that goes on to the end of the context at most, whatever it asks for."""

    def limits(self) -> Limits:
        return replace(super().limits(), ends_at_context=True)


class CountRequest(BaseModel):
    """POST /v1/messages/count_tokens; all that a prompt depends on."""

    model_config = ConfigDict(strict=True, frozen=True, extra="allow", allow_inf_nan=False)

    messages: Annotated[Items[Message], Field(min_length=1)]
    system: TextBlocks = Field(default_factory=list)
    tools: Items[ToolObject] | None = None
    tool_choice: Annotated[AnyChoice | ToolChoice, Field(discriminator="type")] | None = None
    thinking: Annotated[Thinking | ThinkingBudget, Field(discriminator="type")] | None = None
    output_config: OutputConfig | None = None
    output_format: JsonFormat | None = None
    chat_template_kwargs: dict[str, Any] | None = None
    cache_control: Any = None
    max_tokens: int | None = None
    stop_sequences: Items[str] | None = None

    def chat(self) -> ChatRequest:
        """Return the request as a chat. Raises `InvalidRequestError`."""
        given = self.model_extra or {}
        others = {name: value for name, value in given.items() if name not in _HARMLESS}
        if _keeps_all(others.get("context_management")):
            del others["context_management"]
        if others.pop("thread", None) is not None:
            raise InvalidRequestError(
                "thread is not supported: conversations are not stored. Send all messages.",
                param="thread",
                reason=NO_THREADS,
            )
        config = self.output_config or OutputConfig(format=self.output_format)
        fields = {
            "messages": turns(self.system, self.messages),
            "max_completion_tokens": self.max_tokens,
            "stop": self.stop_sequences,
            "tools": None if self.tools is None else [tool.for_chat() for tool in self.tools],
            "response_format": config.response_format(),
            "reasoning_effort": config.effort,
            **dict(self._choice()),
            **self._thinking(),
        }
        return as_chat(fields, others, NAMES, _Chat)

    def _choice(self) -> Iterator[tuple[str, Any]]:
        choice = self.tool_choice
        if isinstance(choice, ToolChoice):
            yield "tool_choice", {"type": "function", "function": {"name": choice.name}}
        elif choice is not None:
            yield "tool_choice", "required" if choice.type == "any" else choice.type
        if choice is not None and choice.disable_parallel_tool_use is not None:
            yield "parallel_tool_calls", not choice.disable_parallel_tool_use

    def _thinking(self) -> dict[str, Any]:
        """Return a chat's fields. As in Anthropic's API, nothing is thought unless asked for."""
        thinking, given = self.thinking, self.chat_template_kwargs or {}
        if thinking is None or thinking.type == "disabled":
            variables: dict[str, Any] = {"enable_thinking": False, "thinking": False}
        elif isinstance(thinking, ThinkingBudget):
            variables = {"enable_thinking": True, "thinking": True}
        else:
            variables = {}
        shown = thinking is not None and thinking.type != "disabled"
        return {
            "chat_template_kwargs": {**variables, **given},
            "include_reasoning": shown and thinking is not None and thinking.display != "omitted",
            "thinking_token_budget": thinking.budget_tokens
            if isinstance(thinking, ThinkingBudget)
            else None,
        }


class MessagesRequest(CountRequest):
    """POST /v1/messages."""

    max_tokens: int


def _keeps_all(management: Any) -> bool:
    """Tell whether edits of the context leave it as it is, as those of some agents do."""
    edits = management.get("edits") if isinstance(management, dict) else None
    return isinstance(edits, list) and all(
        isinstance(edit, dict)
        and str(edit.get("type")).startswith("clear_thinking")
        and edit.get("keep") == "all"
        for edit in edits
    )
