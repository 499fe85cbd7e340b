"""A response as an object, and as the events of a stream that ends with it."""

from __future__ import annotations

import time
from collections.abc import Iterator, Sequence
from typing import Any, Final

from gateway.answers.blocks import BlockReader
from gateway.generation import Chunk, Ending
from gateway.openai.choices import Completion, typed_event
from gateway.openai.errors import error_body
from gateway.openai.job import Job
from gateway.openai.rendering import KEEP_ALIVE
from gateway.openai.requests import ChatRequest
from gateway.openai.translation import renamed
from gateway.openai.usage import aux_info
from gateway.responses_api.output import Output
from gateway.responses_api.requests import NAMES, ResponseRequest
from outrider.errors import CapacityError, InvalidRequestError, OutriderError
from outrider.types import FinishReason

_ERROR_CODES: Final = {CapacityError: "rate_limit_exceeded", InvalidRequestError: "invalid_prompt"}


class ResponseRendering:
    """Builds the answer to one request."""

    def __init__(self, request: ResponseRequest, chat: ChatRequest, job: Job) -> None:
        self._request = request
        self._chat = chat
        self._job = job

    def whole(self, completions: Sequence[Completion]) -> dict[str, Any]:
        (completion,) = completions
        *_, last = self.stream().events(Chunk(completion.tokens, completion.ending))
        response: dict[str, Any] = last["response"]
        return response

    def stream(self) -> _ResponseEvents:
        shaper = self._job.shaper
        response = {
            "id": f"resp_{self._job.work[0].request_id}",
            "object": "response",
            "created_at": shaper.created,
            "model": shaper.model,
            **_echoed(self._request, self._chat),
        }
        asked = self._request
        output = Output(asked.namespaces(), summarizes=asked.summarizes, returns=asked.returns)
        return _ResponseEvents(response, shaper.blocks(), output, tells=shaper.aux_info)


def _echoed(request: ResponseRequest, chat: ChatRequest) -> dict[str, Any]:
    """Return the fields of a response that repeat the request, or say what held without them."""
    sampling = chat.sampling(0)
    text, reasoning = request.text, request.reasoning
    choice = request.tool_choice
    named = choice.model_dump() if choice is not None and not isinstance(choice, str) else choice
    form = None if text is None or text.format is None else text.format.model_dump(by_alias=True)
    return {
        "background": False,
        "instructions": request.instructions,
        "max_output_tokens": request.max_output_tokens,
        "max_tool_calls": None,
        "metadata": request.metadata or {},
        "parallel_tool_calls": request.parallel_tool_calls is not False,
        "previous_response_id": None,
        "reasoning": {
            "effort": None if reasoning is None else reasoning.effort,
            "summary": None if reasoning is None else reasoning.summary,
        },
        "service_tier": "default",
        "store": False,
        "temperature": sampling.temperature,
        "text": {"format": form or {"type": "text"}},
        "tool_choice": named or "auto",
        "tools": [tool.shown() for tool in request.tools or ()],
        "top_logprobs": 0,
        "top_p": sampling.top_p,
        "truncation": "disabled",
    }


class _ResponseEvents:
    keep_alive = KEEP_ALIVE

    def __init__(
        self, response: dict[str, Any], reader: BlockReader, output: Output, *, tells: bool
    ) -> None:
        """Take the fields that do not change; `tells`: aux_info is wanted."""
        self._fixed = response
        self._reader = reader
        self._output = output
        self._tells = tells
        self._number = 0

    def piece(self, index: int, chunk: Chunk) -> bytes:
        del index  # of the only completion
        return b"".join(map(typed_event, self.events(chunk)))

    def error(self, error: OutriderError) -> bytes:
        return b"".join(map(typed_event, self._failure(renamed(error, NAMES))))

    def events(self, chunk: Chunk) -> Iterator[dict[str, Any]]:
        """Yield the events that a chunk adds. The last one holds the whole response."""
        yield from self._opening()
        ending = chunk.ending
        cut = ending is not None and ending.reason is FinishReason.LENGTH
        texts = [token.text for token in chunk.tokens]
        for change in self._reader.read(texts, last=ending is not None, cut=cut):
            for event in self._output.events(change):
                yield self._numbered(event)
        if ending is not None:
            status = "incomplete" if cut else "completed"
            response = self._response(status) | self._closing(ending, cut=cut)
            yield self._numbered({"type": f"response.{status}", "response": response})

    def _opening(self) -> Iterator[dict[str, Any]]:
        if not self._number:
            for name in ("created", "in_progress"):
                response = self._response("in_progress")
                yield self._numbered({"type": f"response.{name}", "response": response})

    def _failure(self, error: OutriderError) -> Iterator[dict[str, Any]]:
        yield from self._opening()
        self._output.cut_off()
        shown: Any = error_body(error)["error"]
        told = {name: shown[name] for name in ("code", "message", "param")}
        yield self._numbered({"type": "error", **told})
        kinds = (code for kind, code in _ERROR_CODES.items() if isinstance(error, kind))
        fault = {"code": next(kinds, "server_error"), "message": shown["message"]}
        response = self._response("failed") | {"error": fault}
        yield self._numbered({"type": "response.failed", "response": response})

    def _numbered(self, event: dict[str, Any]) -> dict[str, Any]:
        self._number += 1
        return {**event, "sequence_number": self._number - 1}

    def _response(self, status: str) -> dict[str, Any]:
        return {
            **self._fixed,
            "status": status,
            "error": None,
            "incomplete_details": None,
            "output": [*self._output.items],
            "usage": None,
        }

    def _closing(self, ending: Ending, *, cut: bool) -> dict[str, Any]:
        """Return the fields that are known at the end."""
        usage = ending.usage
        fields: dict[str, Any] = {
            "usage": {
                "input_tokens": usage.prompt_tokens,
                "input_tokens_details": {
                    "cached_tokens": usage.cached_prompt_tokens,
                    "cache_write_tokens": 0,
                },
                "output_tokens": usage.completion_tokens,
                "output_tokens_details": {"reasoning_tokens": self._reader.reasoning_tokens},
                "total_tokens": usage.prompt_tokens + usage.completion_tokens,
            },
            **(aux_info([ending.aux_info]) if self._tells else {}),
        }
        if cut:
            return {**fields, "incomplete_details": {"reason": "max_output_tokens"}}
        return {**fields, "completed_at": int(time.time())}
