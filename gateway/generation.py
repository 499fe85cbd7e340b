"""The core that both faces share: a checked request in, a stream of text chunks out."""

from __future__ import annotations

import asyncio
import secrets
import time
import uuid
from collections.abc import AsyncGenerator, Sequence
from contextlib import aclosing
from dataclasses import dataclass

from opentelemetry.trace import Span

from gateway.account import Account
from gateway.admission import Admission
from gateway.config import GatewayConfig
from gateway.metrics import GatewayMetrics
from gateway.output import OutputAssembler, OutputToken
from gateway.replay import Replayer, ScorerRequest
from gateway.scorers import ScorerPool
from outrider.errors import (
    InvalidRequestError,
    ModelNotFoundError,
    PromptTooLongError,
)
from outrider.models.chat_template import Message
from outrider.models.tokenizer import Tokenizer
from outrider.params import Constraint, SamplingParams, SpeculationParams, StopParams, TokenIds
from outrider.rpc.latency import RequestTimes
from outrider.rpc.telemetry import Metadata, Telemetry
from outrider.types import FinishReason
from outrider.v1 import common_pb2

MAX_STOP_STRINGS = 16


@dataclass(frozen=True, slots=True)
class Limits:
    """What a client says about length and stopping; None: the gateway's default."""

    max_tokens: int | None = None
    stop_token_ids: frozenset[int] = frozenset()
    ignore_eos: bool = False
    min_tokens: int = 0
    stop_strings: tuple[str, ...] = ()


@dataclass(frozen=True, slots=True)
class GenerationRequest:
    """One completion, checked: every limit resolved, the seed drawn."""

    request_id: str
    operation: str  # gen_ai.operation.name
    prompt_token_ids: TokenIds
    sampling: SamplingParams
    stop: StopParams
    stop_strings: tuple[str, ...]
    speculation: SpeculationParams
    constraint: Constraint | None = None
    top_logprobs: int | None = None  # None: no logprobs
    tenant: str = ""


@dataclass(frozen=True, slots=True)
class Ending:
    """What comes with a completion's last chunk."""

    reason: FinishReason
    usage: common_pb2.Usage
    aux_info: common_pb2.AuxInfo


@dataclass(frozen=True, slots=True)
class Chunk:
    """A piece of a completion. Concatenated texts are the completion."""

    tokens: tuple[OutputToken, ...]
    ending: Ending | None = None

    @property
    def text(self) -> str:
        return "".join(token.text for token in self.tokens)


class Generator:
    """Checks, admits and runs completions."""

    def __init__(
        self,
        config: GatewayConfig,
        tokenizer: Tokenizer,
        pool: ScorerPool,
        telemetry: Telemetry,
    ) -> None:
        self.config = config
        self.tokenizer = tokenizer
        self.pool = pool
        self.telemetry = telemetry
        self._replayer = Replayer(pool, telemetry, config.resume_timeout_s)
        self._metrics = GatewayMetrics(telemetry.registry)
        self._metrics.scorers.set_function(lambda: len(pool.serving))
        self.admission = Admission(config.max_in_flight, self._metrics)

    def check_model(self, name: str | None) -> None:
        """Raises `ModelNotFoundError`; no name is the default model."""
        if name and name != self.config.served_model_name:
            raise ModelNotFoundError(
                f"The model {name!r} is not served here; {self.config.served_model_name!r} is."
            )

    def default_seed(self) -> int:
        """The seed of a request that has none; 63 bits, so that any client can send it back."""
        return secrets.randbits(63) if self.config.seed is None else self.config.seed

    async def encode(self, text: str, param: str) -> list[int]:
        """A prompt's token ids, off the event loop: a long one takes a while.

        Raises `InvalidRequestError` for an empty text, even where BOS alone would do.
        """
        if not text:
            raise InvalidRequestError(f"{param} must not be empty.", param=param)
        self._check_chars(len(text), param)
        return await asyncio.to_thread(self.tokenizer.encode, text, param=param)

    async def encode_chat(self, messages: Sequence[Message], param: str) -> list[int]:
        """A conversation's token ids. Raises `InvalidRequestError`."""
        if not messages:
            raise InvalidRequestError(f"{param} must not be empty.", param=param)
        self._check_chars(sum(len(message["content"]) for message in messages), param)
        return await asyncio.to_thread(self.tokenizer.apply_chat_template, messages)

    def _check_chars(self, chars: int, param: str) -> None:
        """Refuses, without the work of encoding it, a text that cannot fit."""
        # Normalisation may shorten a text, threefold at the worst (NFC): well within the 4.
        if chars > 4 * self.pool.max_model_len * self.tokenizer.max_token_chars:
            raise PromptTooLongError(
                f"This model's context holds {self.pool.max_model_len} tokens; {param} has "
                f"{chars} characters.",
                param=param,
            )

    def prepare(
        self,
        prompt_token_ids: Sequence[int],
        *,
        operation: str,
        param: str,
        sampling: SamplingParams,
        limits: Limits,
        speculation: SpeculationParams,
        request_id: str = "",
        constraint: Constraint | None = None,
        top_logprobs: int | None = None,
        tenant: str = "",
    ) -> GenerationRequest:
        """A request that a scorer will take. `param` is the prompt's name in the client's request.

        Raises `InvalidRequestError`, or `PromptTooLongError` if prompt and max_tokens exceed the
        context.
        """
        if not prompt_token_ids:
            raise InvalidRequestError(f"{param} must not be empty.", param=param)
        vocab_size = self.pool.vocab_size
        if not all(0 <= token_id < vocab_size for token_id in prompt_token_ids):
            raise InvalidRequestError(
                f"{param} holds a token id outside the vocabulary (0 to {vocab_size - 1}).",
                param=param,
            )
        _check_stop_strings(limits.stop_strings)
        return GenerationRequest(
            request_id=request_id or uuid.uuid4().hex,
            operation=operation,
            prompt_token_ids=tuple(prompt_token_ids),
            sampling=sampling,
            stop=StopParams(
                max_tokens=self._max_tokens(len(prompt_token_ids), limits, param),
                stop_token_ids=limits.stop_token_ids,
                ignore_eos=limits.ignore_eos,
                min_tokens=limits.min_tokens,
            ),
            stop_strings=limits.stop_strings,
            speculation=speculation,
            constraint=constraint,
            top_logprobs=top_logprobs,
            tenant=tenant,
        )

    def _max_tokens(self, prompt_len: int, limits: Limits, param: str) -> int:
        room = self.pool.max_model_len - prompt_len
        wanted = limits.max_tokens
        if room < 1 or (wanted is not None and wanted > room):
            asked = "" if wanted is None else f" and {wanted} tokens of output were asked for"
            raise PromptTooLongError(
                f"This model's context holds {self.pool.max_model_len} tokens; the prompt has "
                f"{prompt_len}{asked}. Shorten the prompt or ask for fewer tokens.",
                param=param,
            )
        if wanted is not None:
            return wanted
        return max(min(self.config.default_max_tokens, room), min(limits.min_tokens, room))

    async def generate(
        self, request: GenerationRequest, deadline: float, metadata: Metadata | None = None
    ) -> AsyncGenerator[Chunk, None]:
        """The completion's chunks, the last with its ending. `deadline` is loop time; `metadata`
        may carry the caller's trace context.

        Closing the generator cancels the scorer's RPC. Raises `OutriderError`.
        """
        begun = time.perf_counter()
        first_token: float | None = None
        account = Account()
        output = OutputAssembler(
            self.tokenizer.detokenizer(), request.stop_strings, request.stop.min_tokens
        )
        scorer_request = ScorerRequest(
            request_id=request.request_id,
            prompt_token_ids=request.prompt_token_ids,
            sampling=request.sampling,
            stop=request.stop,
            speculation=request.speculation,
            running_stats=bool(request.stop_strings),
            constraint=request.constraint,
            top_logprobs=request.top_logprobs,
            tenant=request.tenant,
        )
        model = self.config.served_model_name
        with (
            self._metrics.outcome(request.operation),
            self.telemetry.server_span(
                f"{request.operation} {model}", metadata, _span_attributes(request, model)
            ) as span,
        ):
            reason: FinishReason | None = None
            tokens: list[OutputToken] = []
            rounds = self._replayer.stream(scorer_request, account, span, deadline)
            async with aclosing(rounds):
                async for round_ in rounds:
                    if first_token is None and round_.token_ids:
                        first_token = time.perf_counter()
                    tokens = []
                    for token_id, kind in zip(round_.token_ids, round_.kinds, strict=True):
                        tokens += output.push(token_id, kind)
                        if output.stopped:
                            break
                    reason = FinishReason.STOP if output.stopped else round_.finish_reason
                    if reason is not None:
                        break
                    if tokens:
                        yield Chunk(tuple(tokens))
            assert reason is not None, "a stream of rounds ends with a reason or an error"
            tokens += output.finish()
            if output.stopped:
                reason = FinishReason.STOP
            cost_s = time.perf_counter() - begun
            first_s = None if first_token is None else first_token - begun
            ending = _ending(request, reason, output.released, account, cost_s)
            self._record(request, ending, span, cost_s, first_s)
            yield Chunk(tuple(tokens), ending)

    def _record(
        self,
        request: GenerationRequest,
        ending: Ending,
        span: Span,
        cost_s: float,
        time_to_first_token_s: float | None,
    ) -> None:
        usage = ending.usage
        span.set_attributes(
            {
                "gen_ai.response.finish_reasons": (ending.reason.value,),
                "gen_ai.usage.input_tokens": usage.prompt_tokens,
                "gen_ai.usage.output_tokens": usage.completion_tokens,
                "outrider.accepted": ending.aux_info.accepted,
                "outrider.retries": ending.aux_info.retries,
            }
        )
        times = RequestTimes(cost_s, time_to_first_token_s, usage.completion_tokens)
        self.telemetry.latency.record(request.operation, self.config.served_model_name, times, span)
        self._metrics.completed(usage, ending.aux_info)


def _ending(
    request: GenerationRequest,
    reason: FinishReason,
    output_len: int,
    account: Account,
    cost_s: float,
) -> Ending:
    return Ending(
        reason,
        common_pb2.Usage(
            prompt_tokens=len(request.prompt_token_ids),
            completion_tokens=output_len,
            cached_prompt_tokens=account.cached_prompt_tokens,
        ),
        account.close(output_len=output_len, cost_time_ms=cost_s * 1000),
    )


def _check_stop_strings(stop_strings: tuple[str, ...]) -> None:
    if len(stop_strings) > MAX_STOP_STRINGS:
        raise InvalidRequestError(
            f"stop must hold at most {MAX_STOP_STRINGS} strings.", param="stop"
        )
    if not all(stop_strings):
        raise InvalidRequestError("stop must not hold an empty string.", param="stop")


def _span_attributes(request: GenerationRequest, model: str) -> dict[str, str | int | float]:
    return {
        "gen_ai.operation.name": request.operation,
        "gen_ai.provider.name": "outrider",
        "gen_ai.request.model": model,
        "gen_ai.request.temperature": request.sampling.temperature,
        "gen_ai.request.top_p": request.sampling.top_p,
        "gen_ai.request.max_tokens": request.stop.max_tokens,
        "gen_ai.response.id": request.request_id,
    }
