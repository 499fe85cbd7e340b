"""Bodies of OpenAI's answers: one object, or the events of a stream."""

from __future__ import annotations

import json
import time
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, Literal

from google.protobuf.json_format import MessageToDict

from gateway.generation import Ending
from outrider.v1 import common_pb2

DONE = b"data: [DONE]\n\n"
Kind = Literal["text_completion", "chat"]


@dataclass(frozen=True, slots=True)
class Shaper:
    """Builds the bodies of one request's answer. `completions` is the number of its choices."""

    kind: Kind
    request_id: str
    model: str
    completions: int
    aux_info: bool
    include_usage: bool
    created: int

    @classmethod
    def create(
        cls,
        kind: Kind,
        request_id: str,
        model: str,
        completions: int,
        *,
        aux_info: bool,
        include_usage: bool,
    ) -> Shaper:
        prefix = "chatcmpl-" if kind == "chat" else "cmpl-"
        return cls(
            kind, prefix + request_id, model, completions, aux_info, include_usage, int(time.time())
        )

    def whole(self, texts: Sequence[str], endings: Sequence[Ending]) -> dict[str, Any]:
        """The answer when not streaming."""
        choices = []
        for index, (text, ending) in enumerate(zip(texts, endings, strict=True)):
            content: dict[str, Any] = (
                {"message": {"role": "assistant", "content": text, "refusal": None}}
                if self.kind == "chat"
                else {"text": text}
            )
            choices.append(
                {"index": index, **content, "logprobs": None, "finish_reason": ending.reason.value}
            )
        object_name = "chat.completion" if self.kind == "chat" else "text_completion"
        return {
            **self._head(object_name),
            "choices": choices,
            "usage": _usage(endings),
            **self._aux_info(endings),
        }

    def opening(self, index: int) -> bytes:
        """The event before a choice's first text: in a chat it names the role."""
        if self.kind == "text_completion":
            return b""
        return self._event(self._choice(index, {"role": "assistant", "content": ""}, None))

    def piece(self, index: int, text: str) -> bytes:
        content = {"content": text} if self.kind == "chat" else text
        return self._event(self._choice(index, content, None))

    def end_of_choice(self, index: int, ending: Ending, endings: Sequence[Ending] | None) -> bytes:
        """The event with the finish reason. `endings`: of all choices, when this is the last."""
        content: Any = {} if self.kind == "chat" else ""
        extra = {} if endings is None or self.include_usage else self._aux_info(endings)
        return self._event(self._choice(index, content, ending.reason.value), extra)

    def end(self, endings: Sequence[Ending]) -> bytes:
        """The stream's last events."""
        if not self.include_usage:
            return DONE
        head = self._head("chat.completion.chunk" if self.kind == "chat" else "text_completion")
        body = {**head, "choices": [], "usage": _usage(endings), **self._aux_info(endings)}
        return event(body) + DONE

    def _choice(self, index: int, content: Any, finish_reason: str | None) -> dict[str, Any]:
        return {
            "index": index,
            "delta" if self.kind == "chat" else "text": content,
            "logprobs": None,
            "finish_reason": finish_reason,
        }

    def _event(self, choice: dict[str, Any], extra: dict[str, Any] | None = None) -> bytes:
        body = self._head("chat.completion.chunk" if self.kind == "chat" else "text_completion")
        body["choices"] = [choice]
        if self.include_usage:
            body["usage"] = None
        return event({**body, **(extra or {})})

    def _head(self, object_name: str) -> dict[str, Any]:
        return {
            "id": self.request_id,
            "object": object_name,
            "created": self.created,
            "model": self.model,
        }

    def _aux_info(self, endings: Sequence[Ending]) -> dict[str, Any]:
        """One object for one prompt, a list for several."""
        if not self.aux_info:
            return {}
        infos = [aux_info_fields(ending.aux_info) for ending in endings]
        return {"aux_info": infos[0] if self.completions == 1 else infos}


def event(body: dict[str, Any]) -> bytes:
    """One server-sent event."""
    return b"data: " + json.dumps(body, separators=(",", ":")).encode() + b"\n\n"


def aux_info_fields(info: common_pb2.AuxInfo) -> dict[str, Any]:
    """Every field of AuxInfo under its own name, zeros included."""
    fields: dict[str, Any] = MessageToDict(
        info, preserving_proto_field_name=True, always_print_fields_with_no_presence=True
    )
    return fields


def _usage(endings: Sequence[Ending]) -> dict[str, Any]:
    prompt = sum(ending.usage.prompt_tokens for ending in endings)
    completion = sum(ending.usage.completion_tokens for ending in endings)
    cached = sum(ending.usage.cached_prompt_tokens for ending in endings)
    return {
        "prompt_tokens": prompt,
        "completion_tokens": completion,
        "total_tokens": prompt + completion,
        "prompt_tokens_details": {"cached_tokens": cached},
    }
