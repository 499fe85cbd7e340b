"""A message as an object, and as the events of a stream."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from typing import Any, Final

from gateway.answers.blocks import Begun, Block, BlockReader, Change, Grown
from gateway.anthropic.content import input_of
from gateway.anthropic.errors import error_body
from gateway.anthropic.requests import MessagesRequest
from gateway.generation import Chunk, Ending
from gateway.openai.choices import Completion, typed_event
from gateway.openai.job import Job
from gateway.openai.rendering import EventStream
from gateway.openai.usage import aux_info
from outrider.errors import OutriderError
from outrider.types import FinishReason

_End = Callable[[Ending, BlockReader], dict[str, Any]]
_PING: Final[dict[str, Any]] = {"type": "ping"}


class MessageRendering:
    """Builds the answer to one request."""

    def __init__(self, request: MessagesRequest, job: Job) -> None:
        self._max_tokens = request.max_tokens
        self._job = job

    def whole(self, completions: Sequence[Completion]) -> dict[str, Any]:
        (completion,) = completions
        reader = self._job.shaper.blocks()
        for _ in reader.read([token.text for token in completion.tokens], last=True):
            pass
        end = self._end(completion.ending, reader)
        return {
            **self._message(),
            "content": [_block(block, whole=True) for block in reader.blocks],
            **end.pop("delta"),
            **end,
        }

    def stream(self) -> EventStream:
        return _MessageEvents(self._message(), self._job.shaper.blocks(), self._end)

    def _message(self) -> dict[str, Any]:
        """Return the message as it begins. Its cached tokens are known at its end."""
        (request,) = self._job.work
        return {
            "id": f"msg_{request.request_id}",
            "type": "message",
            "role": "assistant",
            "model": self._job.shaper.model,
            "content": [],
            "stop_reason": None,
            "stop_sequence": None,
            "usage": {"input_tokens": len(request.prompt_token_ids), "output_tokens": 0},
        }

    def _end(self, ending: Ending, reader: BlockReader) -> dict[str, Any]:
        """Return the fields known at the end: `delta`, `usage`, and what was asked for."""
        usage = ending.usage
        return {
            "delta": self._stop(ending, called=bool(reader.calls)),
            "usage": {
                "input_tokens": usage.prompt_tokens - usage.cached_prompt_tokens,
                "cache_creation_input_tokens": 0,
                "cache_read_input_tokens": usage.cached_prompt_tokens,
                "output_tokens": usage.completion_tokens,
                "output_tokens_details": {"thinking_tokens": reader.reasoning_tokens},
            },
            **(aux_info([ending.aux_info]) if self._job.shaper.aux_info else {}),
        }

    def _stop(self, ending: Ending, *, called: bool) -> dict[str, Any]:
        """Return why the answer ended. Calls come first: they wait for their results."""
        reason, sequence = "end_turn", None
        if ending.reason is FinishReason.LENGTH:
            full = ending.usage.completion_tokens < self._max_tokens
            reason = "model_context_window_exceeded" if full else "max_tokens"
        elif called:
            reason = "tool_use"
        elif isinstance(ending.stop, str):
            reason, sequence = "stop_sequence", ending.stop
        return {"stop_reason": reason, "stop_sequence": sequence}


class _MessageEvents:
    def __init__(self, message: dict[str, Any], reader: BlockReader, end: _End) -> None:
        """Take the message as it begins, and what returns the fields known at its end."""
        self.keep_alive = typed_event(_PING)
        self._message = message
        self._reader = reader
        self._end = end
        self._begun = False

    def piece(self, index: int, chunk: Chunk) -> bytes:
        del index  # of the only completion
        return b"".join(map(typed_event, self._events(chunk)))

    def error(self, error: OutriderError) -> bytes:
        return typed_event(error_body(error))

    def _events(self, chunk: Chunk) -> Iterator[dict[str, Any]]:
        if not self._begun:
            self._begun = True
            yield {"type": "message_start", "message": self._message}
            yield _PING
        texts = [token.text for token in chunk.tokens]
        for change in self._reader.read(texts, last=chunk.ending is not None):
            yield from _shown(change)
        if chunk.ending is not None:
            yield {"type": "message_delta", **self._end(chunk.ending, self._reader)}
            yield {"type": "message_stop"}


def _shown(change: Change) -> Iterator[dict[str, Any]]:
    block = change.block
    event = {"index": block.index}
    if isinstance(change, Begun):
        shown = _block(block, whole=False)
        yield {"type": "content_block_start", **event, "content_block": shown}
    elif isinstance(change, Grown):
        kind, name = {
            "text": ("text_delta", "text"),
            "reasoning": ("thinking_delta", "thinking"),
            "call": ("input_json_delta", "partial_json"),
        }[block.kind]
        yield {"type": "content_block_delta", **event, "delta": {"type": kind, name: change.text}}
    else:
        if block.kind == "reasoning":  # without it some clients leave thinking out of the next turn
            signed = {"type": "signature_delta", "signature": ""}
            yield {"type": "content_block_delta", **event, "delta": signed}
        yield {"type": "content_block_stop", **event}


def _block(block: Block, *, whole: bool) -> dict[str, Any]:
    """Return a block as it begins, or as it is when the answer has ended."""
    text = block.text if whole else ""
    if block.kind == "text":
        return {"type": "text", "text": text}
    if block.kind == "reasoning":
        return {"type": "thinking", "thinking": text, "signature": ""}
    return {"type": "tool_use", "id": block.call_id, "name": block.name, "input": input_of(text)}
