"""Instructor, in its modes."""

from __future__ import annotations

from typing import Any, Literal

import instructor
import openai
from cases import API, case, main
from pydantic import BaseModel, ConfigDict


class Booking(BaseModel):
    """Book a room."""

    model_config = ConfigDict(extra="forbid")  # a weak model would go on

    room: Literal["red", "blue"]
    floor: Literal[1, 2]


def ask(mode: instructor.Mode | None) -> None:
    plain = openai.OpenAI(base_url=API, api_key="none", max_retries=0)
    settings: Any = {} if mode is None else {"mode": mode}
    client = instructor.from_openai(plain, **settings)
    answer = client.chat.completions.create(
        model="default",
        messages=[{"role": "user", "content": "Book a room."}],
        response_model=Booking,
        max_retries=0,
        temperature=0,
    )
    assert isinstance(answer, Booking)


@case
def default_mode() -> None:
    ask(None)


@case
def tools() -> None:
    ask(instructor.Mode.TOOLS)


@case
def strict_tools() -> None:
    ask(instructor.Mode.TOOLS_STRICT)


@case
def json_schema() -> None:
    ask(instructor.Mode.JSON_SCHEMA)


@case
def responses_tools() -> None:
    ask(instructor.Mode.RESPONSES_TOOLS)


main()
