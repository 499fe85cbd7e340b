"""Chats of the gRPC face: their prompts, and the parts of their answers."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

from pydantic_core import from_json

from gateway.answers.events import Arguments, Call, Content, Event
from gateway.answers.formats import Reading
from gateway.answers.tools import FUNCTION_NAME, Choice, Tool, Tools
from gateway.chat import Chat, template_variables
from outrider.errors import InvalidRequestError
from outrider.models.chat_template import Conversation
from outrider.params import Constraint, require
from outrider.v1 import generation_pb2


def chat_from_proto(prompt: generation_pb2.ChatPrompt, answer: Constraint | None) -> Chat:
    """Raise `InvalidRequestError`."""
    tools = {
        tool.name: Tool(tool.name, _object(tool.parameters, "chat.tools.parameters"), tool.strict)
        for tool in prompt.tools
    }
    require(len(tools) == len(prompt.tools), "chat.tools", "functions of different names")
    for name in tools:
        named = FUNCTION_NAME.fullmatch(name) is not None
        require(named, "chat.tools.name", "1 to 64 letters, digits, _, . and -")
    given = tools if prompt.tool_choice != generation_pb2.TOOL_CHOICE_NONE else {}
    variables = _object(prompt.template_variables, "chat.template_variables")
    effort = prompt.reasoning_effort if prompt.HasField("reasoning_effort") else None
    return Chat(
        Conversation(
            [*map(_message, prompt.messages)],
            [_for_template(tool, given[tool.name]) for tool in prompt.tools] if given else (),
            template_variables(variables, effort, "chat.template_variables"),
        ),
        _choice(prompt, given),
        answer,
        "" if answer is None else answer.kind.value,
        prompt.thinking_token_budget if prompt.HasField("thinking_token_budget") else None,
        "chat",
    )


def parts_of(events: Iterable[Event], reading: Reading) -> list[generation_pb2.AnswerPart]:
    """Return what was found in an answer."""
    return [_part(event, reading) for event in events]


def _choice(prompt: generation_pb2.ChatPrompt, tools: Tools) -> Choice:
    one = prompt.HasField("parallel_tool_calls") and not prompt.parallel_tool_calls
    if prompt.HasField("function"):
        unset = prompt.tool_choice == generation_pb2.TOOL_CHOICE_UNSPECIFIED
        require(unset, "chat.tool_choice", "unset where function is set")
        require(prompt.function in tools, "chat.function", "the name of one of tools")
        return Choice(tools, (prompt.function,), one=True)
    if prompt.tool_choice == generation_pb2.TOOL_CHOICE_REQUIRED:
        require(bool(tools), "chat.tool_choice", "TOOL_CHOICE_AUTO where there are no tools")
        return Choice(tools, tuple(tools), one=one)
    return Choice(tools, one=one)


def _part(event: Event, reading: Reading) -> generation_pb2.AnswerPart:
    if isinstance(event, Call):
        call = generation_pb2.ToolCall(id=reading.new_call_id(), name=event.name)
        return generation_pb2.AnswerPart(call=call)
    if isinstance(event, Arguments):
        return generation_pb2.AnswerPart(arguments=event.text)
    if isinstance(event, Content):
        return generation_pb2.AnswerPart(content=event.text)
    return generation_pb2.AnswerPart(reasoning=event.text)


def _message(message: generation_pb2.ChatMessage) -> dict[str, Any]:
    """Return a turn as chat templates know it."""
    fields: dict[str, Any] = {"role": message.role, "content": message.content}
    if message.tool_calls:
        fields["content"] = message.content or None
        fields["tool_calls"] = [
            {
                "id": call.id,
                "type": "function",
                "function": {
                    "name": call.name,
                    "arguments": _object(call.arguments, "chat.messages.tool_calls.arguments"),
                },
            }
            for call in message.tool_calls
        ]
    for name, key in (
        ("name", "name"),
        ("tool_call_id", "tool_call_id"),
        ("reasoning", "reasoning_content"),
    ):
        if message.HasField(name):
            fields[key] = getattr(message, name)
    return fields


def _for_template(tool: generation_pb2.Tool, read: Tool) -> dict[str, Any]:
    """Return a tool as chat templates know it; `read` has its parameters."""
    function: dict[str, Any] = {"name": tool.name}
    if tool.description:
        function["description"] = tool.description
    if tool.parameters:
        function["parameters"] = read.parameters
    return {"type": "function", "function": function}


def _object(text: str, param: str) -> dict[str, Any]:
    """Read a JSON object; empty for no text. Raises `InvalidRequestError`."""
    try:
        value = from_json(text, allow_inf_nan=False) if text else {}
    except ValueError:  # too deeply nested, too
        value = None
    if not isinstance(value, dict):
        raise InvalidRequestError(f"{param} must be a JSON object, as text.", param=param)
    return value
