"""Request bodies of the OpenAI API, with Outrider's additions.

A parameter that would change the answer is supported or refused by name, never ignored.
"""

from __future__ import annotations

from abc import abstractmethod
from typing import Annotated, Any, ClassVar, Literal, cast

from pydantic import BaseModel, ConfigDict, Field, ValidationInfo, field_validator

from gateway.answers.tools import Choice, Tool, Tools
from gateway.chat import Chat, template_variables
from gateway.intake import Limits
from gateway.openai.request_objects import (
    HARMLESS_IN_MESSAGES,
    UINT32,
    Biases,
    ExtraConfig,
    Items,
    Kind,
    Prediction,
    ResponseFormat,
    Speculation,
    StreamOptions,
    Strict,
    StructuredOutputs,
    TextPart,
    join,
)
from gateway.openai.tools import ToolCall, ToolChoice, ToolObject
from outrider.errors import InvalidRequestError
from outrider.models.chat_template import Conversation
from outrider.params import MAX_TOP_LOGPROBS, Constraint, SamplingParams, SpeculationParams, require

MAX_CHOICES = 128
_SAMPLING = (
    *("temperature", "top_k", "top_p", "min_p"),
    *("presence_penalty", "frequency_penalty", "repetition_penalty"),
)


class Request(BaseModel):
    """Fields that both kinds of request share."""

    model_config = ConfigDict(strict=True, frozen=True, extra="allow", allow_inf_nan=False)
    operation: ClassVar[Kind]
    prompt_param: ClassVar[str]
    id_prefix: ClassVar[str]

    model: str | None = None
    stream: bool | None = None
    stream_options: StreamOptions | None = None
    n: int | None = None
    max_tokens: int | None = None
    temperature: float | None = None
    top_p: float | None = None
    presence_penalty: float | None = None
    frequency_penalty: float | None = None
    logit_bias: Biases | None = None
    seed: int | None = None
    stop: str | Items[str] | None = None
    response_format: ResponseFormat | None = None
    prediction: Prediction | None = None
    prompt_cache_key: str | None = None
    # Beyond OpenAI's, under vLLM's names:
    top_k: int | None = None
    min_p: float | None = None
    repetition_penalty: float | None = None
    stop_token_ids: Items[UINT32] | None = None
    ignore_eos: bool | None = None
    min_tokens: int | None = None
    structured_outputs: StructuredOutputs | None = None
    prompt_logprobs: int | None = None
    # Under RTP-LLM's:
    extra_config: ExtraConfig | None = None
    aux_info: bool | None = None
    # Outrider's own:
    speculation: Speculation | None = None
    token_kinds: bool | None = None
    draft_trees: bool | None = None

    def wanted_max_tokens(self) -> tuple[int | None, str]:
        """Return how many tokens to generate at most, and the parameter that says so."""
        return self.max_tokens, "max_tokens"

    @abstractmethod
    def wanted_logprobs(self) -> int | None:
        """Return how many of the likeliest tokens to tell with each token; None: no logprobs.

        Raises `InvalidRequestError`.
        """

    def wanted_prompt_logprobs(self) -> int | None:
        """Return the same for the tokens of the prompt.

        Raises `InvalidRequestError`.
        """
        if self.prompt_logprobs is not None:
            allowed = f"between 0 and {MAX_TOP_LOGPROBS}"
            require(0 <= self.prompt_logprobs <= MAX_TOP_LOGPROBS, "prompt_logprobs", allowed)
        return self.prompt_logprobs

    @property
    def scores_only(self) -> bool:
        """True if nothing is to be generated."""
        return self.wanted_max_tokens()[0] == 0

    def num_choices(self) -> tuple[int, int]:
        """Return how many choices to tell for each prompt, and to generate.

        Raises `InvalidRequestError`.
        """
        n = 1 if self.n is None else self.n
        require(1 <= n <= MAX_CHOICES, "n", f"between 1 and {MAX_CHOICES}")
        return n, n

    def sampling(self, default_seed: int) -> SamplingParams:
        """Return how to sample. Raises `InvalidRequestError` for a value out of range."""
        given = {name: value for name in _SAMPLING if (value := getattr(self, name)) is not None}
        if self.top_k == -1:  # off, as in vLLM
            given["top_k"] = 0
        return SamplingParams(
            **given,
            # OpenAI's seeds are signed; ours are the same 64 bits without a sign.
            seed=default_seed if self.seed is None else _unsigned(self.seed),
            logit_bias=tuple(
                (_token_id(key), bias) for key, bias in (self.logit_bias or {}).items()
            ),
        )

    def limits(self) -> Limits:
        max_tokens, param = self.wanted_max_tokens()
        require(
            max_tokens is None or max_tokens >= (self.wanted_prompt_logprobs() is None),
            param,
            "at least 1, or 0 with the prompt's logprobs",
        )
        stop = [self.stop] if isinstance(self.stop, str) else self.stop
        return Limits(
            max_tokens=max_tokens if max_tokens is None else max(1, max_tokens),
            stop_token_ids=frozenset(self.stop_token_ids or ()),
            ignore_eos=bool(self.ignore_eos),
            min_tokens=self.min_tokens or 0,
            stop_strings=tuple(stop or ()),
        )

    def speculation_params(self) -> SpeculationParams:
        """Return the settings without advice, which is not tokenised yet.

        Raises `InvalidRequestError` for an unknown method or a value out of range.
        """
        return SpeculationParams() if self.speculation is None else self.speculation.params()

    def constraint(self) -> tuple[Constraint | None, str]:
        """Return what the output must look like, and the name of the parameter that says so.

        Raises `InvalidRequestError`.
        """
        asked = None if self.response_format is None else self.response_format.constraint()
        if self.structured_outputs is None:
            return asked or (None, "")
        if asked is not None:
            raise InvalidRequestError(
                "Give response_format or structured_outputs, not both.", param="structured_outputs"
            )
        return self.structured_outputs.constraint()

    @property
    def include_usage(self) -> bool:
        return bool(self.stream_options and self.stream_options.include_usage)

    @property
    def continuous_usage(self) -> bool:
        """True if every event tells the usage so far; it takes `include_usage`."""
        options = self.stream_options
        return bool(options and options.include_usage and options.continuous_usage_stats)


class CompletionRequest(Request):
    """POST /v1/completions."""

    operation = "text_completion"
    prompt_param = "prompt"
    id_prefix = "cmpl"

    prompt: str | Items[str] | Items[UINT32] | Items[Items[UINT32]]
    best_of: int | None = None
    echo: bool | None = None
    logprobs: int | None = None
    suffix: str | None = None

    def prompts(self) -> list[str | list[int]]:
        """Return the prompts, as texts or tokens. Raises `InvalidRequestError` for none."""
        prompt = self.prompt
        if isinstance(prompt, str):
            return [prompt]
        if not prompt:
            raise InvalidRequestError("prompt must not be empty.", param="prompt")
        # All items are of one kind.
        return cast(list[str | list[int]], [prompt] if isinstance(prompt[0], int) else [*prompt])

    def wanted_logprobs(self) -> int | None:
        if self.logprobs is not None:
            allowed = f"between 0 and {MAX_TOP_LOGPROBS}"
            require(0 <= self.logprobs <= MAX_TOP_LOGPROBS, "logprobs", allowed)
        return self.logprobs

    def wanted_prompt_logprobs(self) -> int | None:
        asked = super().wanted_prompt_logprobs()
        echoed = self.wanted_logprobs() if self.echo else None
        most = max((each for each in (asked, echoed) if each is not None), default=None)
        told = self.suffix and most is not None
        require(not told, "suffix", "left out where the prompt's logprobs are asked for")
        return most

    def num_choices(self) -> tuple[int, int]:
        n, _ = super().num_choices()
        best_of = n if self.best_of is None else self.best_of
        require(n <= best_of <= MAX_CHOICES, "best_of", f"between n and {MAX_CHOICES}")
        if best_of > n and self.stream:
            raise InvalidRequestError(
                "best_of does not go with stream: the best is known at the end.", param="best_of"
            )
        return n, best_of


class ChatMessage(Strict):
    """A turn of the conversation. What an assistant's answer carries besides must be empty."""

    harmless = HARMLESS_IN_MESSAGES

    role: Literal["system", "developer", "user", "assistant", "tool"]
    content: Annotated[str | Items[TextPart] | None, Field(validate_default=True)] = None
    name: str | None = None
    refusal: None = None
    audio: None = None
    function_call: None = None
    tool_calls: Items[ToolCall] | None = None
    tool_call_id: str | None = None
    reasoning_content: str | None = None
    reasoning: str | None = None  # the same, as vLLM names it
    parsed: Any = None  # openai-python's reading of the content
    annotations: Annotated[list[Any], Field(max_length=0)] | None = None

    @field_validator("content")
    @classmethod
    def _said_by_all_but_the_assistant(cls, value: Any, info: ValidationInfo) -> Any:
        if value is None and info.data.get("role") != "assistant":
            raise ValueError("must be given")
        return value

    def for_template(self) -> dict[str, Any]:
        """Return the turn as chat templates know it. Without content, a call has None."""
        role = "system" if self.role == "developer" else self.role
        message: dict[str, Any] = {"role": role, "content": join(self.content or "")}
        if self.tool_calls:
            message["tool_calls"] = [call.for_template() for call in self.tool_calls]
            message["content"] = message["content"] or None
        optional = {
            "name": self.name,
            "tool_call_id": self.tool_call_id,
            "reasoning_content": self.reasoning_content or self.reasoning,
        }
        return message | {name: value for name, value in optional.items() if value is not None}


class ChatRequest(Request):
    """POST /v1/chat/completions."""

    operation = "chat"
    prompt_param = "messages"
    id_prefix = "chatcmpl"

    messages: Annotated[Items[ChatMessage], Field(min_length=1)]
    max_completion_tokens: int | None = None
    logprobs: bool | None = None
    top_logprobs: int | None = None
    tools: Items[ToolObject] | None = None
    tool_choice: Literal["none", "auto", "required"] | ToolChoice | None = None
    parallel_tool_calls: bool | None = None
    reasoning_effort: Literal["none", "minimal", "low", "medium", "high", "xhigh", "max"] | None = (
        None
    )
    # Under vLLM's names:
    chat_template_kwargs: dict[str, Any] | None = None
    thinking_token_budget: int | None = None
    include_reasoning: bool | None = None

    def offered(self) -> Tools:
        """Return the tools that the model may call. Raises `InvalidRequestError`."""
        tools = {
            tool.function.name: Tool(
                tool.function.name, tool.function.parameters or {}, bool(tool.function.strict)
            )
            for tool in self.tools or ()
        }
        require(len(tools) == len(self.tools or ()), "tools", "functions of different names")
        return {} if self.tool_choice == "none" else tools

    def choice(self) -> Choice:
        """Return which of the tools must be called. Raises `InvalidRequestError`."""
        tools, chosen = self.offered(), self.tool_choice
        names: tuple[str, ...] = ()
        if isinstance(chosen, ToolChoice):
            names = (chosen.function.name,)
            require(names[0] in tools, "tool_choice", "the name of a function among tools")
        elif chosen == "required":
            names = tuple(tools)
            require(bool(tools), "tool_choice", "none or auto where there are no tools")
        one = self.parallel_tool_calls is False or isinstance(chosen, ToolChoice)
        return Choice(tools, names, one=one)

    def chat(self) -> Chat:
        """Return what is asked for. Raises `InvalidRequestError`."""
        choice, constraint = self.choice(), self.constraint()
        if choice.forced and self.structured_outputs is None:
            constraint = None, ""  # response_format is about text, and a call has none
        return Chat(*(self.conversation(), choice, *constraint), self.thinking_token_budget)

    def conversation(self) -> Conversation:
        """Return what the chat template is given. Raises `InvalidRequestError`."""
        variables = template_variables(
            self.chat_template_kwargs or {}, self.reasoning_effort, "chat_template_kwargs"
        )
        return Conversation(
            [message.for_template() for message in self.messages],
            [tool.for_template() for tool in self.tools or ()] if self.offered() else (),
            variables,
        )

    def wanted_max_tokens(self) -> tuple[int | None, str]:
        if self.max_completion_tokens is not None:
            return self.max_completion_tokens, "max_completion_tokens"
        return super().wanted_max_tokens()

    def wanted_logprobs(self) -> int | None:
        top = self.top_logprobs or 0
        require(0 <= top <= MAX_TOP_LOGPROBS, "top_logprobs", f"between 0 and {MAX_TOP_LOGPROBS}")
        require(not top or bool(self.logprobs), "top_logprobs", "0 unless logprobs is true")
        return top if self.logprobs else None


def _unsigned(seed: int) -> int:
    if not -(2**63) <= seed < 2**64:
        raise InvalidRequestError("seed must be a 64-bit number.", param="seed")
    return seed % 2**64


def _token_id(key: str) -> int:
    if not (key.isascii() and key.isdigit() and len(key) <= 10):
        raise InvalidRequestError(
            "logit_bias must map token ids, as strings, to biases.", param="logit_bias"
        )
    return int(key)
