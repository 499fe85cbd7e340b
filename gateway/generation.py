"""The core that both faces share: a checked request in, a stream of text chunks out."""

from __future__ import annotations

import time
from collections.abc import AsyncGenerator, Callable, Iterator, Sequence
from contextlib import aclosing
from dataclasses import dataclass, replace
from typing import NamedTuple

from opentelemetry.trace import Span

from gateway.account import Account
from gateway.admission import Admission
from gateway.answers.formats import answer_format
from gateway.config import GeneratorConfig
from gateway.intake import GenerationRequest, Intake, ModelLimits
from gateway.metrics import GatewayMetrics
from gateway.output import OutputAssembler, OutputToken
from gateway.resume import Resumer
from gateway.routing.rounds import Round, TakeRound
from gateway.routing.scorers import ScorerPool
from gateway.thinking_budget import within_budget
from gateway.workers.shared import SharedCounts
from outrider.errors import InternalError, InvalidRequestError
from outrider.models.tokenizer import Tokenizer
from outrider.rpc.latency import RequestTimes
from outrider.rpc.telemetry import Metadata, Telemetry
from outrider.types import FinishReason, PromptLogprobs, TokenLogprobs, VerifiedDraft
from outrider.v1 import common_pb2


@dataclass(frozen=True, slots=True)
class Ending:
    """The facts that come with a completion's last chunk."""

    reason: FinishReason
    stop: str | int | None
    """The stop string, or else the stop token, that ended it."""
    usage: common_pb2.Usage
    aux_info: common_pb2.AuxInfo
    prompt_logprobs: tuple[TokenLogprobs, ...] | None = None
    """Those of the prompt's tokens but the first, if the request asks."""

    def of_prompt(self) -> Ending:
        """Return the ending of a completion whose one token is left out: it scored its prompt."""
        usage = common_pb2.Usage()
        usage.CopyFrom(self.usage)
        usage.completion_tokens = 0
        return replace(self, usage=usage, reason=FinishReason.LENGTH, stop=None)


class Chunk(NamedTuple):  # one per round: a frozen dataclass takes three times as long
    """A piece of a completion. Concatenated texts are the completion."""

    tokens: tuple[OutputToken, ...]
    ending: Ending | None = None
    drafts: tuple[VerifiedDraft, ...] = ()
    """Drafts that were verified since the last chunk, if the request asks for them. `base_len` is
    the number of output tokens before a draft. A draft may come before its tokens."""

    @property
    def text(self) -> str:
        tokens = self.tokens
        return tokens[0].text if len(tokens) == 1 else "".join([token.text for token in tokens])


@dataclass(frozen=True, slots=True)
class Direct:
    """Sends chunks in the turn of the event loop in which their tokens come.

    So a round needs no turn of the request's task, which costs as much as all else that is done.
    """

    ready: Callable[[], bool]
    """Tells whether nothing is to be waited for before the next chunk."""
    send: Callable[[Chunk], None]


class Writer:
    """Makes the chunks of one completion from its rounds.

    Who gives it rounds keeps its `account`, and calls `end` after the account's last segment.
    """

    def __init__(self, request: GenerationRequest, tokenizer: Tokenizer) -> None:
        self.account = Account(request.speculation.verification.rule)
        self._request = request
        spelled = tuple(filter(tokenizer.names_special, request.stop_strings))
        self._output = OutputAssembler(
            tokenizer.detokenizer(),
            tuple(stop for stop in request.stop_strings if stop not in spelled),
            request.stop.min_tokens,
            spelled_stops=spelled,
            spell_special=tokenizer.spell_special,
            shown=tokenizer.special_ids(request.marks) if request.marks else {},
        )
        self._began = time.perf_counter()
        self._first_token: float | None = None
        self._cost_s = 0.0
        self._reason: FinishReason | None = None
        self._stop_token_id: int | None = None
        self._tokens: list[OutputToken] = []  # not in a chunk yet, nor are the drafts
        self._drafts: list[VerifiedDraft] = []
        self._prompt: PromptLogprobs | None = None

    @property
    def ended(self) -> bool:
        """Return whether no round may follow."""
        return self._reason is not None

    def add(self, round_: Round) -> Chunk | None:
        """Return what has become certain, if anything; after the last round `end` returns it.

        Raises `InternalError` if requested logprobs are missing.
        """
        request, output = self._request, self._output
        if self._first_token is None and round_.token_ids:
            self._first_token = time.perf_counter()
        self._prompt = round_.prompt_logprobs or self._prompt
        self._tokens = output.push(round_.token_ids, round_.kinds, _logprobs(request, round_))
        if round_.drafts:
            self._drafts += _drafts(request, round_)
        self._reason = FinishReason.STOP if output.stopped else round_.finish_reason
        self._stop_token_id = round_.stop_token_id
        if self._reason is not None or not self._tokens:
            return None
        drafts, self._drafts = tuple(self._drafts), []
        return Chunk(tuple(self._tokens), None, drafts)

    def end(self) -> Chunk:
        """Return the last chunk. Raises `InternalError` if requested logprobs are missing."""
        request, output, reason = self._request, self._output, self._reason
        assert reason is not None, "a stream of rounds ends with a reason or an error"
        self._tokens += output.finish()
        if output.stopped:
            reason = FinishReason.STOP
        stop = output.stop_string if output.stopped else self._stop_token_id
        self._cost_s = time.perf_counter() - self._began
        usage = common_pb2.Usage(
            prompt_tokens=len(request.prompt_token_ids),
            completion_tokens=output.released,
            cached_prompt_tokens=self.account.cached_prompt_tokens,
        )
        cost_time_ms = self._cost_s * 1000
        aux_info = self.account.close(output_len=output.released, cost_time_ms=cost_time_ms)
        prompt = None
        if request.prompt_logprobs is not None:
            if self._prompt is None:
                raise InternalError("The scorer did not send the prompt's logprobs.")
            prompt = self._prompt.tokens()
        ending = Ending(reason, stop, usage, aux_info, prompt)
        return Chunk(tuple(self._tokens), ending, tuple(self._drafts))

    def times(self) -> RequestTimes:
        """Return how long the completion took, once it has ended."""
        first = self._first_token
        first_s = None if first is None else first - self._began
        return RequestTimes(self._cost_s, first_s, self._output.released)


class RequestMaker:
    """Makes requests of what clients send; `intake` checks them."""

    def __init__(self, config: GeneratorConfig, tokenizer: Tokenizer, limits: ModelLimits) -> None:
        self.config = config
        self.tokenizer = tokenizer
        self.intake = Intake(config, tokenizer, limits)
        self.answers = answer_format(
            tokenizer.chat_template_source, config.tool_call_parser, config.reasoning_parser
        )

    def check_size(self, completions: int, param: str) -> None:
        """Raise `InvalidRequestError` naming `param` for more completions than could ever run."""
        most = self.config.max_in_flight
        if completions > most:
            raise InvalidRequestError(
                f"{param} asks for {completions} completions; at most {most} run at once.",
                param=param,
            )


class Generator(RequestMaker):
    """Admits and runs completions."""

    def __init__(
        self,
        config: GeneratorConfig,
        tokenizer: Tokenizer,
        pool: ScorerPool,
        telemetry: Telemetry,
        shared: SharedCounts | None = None,
    ) -> None:
        """Admit with other workers what is `shared` with them, if there are any."""
        super().__init__(config, tokenizer, pool)
        self.pool = pool
        self.telemetry = telemetry
        self._metrics = GatewayMetrics(telemetry.registry)
        held_s = config.hold_timeout_s
        self._metrics.hold.set(held_s or 0)
        self._hold_timeout_s = config.resume_timeout_s if held_s is None else held_s
        self._resumer = Resumer(
            pool,
            telemetry,
            config.resume_timeout_s,
            self._hold_timeout_s,
            self._metrics.retries.inc,
        )
        self._metrics.scorers.set_function(lambda: len(pool.serving))
        self.admission = Admission(config.max_in_flight, self._metrics, shared)

    async def ready(self) -> None:
        """Hold a request until a scorer has told what fits. Raises `UnavailableError`."""
        await self.pool.known(self._hold_timeout_s)

    @property
    def accepting(self) -> bool:
        """Whether a request that comes now will be answered, as far as one can know."""
        return bool(self.pool.serving) or self.config.hold_timeout_s is not None

    async def generate(
        self,
        request: GenerationRequest,
        deadline: float,
        metadata: Metadata | None = None,
        direct: Direct | None = None,
    ) -> AsyncGenerator[Chunk, None]:
        """Yield the completion's chunks, the last with its ending, but for what `direct` sends.

        `deadline` is loop time; `metadata` may carry the caller's trace context. Closing the
        generator cancels the scorer's RPC. Raises `OutriderError`.
        """
        writer = Writer(request, self.tokenizer)
        model, account = self.config.served_model_name, writer.account
        with (
            self._metrics.outcome(request.operation, lambda: self.admission.cancelled_by(deadline)),
            self.telemetry.server_span(
                f"{request.operation} {model}", metadata, _span_attributes(request, model)
            ) as span,
        ):
            take = _take_rounds(request, writer, direct)
            rounds = self._resumer.stream(request, account, span, deadline, take)
            if request.thinking is not None:
                rounds = within_budget(
                    lambda part: self._resumer.stream(part, account, span, deadline),
                    *(request, request.thinking),
                    *(account, self.tokenizer.token_bytes),
                )
            async with aclosing(rounds):
                async for round_ in rounds:
                    chunk = writer.add(round_)
                    if writer.ended:
                        break
                    if chunk is not None:
                        yield chunk
            last = writer.end()
            assert last.ending is not None
            self._record(request, last.ending, span, writer.times())
            yield last

    def _record(
        self,
        request: GenerationRequest,
        ending: Ending,
        span: Span,
        times: RequestTimes,
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
        self.telemetry.latency.record(request.operation, self.config.served_model_name, times, span)
        self._metrics.completed(usage)


def _take_rounds(
    request: GenerationRequest, writer: Writer, direct: Direct | None
) -> TakeRound | None:
    """Return what writes rounds directly; None where a round may end the request."""
    if direct is None or request.stop_strings or request.top_logprobs is not None:
        return None

    def take(round_: Round) -> bool:
        if not direct.ready():
            return False
        chunk = writer.add(round_)
        if chunk is not None:
            direct.send(chunk)
        return True

    return take


def _logprobs(request: GenerationRequest, round_: Round) -> Sequence[TokenLogprobs]:
    """Return a round's logprobs if they are wanted. Raises `InternalError` if they are missing."""
    if request.top_logprobs is None:
        return ()
    if len(round_.logprobs) != len(round_.token_ids):
        raise InternalError("The scorer did not send the logprobs that were asked for.")
    return round_.logprobs


def _drafts(request: GenerationRequest, round_: Round) -> Iterator[VerifiedDraft]:
    """Yield a round's drafts, by their places in the output."""
    prompt_len = len(request.prompt_token_ids)
    return (draft._replace(base_len=draft.base_len - prompt_len) for draft in round_.drafts)


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
