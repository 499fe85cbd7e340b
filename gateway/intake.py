"""From what a client asks for to a request that a scorer will take."""

from __future__ import annotations

import asyncio
import secrets
import uuid
from array import array
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, fields, replace
from typing import Protocol

from gateway.config import GeneratorConfig
from gateway.fill_in_middle import encode_infill
from outrider.errors import InvalidRequestError, ModelNotFoundError, PromptTooLongError, shortened
from outrider.models.chat_template import Conversation
from outrider.models.tokenizer import Tokenizer
from outrider.params import (
    MAX_ADVICE_TOKENS,
    MAX_REFERENCES,
    MAX_TOP_LOGPROBS,
    Advice,
    Constraint,
    SamplingParams,
    SpeculationParams,
    StopParams,
    TokenIds,
    require,
)

MAX_REQUEST_ID_CHARS = 128
_ADAPTERS = (
    "A LoRA adapter is a model of its own name where vLLM serves it: outrider serve MODEL --engine "
    "vllm -- --enable-lora --lora-modules NAME=PATH."
)
MAX_STOP_STRINGS = 16
MAX_STOP_STRING_CHARS = 1024

_STOP_STRING_INTERVAL = 8
"""Tokens at a time at most where a stop string may end the text: more would be computed in vain."""
_FIRST_PAGE = 16  # tokens that a scorer's prefix cache keeps together
_CHOICE_STEP = 0x9E3779B97F4A7C15  # 2^64 / golden ratio: neighbouring seeds' choices stay apart


class ModelLimits(Protocol):
    """Tells what requests to one model must keep to."""

    @property
    def max_model_len(self) -> int:
        """Return the tokens that a request can reach on every scorer known so far."""

    @property
    def vocab_size(self) -> int: ...

    @property
    def adapters(self) -> Sequence[str]:
        """Return the adapters that every scorer known so far has."""


@dataclass(frozen=True, slots=True)
class Limits:
    """A client's wishes about length and stopping; None: the gateway's default."""

    max_tokens: int | None = None
    stop_token_ids: frozenset[int] = frozenset()
    ignore_eos: bool = False
    min_tokens: int = 0
    stop_strings: tuple[str, ...] = ()
    stop_strings_param: str = "stop"  # the client's name of them
    ends_at_context: bool = False  # more tokens than the context holds are as many as it holds


@dataclass(frozen=True, slots=True)
class ThinkingBudget:
    """A bound on the reasoning at the begin of an answer."""

    max_tokens: int
    end: TokenIds
    """What ends reasoning that goes on after so many tokens."""
    goes_on: Callable[[bytes], bool]
    """Tells whether such a text is reasoning that has not ended."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Settings:
    """Settings of a request besides its prompt and limits."""

    operation: str  # gen_ai.operation.name
    sampling: SamplingParams
    speculation: SpeculationParams
    request_id: str = ""
    constraint: Constraint | None = None
    top_logprobs: int | None = None  # None: no logprobs
    prompt_logprobs: int | None = None  # the same for the prompt
    tenant: str = ""
    marks: tuple[str, ...] = ()  # special tokens that are part of the text
    thinking: ThinkingBudget | None = None
    stream_interval: int = 0  # tokens wanted at a time, but for the first; 0: each round's
    adapter: str = ""  # of the model; empty: none
    draft_trees: bool = False  # each round's draft with its tokens
    affinity: bytes = b""  # of requests that a scorer's prefix cache may serve together


@dataclass(frozen=True, slots=True, kw_only=True)
class GenerationRequest(Settings):
    """One completion, checked: every limit resolved, the seed drawn."""

    prompt_token_ids: TokenIds
    stop: StopParams
    stop_strings: tuple[str, ...]
    num_resumed: int = 0  # tokens at the prompt's end that are output already

    @property
    def interval(self) -> int:
        """Return how many tokens to ask a scorer for at a time, after the first."""
        most = _STOP_STRING_INTERVAL if self.stop_strings else self.stream_interval
        return min(self.stream_interval, most)

    def choice(self, index: int, request_id: str) -> GenerationRequest:
        """Return this request for choice `index` of several, with a seed of its own.

        Choice 0 has the request's seed, so that asking for more choices does not change it.
        """
        seed = (self.sampling.seed + index * _CHOICE_STEP) % 2**64
        return replace(
            self,
            request_id=request_id,
            sampling=replace(self.sampling, seed=seed),
            prompt_logprobs=None if index else self.prompt_logprobs,  # choice 0's are all choices'
        )


class Intake:
    """Checks and tokenises what clients send."""

    def __init__(self, config: GeneratorConfig, tokenizer: Tokenizer, limits: ModelLimits) -> None:
        self._config = config
        self._tokenizer = tokenizer
        self._limits = limits

    def check_model(self, name: str | None) -> str:
        """Return the name that answers carry; no name, or "default", is the first one served.

        Raises `ModelNotFoundError`.
        """
        names = (*self._config.model_names, *self._limits.adapters)
        if name in names:
            return str(name)
        if name not in (None, "", "default"):
            if not self._limits.max_model_len:  # nobody has told which adapters there are
                return str(name)
            raise ModelNotFoundError(
                f"The model {shortened(name, 64)!r} is not served here; "
                f"{' and '.join(map(repr, names))} "
                f"{'is' if len(names) == 1 else 'are'}. {_ADAPTERS}"
            )
        return names[0]

    def adapter_of(self, model: str) -> str:
        """Return the adapter that a served name stands for; empty: the model itself."""
        own = model in self._config.model_names
        return "" if own or model not in self._limits.adapters else model

    def default_seed(self) -> int:
        """Return a seed for a request without one; 63 bits, so that any client can send it back."""
        return secrets.randbits(63) if self._config.seed is None else self._config.seed

    async def encode(self, text: str, param: str) -> list[int]:
        """Encode a prompt in a thread, because a long one would block the event loop.

        Raises `InvalidRequestError` for an empty text, even where BOS alone would do.
        """
        if not text:
            raise InvalidRequestError(f"{param} must not be empty.", param=param)
        self._check_chars(len(text), param)
        return await asyncio.to_thread(self._tokenizer.encode, text, param=param)

    async def encode_plain(
        self, text: str, param: str, *, add_special_tokens: bool = False
    ) -> TokenIds:
        """Token ids of a text that may be empty. Raises `InvalidRequestError`."""
        self._check_chars(len(text), param)
        return tuple(
            await asyncio.to_thread(
                self._tokenizer.encode, text, param=param, add_special_tokens=add_special_tokens
            )
        )

    async def encode_infill(
        self, prefix: str, suffix: str, param: str
    ) -> tuple[list[int], frozenset[int]]:
        """Return the prompt for what stands between two texts, and the tokens that end it.

        Raises `InvalidRequestError`.
        """
        self._check_chars(len(prefix) + len(suffix), param)
        return await asyncio.to_thread(encode_infill, self._tokenizer, prefix, suffix, param)

    async def encode_chat(self, conversation: Conversation, param: str) -> tuple[list[int], str]:
        """Render and encode a conversation; return its tokens and its text.

        Raises `InvalidRequestError`.
        """
        if not conversation.messages:
            raise InvalidRequestError(f"{param} must not be empty.", param=param)
        parts = (conversation.messages, conversation.tools, conversation.variables)
        self._check_chars(sum(map(_chars, parts)), param)
        return await asyncio.to_thread(self._tokenizer.encode_chat, conversation)

    def _check_chars(self, chars: int, param: str) -> None:
        """Refuse, without the work of encoding it, a text that cannot fit."""
        # Normalisation may shorten a text, threefold at the worst (NFC): well within the 4.
        if chars > 4 * self._limits.max_model_len * self._tokenizer.max_token_chars:
            raise PromptTooLongError(
                f"{self._context()}; {param} has {chars} characters.",
                param=param,
            )

    def prepare(
        self, prompt_token_ids: Sequence[int], param: str, limits: Limits, settings: Settings
    ) -> GenerationRequest:
        """Return a request that a scorer will take; `param` is the client's name of the prompt.

        Raises `InvalidRequestError`, or `PromptTooLongError` if prompt and max_tokens exceed the
        context.
        """
        if not prompt_token_ids:
            raise InvalidRequestError(f"{param} must not be empty.", param=param)
        self.check_tokens(prompt_token_ids, param)
        self.check_tokens([token for token, _ in settings.sampling.logit_bias], "logit_bias")
        _check_stop_strings(limits.stop_strings, limits.stop_strings_param)
        request_id, top_logprobs = settings.request_id, settings.top_logprobs
        require(  # logs, traces and every message of the answer hold it
            len(request_id) <= MAX_REQUEST_ID_CHARS and request_id.isprintable(),
            "request_id",
            f"at most {MAX_REQUEST_ID_CHARS} printable characters",
        )
        if top_logprobs is not None:
            require(
                0 <= top_logprobs <= MAX_TOP_LOGPROBS,
                "top_logprobs",
                f"between 0 and {MAX_TOP_LOGPROBS}",
            )
        if settings.prompt_logprobs is not None:
            budget = settings.thinking and settings.thinking.max_tokens
            require(budget != 0, "prompt_logprobs", "left out beside a thinking_token_budget of 0")
        given = {field.name: getattr(settings, field.name) for field in fields(Settings)}
        return GenerationRequest(
            **given
            | {
                "request_id": request_id or uuid.uuid4().hex,
                "affinity": settings.affinity
                or array("I", prompt_token_ids[:_FIRST_PAGE]).tobytes(),
            },
            prompt_token_ids=tuple(prompt_token_ids),
            stop=StopParams(
                max_tokens=self._max_tokens(len(prompt_token_ids), limits, param),
                stop_token_ids=limits.stop_token_ids,
                ignore_eos=limits.ignore_eos,
                min_tokens=limits.min_tokens,
            ),
            stop_strings=limits.stop_strings,
        )

    def _max_tokens(self, prompt_len: int, limits: Limits, param: str) -> int:
        room = self._limits.max_model_len - prompt_len
        wanted = limits.max_tokens
        if wanted is not None and (limits.ends_at_context or self._config.ends_at_context):
            wanted = min(wanted, max(room, 1))
        if room < 1 or (wanted is not None and wanted > room):
            asked = "" if wanted is None else f" and {wanted} tokens of output were asked for"
            raise PromptTooLongError(
                f"{self._context()}; the prompt has {prompt_len}{asked}. Shorten the prompt or ask "
                "for fewer tokens.",
                param=param,
            )
        if wanted is not None:
            return wanted
        default = self._config.default_max_tokens
        return room if default is None else max(min(default, room), min(limits.min_tokens, room))

    def _context(self) -> str:
        """Begin an error's text; clients find an overflow by these words."""
        return f"This model's maximum context length is {self._limits.max_model_len} tokens"

    def check_tokens(self, token_ids: Sequence[int], param: str) -> None:
        """Raise `InvalidRequestError` for an id outside the vocabulary."""
        vocab_size = self._limits.vocab_size
        if token_ids and not 0 <= min(token_ids) <= max(token_ids) < vocab_size:
            raise InvalidRequestError(
                f"{param} holds a token id outside the vocabulary (0 to {vocab_size - 1}).",
                param=param,
            )

    def check_advice(self, advice: Advice, expected: str, references: str) -> None:
        """Advice goes to proposers as it is: a token that does not exist must not get there.

        `expected` and `references` are the parameters' names. Raises `InvalidRequestError`.
        """
        self.check_tokens(advice.token_ids, expected)
        for reference in advice.references:
            self.check_tokens(reference, references)
        require(len(advice.references) <= MAX_REFERENCES, references, f"at most {MAX_REFERENCES}")
        require(
            len(advice.token_ids) + sum(map(len, advice.references)) <= MAX_ADVICE_TOKENS,
            references if advice.references else expected,
            f"at most {MAX_ADVICE_TOKENS} tokens long in total",
        )


def _check_stop_strings(stop_strings: tuple[str, ...], param: str) -> None:
    require(len(stop_strings) <= MAX_STOP_STRINGS, param, f"at most {MAX_STOP_STRINGS} strings")
    require(all(stop_strings), param, "strings of at least one character")
    require(
        max(map(len, stop_strings), default=0) <= MAX_STOP_STRING_CHARS,
        param,
        f"strings of at most {MAX_STOP_STRING_CHARS} characters",
    )


def _chars(value: object) -> int:
    """Count the characters of all texts in a value of JSON's kinds, but for names of members."""
    if isinstance(value, str):
        return len(value)
    if isinstance(value, Mapping):
        return sum(map(_chars, value.values()))
    return sum(map(_chars, value)) if isinstance(value, list | tuple) else 0
