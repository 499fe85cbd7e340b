"""Bodies of POST /v1/responses: each is a chat under other names."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Annotated, Any, Final, Literal

from pydantic import BaseModel, ConfigDict, Field

from gateway.openai.request_objects import Items, JsonSchemaFormat, Strict
from gateway.openai.requests import ChatRequest
from gateway.openai.tools import ToolName
from gateway.openai.translation import as_chat
from gateway.responses_api.items import InputItems, full_name, turns
from outrider.errors import InvalidRequestError, shortened

NAMES: Final = {
    "messages": "input",
    "max_tokens": "max_output_tokens",
    "max_completion_tokens": "max_output_tokens",
    "response_format": "text.format",
    "reasoning_effort": "reasoning.effort",
    "verbosity": "text.verbosity",
}
"""Parameters of chats -> their names here."""

_NO_LOGPROBS: Final = "message.output_text.logprobs"
_ENCRYPTED: Final = "reasoning.encrypted_content"
_UNSUPPORTED: Final = {
    "previous_response_id": "Responses are not stored: send the whole conversation as input.",
    "conversation": "Conversations are not stored: send the whole conversation as input.",
    "prompt": "Prompts are not stored: send instructions and input.",
    "background": "Responses are not stored: wait for the answer, or stream it.",
    "top_logprobs": "/v1/chat/completions tells logprobs.",
    "truncation": "The input is never cut: shorten it.",
    "stream_options": "Usage comes with the last event.",
}
"""Parameters that are refused unless they ask for nothing, and what to do."""
_NEUTRAL: Final[dict[str, tuple[Any, ...]]] = {
    "background": (False,),
    "top_logprobs": (0,),
    "truncation": ("disabled",),
    "stream_options": ({}, {"include_obfuscation": False}, {"include_obfuscation": True}),
}
# The first is about tools that a server runs: there are none.
_HARMLESS: Final = frozenset({"max_tool_calls", "client_metadata"})


ALLOWED: Final = {
    "tool_choice": 'none, auto, required or {"type": "function", "name": ...}',
}
"""Fields of several types -> their types in words, for errors."""


class FunctionTool(Strict):
    """A function that the model may call."""

    type: Literal["function"]
    name: ToolName
    description: str | None = None
    parameters: dict[str, Any] | None = None
    strict: bool | None = None

    def shown(self) -> dict[str, Any]:
        """Return the tool as responses repeat it."""
        return {**self.model_dump(), "strict": bool(self.strict)}


class Namespace(Strict):
    """A group of functions. The model knows one as `namespace.name`."""

    type: Literal["namespace"]
    name: ToolName
    description: str = ""
    tools: Items[FunctionTool]

    def shown(self) -> dict[str, Any]:
        """Return the tools as responses repeat them."""
        return {**self.model_dump(), "tools": [tool.shown() for tool in self.tools]}

    def functions(self) -> list[FunctionTool]:
        """Return the functions as the model knows them, each with the group's description."""
        return [
            tool.model_copy(
                update={
                    "name": full_name(self.name, tool.name),
                    "description": "\n".join(filter(None, (self.description, tool.description))),
                }
            )
            for tool in self.tools
        ]


class NamedFunction(Strict):
    """A function that is chosen."""

    type: Literal["function"]
    name: str


class AllowedTools(Strict):
    """The tools among which to choose."""

    type: Literal["allowed_tools"]
    mode: Literal["auto", "required"]
    tools: Items[NamedFunction]


ToolChoice = Annotated[NamedFunction | AllowedTools, Field(discriminator="type")]


class TextFormat(Strict):
    """A text without a format."""

    type: Literal["text"]


class JsonObject(Strict):
    """Any JSON object."""

    type: Literal["json_object"]


class JsonSchema(JsonSchemaFormat):
    """JSON that satisfies a schema."""

    type: Literal["json_schema"]


class TextConfig(Strict):
    """The format of an answer's text."""

    format: Annotated[TextFormat | JsonObject | JsonSchema, Field(discriminator="type")] | None = (
        None
    )
    verbosity: str | None = None

    def for_chat(self) -> dict[str, Any] | None:
        """Return the format as a chat's."""
        if isinstance(self.format, JsonSchema):
            schema = self.format.model_dump(by_alias=True, exclude={"type"})
            return {"type": "json_schema", "json_schema": schema}
        return None if self.format is None else self.format.model_dump()


class ReasoningConfig(Strict):
    """The effort of reasoning, and the form in which it is shown."""

    effort: str | None = None
    summary: Literal["auto", "concise", "detailed"] | None = None
    generate_summary: Literal["auto", "concise", "detailed"] | None = None  # its older name


class ResponseRequest(BaseModel):
    """POST /v1/responses."""

    model_config = ConfigDict(strict=True, frozen=True, extra="allow", allow_inf_nan=False)

    input: InputItems
    instructions: str | None = None
    max_output_tokens: int | None = None
    metadata: dict[str, str] | None = None
    parallel_tool_calls: bool | None = None
    reasoning: ReasoningConfig | None = None
    text: TextConfig | None = None
    tools: Items[Annotated[FunctionTool | Namespace, Field(discriminator="type")]] | None = None
    tool_choice: Literal["none", "auto", "required"] | ToolChoice | None = None
    include: Items[str] | None = None

    @property
    def summarizes(self) -> bool:
        """Tell whether reasoning is wanted as a summary."""
        config = self.reasoning or ReasoningConfig()
        return config.summary is not None or config.generate_summary is not None

    @property
    def returns(self) -> bool:
        """Tell whether reasoning is wanted in the form in which clients return it."""
        return _ENCRYPTED in (self.include or ())

    def chat(self) -> ChatRequest:
        """Return the request as a chat. Raises `InvalidRequestError`."""
        others = {name: value for name, value in self._others() if name not in _HARMLESS}
        config, text = self.reasoning or ReasoningConfig(), self.text or TextConfig()
        tools, choice = self._offered()
        fields = {
            "messages": turns(self.instructions, self.input),
            "max_completion_tokens": self.max_output_tokens,
            "response_format": text.for_chat(),
            "verbosity": None if text.verbosity == "medium" else text.verbosity,
            "reasoning_effort": config.effort,
            "tools": tools,
            "tool_choice": choice,
            "parallel_tool_calls": self.parallel_tool_calls,
        }
        return as_chat(fields, others, NAMES)

    def _others(self) -> Iterator[tuple[str, Any]]:
        """Yield the fields that are not known here. Raises `InvalidRequestError`."""
        if _NO_LOGPROBS in (self.include or ()):
            raise InvalidRequestError(
                f"include: {_NO_LOGPROBS} is not supported. {_UNSUPPORTED['top_logprobs']}",
                param="include",
            )
        for name, value in (self.model_extra or {}).items():
            if name not in _UNSUPPORTED:
                yield name, value
            elif value is not None and value not in _NEUTRAL.get(name, ()):
                raise InvalidRequestError(
                    f"{name} is not supported. {_UNSUPPORTED[name]}", param=name
                )

    def _offered(self) -> tuple[list[dict[str, Any]] | None, Any]:
        """Return a chat's `tools` and `tool_choice`."""
        choice, tools = self.tool_choice, None if self.tools is None else self._functions()
        if isinstance(choice, AllowedTools):
            allowed = {tool.name for tool in choice.tools}
            if unknown := allowed - {tool.name for tool in tools or ()}:
                raise InvalidRequestError(
                    f"tool_choice.tools names {shortened(min(unknown), 64)!r}, none of tools.",
                    param="tool_choice.tools",
                )
            tools, choice = [tool for tool in tools or () if tool.name in allowed], choice.mode
        named: Any = choice
        if isinstance(choice, NamedFunction):
            named = {"type": "function", "function": {"name": choice.name}}
        if tools is None:
            return None, named
        given = [each.model_dump(exclude={"type"}) for each in tools]
        return [{"type": "function", "function": each} for each in given], named

    def _functions(self) -> list[FunctionTool]:
        functions: list[FunctionTool] = []
        for tool in self.tools or ():
            functions += tool.functions() if isinstance(tool, Namespace) else [tool]
        return functions

    def namespaces(self) -> dict[str, tuple[str, str]]:
        """Return the namespace and the name of each function that is in one, by its full name."""
        return {
            full_name(group.name, tool.name): (group.name, tool.name)
            for group in self.tools or ()
            if isinstance(group, Namespace)
            for tool in group.tools
        }
