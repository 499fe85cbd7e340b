"""Tools in request bodies: offered, chosen, and called in earlier turns."""

from __future__ import annotations

from typing import Annotated, Any, Literal

from pydantic import Field
from pydantic_core import from_json

from gateway.answers.tools import FUNCTION_NAME
from gateway.openai.request_objects import Strict

ToolName = Annotated[str, Field(pattern=f"^{FUNCTION_NAME.pattern}$")]


class Function(Strict):
    """A function that the model may call."""

    name: ToolName
    description: str | None = None
    parameters: dict[str, Any] | None = None
    strict: bool | None = None


class ToolObject(Strict):
    """An entry of `tools`."""

    type: Literal["function"]
    function: Function

    def for_template(self) -> dict[str, Any]:
        """Return the tool as chat templates know it."""
        fields = {
            name: value
            for name in ("name", "description", "parameters")
            if (value := getattr(self.function, name)) is not None
        }
        return {"type": "function", "function": fields}


class NamedFunction(Strict):
    """The function of a choice."""

    name: str


class ToolChoice(Strict):
    """The function that must be called."""

    type: Literal["function"]
    function: NamedFunction


class CalledFunction(Strict):
    """A call's function; a client may have read its arguments already."""

    name: str
    arguments: str | dict[str, Any] = ""
    parsed_arguments: Any = None  # openai-python's reading of the same

    def for_template(self) -> dict[str, Any]:
        """Return the call as chat templates know it: arguments as an object, if they are one."""
        arguments: Any = self.arguments
        if isinstance(arguments, str):
            try:
                arguments = from_json(arguments, allow_inf_nan=False) if arguments else {}
            except ValueError:  # too deeply nested, too
                arguments = self.arguments
            if not isinstance(arguments, dict):
                arguments = self.arguments
        return {"name": self.name, "arguments": arguments}


class ToolCall(Strict):
    """A call of an earlier turn, as answers have it, whole or from a stream."""

    id: str | None = None
    type: Literal["function"] | None = "function"
    function: CalledFunction
    index: int | None = None

    def for_template(self) -> dict[str, Any]:
        """Return the call as chat templates know it."""
        call = {"type": "function", "function": self.function.for_template()}
        return call if self.id is None else {"id": self.id, **call}
