"""Sampling parameters under vLLM's names."""

from __future__ import annotations

import enum
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, fields
from types import MappingProxyType
from typing import Any, Final, TypeVar

from gateway.openai.parse import parse
from gateway.openai.requests import ChatRequest, CompletionRequest, Request
from outrider.errors import InvalidRequestError

R = TypeVar("R", bound=Request)

_REFUSED: Final = {
    "include_stop_str_in_output": "a stop string is never part of the output",
    "detokenize": "outputs always have their text",
    "skip_special_tokens": "special tokens have no text; token_ids holds them",
    "spaces_between_special_tokens": "special tokens have no text",
    "bad_words": "use logit_bias={token_id: -100}",
    "allowed_token_ids": "use structured_outputs or logit_bias",
    "logits_processors": "use logit_bias, penalties or structured_outputs",
    "guided_decoding": "use structured_outputs, a dict with json, regex, choice or grammar",
    "truncate_prompt_tokens": "shorten the prompt before",
}
"""Parameters of vLLM's that are not supported -> what to do instead."""
_NOT_IN_BODY: Final = frozenset({"logprobs", "output_kind", "extra_args", *_REFUSED})


class RequestOutputKind(enum.Enum):
    """The contents of each output of a stream."""

    CUMULATIVE = 0  # all so far
    DELTA = 1  # what is new
    FINAL_ONLY = 2  # all, once the request has ended


@dataclass(frozen=True, slots=True, kw_only=True)
class SamplingParams:
    """Parameters of a completion: its sampling, and its end.

    `max_tokens` None: as many as the context holds. `logprobs`: how many of the likeliest tokens
    to report beside each output token; `prompt_logprobs`: beside each token of the prompt.
    `structured_outputs` holds one of json, json_object, regex, choice and grammar. `extra_args` are
    more parameters of the HTTP API, such as `speculation` and `prediction`. Raises
    `InvalidRequestError`, naming the parameter.
    """

    n: int = 1
    best_of: int | None = None
    temperature: float = 1.0
    top_p: float = 1.0
    top_k: int = 0
    min_p: float = 0.0
    seed: int | None = None
    presence_penalty: float = 0.0
    frequency_penalty: float = 0.0
    repetition_penalty: float = 1.0
    logit_bias: Mapping[int, float] | None = None
    stop: str | Sequence[str] | None = None
    stop_token_ids: Sequence[int] | None = None
    ignore_eos: bool = False
    max_tokens: int | None = 16
    min_tokens: int = 0
    logprobs: int | None = None
    prompt_logprobs: int | None = None
    structured_outputs: Mapping[str, Any] | None = None
    output_kind: RequestOutputKind = RequestOutputKind.CUMULATIVE
    extra_args: Mapping[str, Any] | None = None

    # vLLM's; any other value is refused.
    include_stop_str_in_output: bool = False
    detokenize: bool = True
    skip_special_tokens: bool = True
    spaces_between_special_tokens: bool = True
    bad_words: Sequence[str] | None = None
    allowed_token_ids: None = None
    logits_processors: None = None
    guided_decoding: None = None
    truncate_prompt_tokens: None = None

    def __post_init__(self) -> None:
        for each in fields(self):
            value = getattr(self, each.name)
            if each.name in _REFUSED and value != each.default and value != []:
                raise InvalidRequestError(
                    f"{each.name}={value!r} is not supported: {_REFUSED[each.name]}.",
                    param=each.name,
                )
        self.completion_request()

    def completion_request(self, *, stream: bool = False) -> CompletionRequest:
        """Return a request to continue an empty prompt, which copies of it replace."""
        body = {**self._body(stream=stream), "prompt": "", "logprobs": self.logprobs}
        return _checked(parse(CompletionRequest, body))

    def chat_request(
        self,
        messages: Sequence[Mapping[str, Any]],
        seed: int,
        *,
        stream: bool = False,
        options: Mapping[str, Any] = MappingProxyType({}),
    ) -> ChatRequest:
        """Return a request to answer `messages`; `options` are more fields of its body."""
        body = self._body(stream=stream) | {"messages": [dict(each) for each in messages]}
        body.setdefault("seed", seed)
        body |= {name: value for name, value in options.items() if value is not None}
        if self.logprobs is not None:
            body |= {"logprobs": True, "top_logprobs": self.logprobs}
        return _checked(parse(ChatRequest, body))

    def _body(self, *, stream: bool) -> dict[str, Any]:
        """Return the parameters that both kinds of request share, where they differ from theirs."""
        body = {
            each.name: value
            for each in fields(self)
            if each.name not in _NOT_IN_BODY and (value := getattr(self, each.name)) != each.default
        }
        body |= {"max_tokens": self.max_tokens, "stream": stream}
        for name in ("stop", "stop_token_ids"):
            if name in body and not isinstance(body[name], str):
                body[name] = list(body[name])
        if "logit_bias" in body:
            body["logit_bias"] = {str(key): value for key, value in body["logit_bias"].items()}
        if "structured_outputs" in body:
            body["structured_outputs"] = dict(body["structured_outputs"])
        return body | dict(self.extra_args or {})


def _checked(request: R) -> R:
    """Raise `InvalidRequestError` for what is not within its range."""
    request.sampling(0)
    request.limits()
    request.num_choices()
    request.wanted_logprobs()
    request.wanted_prompt_logprobs()
    request.speculation_params()
    request.constraint()
    return request
