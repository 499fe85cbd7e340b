"""What a parser finds in an answer, in the order of the text."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class Content:
    """Text for the reader of the answer."""

    text: str


@dataclass(frozen=True, slots=True)
class Reasoning:
    """Text of the model's thinking."""

    text: str


@dataclass(frozen=True, slots=True)
class Call:
    """A tool call begins."""

    name: str


@dataclass(frozen=True, slots=True)
class Arguments:
    """A piece of the last call's arguments, which together are JSON as far as the model kept to it.

    Nothing stands between a call and its arguments, or between two pieces of them.
    A call that breaks off, or whose arguments are no JSON, has what the model wrote.
    """

    text: str


Event = Content | Reasoning | Call | Arguments
