"""The shape of a request's answer in one API, and that of chats and completions."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from types import MappingProxyType
from typing import Any, Final, Protocol

from gateway.generation import Chunk, Ending
from gateway.openai.choices import Completion, Shaper, event, finish_reason
from gateway.openai.deltas import delta_of
from gateway.openai.errors import error_body
from gateway.openai.frames import TextFrame
from gateway.openai.job import Job
from gateway.openai.usage import counts
from outrider.errors import OutriderError
from outrider.types import VerifiedDraft

KEEP_ALIVE: Final = b": waiting\n\n"
_DONE: Final = b"data: [DONE]\n\n"
_CONTENT_ALONE: Final = {"content"}


class EventStream(Protocol):
    """The events of one streamed answer."""

    keep_alive: bytes
    """Sent where nothing else is for long."""

    def piece(self, index: int, chunk: Chunk) -> bytes:
        """Return the events that a chunk of a completion adds, maybe none."""

    def error(self, error: OutriderError) -> bytes:
        """Return the events that end a stream which has begun."""


class Rendering(Protocol):
    """Builds one request's answer."""

    def whole(self, completions: Sequence[Completion]) -> dict[str, Any]:
        """Return the body of an answer that is not streamed; `completions` prompt by prompt."""

    def stream(self) -> EventStream:
        """Begin the events of a streamed answer."""


class Choices:
    """Chats and completions: choices, whole or as events."""

    def __init__(self, job: Job) -> None:
        self._job = job

    def whole(self, completions: Sequence[Completion]) -> dict[str, Any]:
        return self._job.shaper.whole(completions)

    def stream(self) -> EventStream:
        return ChoiceEvents(self._job.shaper, len(self._job.work))


class ChoiceEvents:
    """The events of the choices of one answer."""

    keep_alive = KEEP_ALIVE

    def __init__(self, shaper: Shaper, completions: int) -> None:
        """Take the number of completions that are generated."""
        self._shaper = shaper
        self._completions = completions
        self._choices: dict[int, _Choice] = {}
        self._endings: dict[int, Ending] = {}

    def piece(self, index: int, chunk: Chunk) -> bytes:
        choice, data = self._choices.get(index), b""
        if choice is None:
            choice = self._choices[index] = _Choice(self._shaper, index)
            data = choice.opening()
        data += choice.piece(chunk)
        if chunk.ending is not None:
            self._endings[index] = chunk.ending
            last = len(self._endings) == self._completions
            endings = [self._endings[n] for n in sorted(self._endings)] if last else []
            data += choice.end(chunk.ending, endings)
            if last:
                data += self._end(endings)
        return data

    def error(self, error: OutriderError) -> bytes:
        return event(error_body(error))

    def _end(self, endings: Sequence[Ending]) -> bytes:
        """Return the stream's last events, given the endings of all choices."""
        shaper = self._shaper
        if not shaper.include_usage:
            return _DONE
        thoughts = sum(choice.reasoning_tokens for choice in self._choices.values())
        head, usage = shaper.head("chat.completion.chunk"), shaper.usage(endings, thoughts)
        return event({**head, "choices": [], "usage": usage, **shaper.aux_fields(endings)}) + _DONE


class _Choice:
    """The events of one choice."""

    def __init__(self, shaper: Shaper, index: int) -> None:
        self._shaper = shaper
        self._index = index
        self._chat = shaper.kind == "chat"
        reading = shaper.reading
        self._reader = None if reading is None else reading.reader()
        self._plain = not (  # events tell text alone
            shaper.with_logprobs or shaper.token_kinds or shaper.prompt_lens or shaper.with_drafts
        )
        self._frame: TextFrame | None = None  # of such an event
        self._chars = self._tokens = 0  # that were sent, unless it is plain

    @property
    def reasoning_tokens(self) -> int:
        return 0 if self._reader is None else self._reader.reasoning_tokens

    def opening(self) -> bytes:
        """Return the event before the first text; in a chat it names the role."""
        if self._chat:
            return self._event({"role": "assistant", "content": ""})
        echo = self._shaper.echo(self._index)
        return self._event(echo) if echo else b""

    def piece(self, chunk: Chunk) -> bytes:
        """Return the event of a chunk; with nothing to tell, none."""
        shaper, text = self._shaper, chunk.text
        content: Any = {"content": text} if self._chat else text
        told = bool(text)
        if self._reader is not None:
            texts = [token.text for token in chunk.tokens]
            content = delta_of(self._reader, texts, last=chunk.ending is not None)
            told = bool(content)
            text = content.get("content", "") if content.keys() == _CONTENT_ALONE else ""
        if self._plain:
            return self._text_event(text) if text else self._event(content) if told else b""
        logprobs = shaper.logprobs(chunk.tokens, self._chars)
        self._chars += len(chunk.text)
        self._tokens += len(chunk.tokens)
        drafts = self._drafts(chunk.drafts)
        tells_tokens = bool(chunk.tokens) and (shaper.with_logprobs or shaper.token_kinds)
        if not (told or drafts or tells_tokens):
            return b""
        return self._event(content, logprobs, {**shaper.token_fields(chunk.tokens), **drafts})

    def end(self, ending: Ending, endings: Sequence[Ending]) -> bytes:
        """Return the event with the finish reason; `endings` of all choices if this is the last."""
        shaper, called = self._shaper, self._reader is not None and bool(self._reader.calls)
        self._tokens = ending.usage.completion_tokens
        extra = {} if not endings or shaper.include_usage else shaper.aux_fields(endings)
        reason = finish_reason(ending, called=called)
        return self._event({} if self._chat else "", finish_reason=reason, extra=extra)

    def _text_event(self, text: str) -> bytes:
        """Return the event of a piece that is text alone."""
        if self._frame is None:
            mark = TextFrame.mark()
            self._frame = TextFrame.of(self._event({"content": mark} if self._chat else mark))
        return self._frame.event(text)

    def _drafts(self, drafts: Sequence[VerifiedDraft]) -> dict[str, Any]:
        if not self._shaper.with_drafts or not drafts:
            return {}
        spell = self._shaper.spell
        return {
            "drafts": [
                {
                    "position": draft.base_len,
                    "tokens": [
                        {"id": token, "text": spell(token).decode(errors="replace")}
                        for token in draft.token_ids
                    ],
                    "parents": list(draft.parents or range(-1, len(draft.token_ids) - 1)),
                }
                for draft in drafts
            ]
        }

    def _event(
        self,
        content: Any,
        logprobs: dict[str, Any] | None = None,
        fields: Mapping[str, Any] = MappingProxyType({}),
        *,
        finish_reason: str | None = None,
        extra: Mapping[str, Any] = MappingProxyType({}),
    ) -> bytes:
        """Return an event; `fields` are more of the choice, `extra` more of the body."""
        shaper = self._shaper
        choice = {
            "index": self._index,
            "delta" if self._chat else "text": content,
            "logprobs": logprobs,
            "finish_reason": finish_reason,
            **fields,
        }
        body = shaper.head("chat.completion.chunk")
        body["choices"] = [choice]
        if shaper.prompt_lens:
            body["usage"] = counts(shaper.prompt_lens[self._index], self._tokens)
        elif shaper.include_usage:
            body["usage"] = None
        return event({**body, **extra})
