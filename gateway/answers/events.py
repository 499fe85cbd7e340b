"""What a parser finds in an answer, in the order of the text."""

from __future__ import annotations

from collections.abc import Iterable
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


def append(events: list[Event], event: Event) -> None:
    """Append an event, joined with the last one if both are pieces of the same text."""
    if not isinstance(event, Call):
        if not event.text:
            return
        if events and type(last := events[-1]) is type(event):
            assert not isinstance(last, Call)
            events[-1] = type(event)(last.text + event.text)
            return
    events.append(event)


def joined(pieces: Iterable[Iterable[Event]]) -> list[Event]:
    """Return the events of a text that came in pieces, as if it had come whole."""
    events: list[Event] = []
    for piece in pieces:
        for event in piece:
            append(events, event)
    return events
