"""Request bodies of the OpenAI API, with Outrider's additions.

A parameter that would change the answer is supported or refused by name, never ignored.
"""

from __future__ import annotations

from typing import Annotated, Any, Literal, TypeVar

from pydantic import BaseModel, ConfigDict, Field, ValidationError

from gateway.generation import Limits
from outrider.errors import InvalidRequestError
from outrider.params import SamplingParams, SpeculationParams
from outrider.rpc.codec import speculation_from_proto
from outrider.v1 import common_pb2

_HARMLESS = frozenset(
    {
        *("user", "metadata", "store", "service_tier", "safety_identifier", "prompt_cache_key"),
        *("prompt_cache_retention", "parallel_tool_calls"),
    }
)
# Parameters of OpenAI's API that are not supported yet, and the values that ask for nothing.
# None asks for nothing anywhere.
_NEUTRAL: dict[str, tuple[Any, ...]] = {
    "n": (1,),
    "best_of": (1,),
    "echo": (False,),
    "suffix": ("",),
    "logprobs": (False,),
    "top_logprobs": (0,),
    "logit_bias": ({},),
    "frequency_penalty": (0,),
    "presence_penalty": (0,),
    "tools": ([],),
    "tool_choice": ("none", "auto"),
    "functions": ([],),
    "function_call": ("none", "auto"),
    "response_format": ({"type": "text"},),
    "modalities": (["text"],),
    "audio": (),
    "prediction": (),
    "reasoning_effort": (),
    "verbosity": (),
    "web_search_options": (),
}
_UINT32 = Annotated[int, Field(ge=0, lt=2**32)]


class _Model(BaseModel):
    model_config = ConfigDict(strict=True, frozen=True, extra="forbid", allow_inf_nan=False)


class StreamOptions(_Model):
    include_usage: bool | None = None
    include_obfuscation: bool | None = None  # padding against traffic analysis: ours has none


class Speculation(_Model):
    """Per-request control of speculative decoding. It changes speed, never text."""

    enabled: bool = True
    method: str | None = None
    num_speculative_tokens: _UINT32 | None = None


class _Request(_Model):
    model_config = ConfigDict(strict=True, frozen=True, extra="allow", allow_inf_nan=False)

    model: str | None = None
    stream: bool | None = None
    stream_options: StreamOptions | None = None
    max_tokens: int | None = None
    temperature: float | None = None
    top_p: float | None = None
    seed: int | None = None
    stop: str | list[str] | None = None
    # Beyond OpenAI's, under vLLM's names:
    top_k: int | None = None
    min_p: float | None = None
    stop_token_ids: list[_UINT32] | None = None
    ignore_eos: bool = False
    min_tokens: int = 0
    # Outrider's own:
    speculation: Speculation | None = None
    aux_info: bool = False

    def wanted_max_tokens(self) -> int | None:
        return self.max_tokens

    def sampling(self, default_seed: int) -> SamplingParams:
        """Raises `InvalidRequestError` for a value out of range."""
        default = SamplingParams()
        top_k = default.top_k if self.top_k in (None, -1) else self.top_k  # -1: off, as in vLLM
        assert top_k is not None
        return SamplingParams(
            temperature=default.temperature if self.temperature is None else self.temperature,
            top_k=top_k,
            top_p=default.top_p if self.top_p is None else self.top_p,
            min_p=default.min_p if self.min_p is None else self.min_p,
            # OpenAI's seeds are signed; ours are the same 64 bits without a sign.
            seed=default_seed if self.seed is None else _unsigned(self.seed),
        )

    def limits(self) -> Limits:
        max_tokens = self.wanted_max_tokens()
        if max_tokens is not None and max_tokens < 1:
            raise InvalidRequestError("max_tokens must be at least 1.", param="max_tokens")
        stop = [self.stop] if isinstance(self.stop, str) else self.stop
        return Limits(
            max_tokens=max_tokens,
            stop_token_ids=frozenset(self.stop_token_ids or ()),
            ignore_eos=self.ignore_eos,
            min_tokens=self.min_tokens,
            stop_strings=tuple(stop or ()),
        )

    def speculation_params(self) -> SpeculationParams:
        """Raises `InvalidRequestError` for an unknown method or a value out of range."""
        asked = self.speculation or Speculation()
        return speculation_from_proto(common_pb2.SpeculationParams(**asked.model_dump()))

    @property
    def include_usage(self) -> bool:
        return bool(self.stream_options and self.stream_options.include_usage)


class CompletionRequest(_Request):
    """POST /v1/completions."""

    prompt: str | list[str] | list[_UINT32] | list[list[_UINT32]]

    def prompts(self) -> list[str | list[int]]:
        """One entry per completion wanted."""
        if isinstance(self.prompt, str):
            return [self.prompt]
        texts = [item for item in self.prompt if isinstance(item, str)]
        token_lists = [item for item in self.prompt if isinstance(item, list)]
        token_ids = [item for item in self.prompt if isinstance(item, int)]
        return [token_ids] if token_ids else [*texts, *token_lists]


class TextPart(_Model):
    type: Literal["text"]
    text: str


class ChatMessage(_Model):
    """A turn of the conversation. What an assistant's answer carries besides must be empty."""

    role: Literal["system", "developer", "user", "assistant"]
    content: str | list[TextPart] | None = None
    name: str | None = None
    refusal: None = None
    audio: None = None
    function_call: None = None
    tool_calls: Annotated[list[Any], Field(max_length=0)] | None = None
    annotations: Annotated[list[Any], Field(max_length=0)] | None = None

    def for_template(self) -> dict[str, str]:
        """Role and text, as chat templates know them."""
        role = "system" if self.role == "developer" else self.role
        content = self.content or ""
        if not isinstance(content, str):
            content = "".join(part.text for part in content)
        return {"role": role, "content": content}


class ChatRequest(_Request):
    """POST /v1/chat/completions."""

    messages: Annotated[list[ChatMessage], Field(min_length=1)]
    max_completion_tokens: int | None = None

    def wanted_max_tokens(self) -> int | None:
        return self.max_tokens if self.max_completion_tokens is None else self.max_completion_tokens


R = TypeVar("R", bound=_Request)


def parse(kind: type[R], body: bytes) -> R:
    """The request in `body`. Raises `InvalidRequestError` that names the parameter at fault."""
    try:
        request = kind.model_validate_json(body)
    except ValidationError as error:
        raise _invalid(error) from error
    for name, value in (request.model_extra or {}).items():
        if name in _HARMLESS or value is None:
            continue
        if name not in _NEUTRAL:
            raise InvalidRequestError(f"Unrecognized request argument: {name}.", param=name)
        if not any(value == neutral for neutral in _NEUTRAL[name]):
            raise InvalidRequestError(f"{name} is not supported yet.", param=name)
    if request.stream_options is not None and not request.stream:
        raise InvalidRequestError(
            "stream_options goes only with stream: true.", param="stream_options"
        )
    return request


_ALLOWED = {
    "prompt": "a string, a list of strings, a list of token ids or a list of such lists",
    "stop": "a string or a list of strings",
}


def _invalid(error: ValidationError) -> InvalidRequestError:
    first = error.errors(include_url=False, include_input=False, include_context=False)[0]
    where = [str(part) for part in first["loc"]]
    if first["type"] == "json_invalid" or not where:
        return InvalidRequestError(f"The body is not a valid JSON object: {first['msg']}.")
    if first["type"] == "missing":
        param = ".".join(where)
        return InvalidRequestError(f"{param} is missing.", param=param)
    if where[0] in _ALLOWED:
        return InvalidRequestError(f"{where[0]} must be {_ALLOWED[where[0]]}.", param=where[0])
    param = ".".join(where)
    return InvalidRequestError(f"{param}: {first['msg']}.", param=param)


def _unsigned(seed: int) -> int:
    if not -(2**63) <= seed < 2**64:
        raise InvalidRequestError("seed must be a 64-bit number.", param="seed")
    return seed % 2**64
