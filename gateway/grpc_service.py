"""The gRPC face: outrider.v1.GenerationService."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import ExitStack, aclosing
from dataclasses import replace
from functools import lru_cache
from typing import Any, Final

import grpc

from gateway.admission import deadline_after
from gateway.answers.formats import Reading
from gateway.answers.parser import AnswerParser
from gateway.api_keys import ApiKeys
from gateway.chat import Plan, plan_chat
from gateway.generation import Chunk, Direct, Generator
from gateway.grpc_chat import chat_from_proto, parts_of
from gateway.grpc_writes import Writes
from gateway.intake import GenerationRequest, Limits, Settings
from gateway.output import OutputToken
from outrider.end_of_turn import EndOfTurn
from outrider.errors import InvalidRequestError
from outrider.params import require
from outrider.rpc.codec import (
    FINISH_TO_PROTO,
    KIND_TO_PROTO,
    constraint_from_proto,
    logprobs_to_proto,
    prompt_logprobs_to_proto,
    sampling_from_proto,
    speculation_from_proto,
)
from outrider.rpc.status import abort
from outrider.rpc.telemetry import Metadata
from outrider.v1 import generation_pb2, generation_pb2_grpc

Context = grpc.aio.ServicerContext[Any, Any]
SERVICE_NAME: Final = "outrider.v1.GenerationService"
_TOKENS_CACHED: Final = 8192


def add_to_server(servicer: GenerationServicer, server: grpc.aio.Server) -> None:
    """Register the service; messages of Generate are bytes already."""
    generate: grpc.RpcMethodHandler[Any, bytes] = grpc.unary_stream_rpc_method_handler(
        servicer.Generate,
        request_deserializer=generation_pb2.GenerateRequest.FromString,
    )
    generation_pb2_grpc.add_GenerationServiceServicer_to_server(servicer, server)
    # In the place of the generated one.
    server.add_registered_method_handlers(SERVICE_NAME, {"Generate": generate})


class GenerationServicer(generation_pb2_grpc.GenerationServiceServicer):
    """Text in, text out, over a started generator."""

    def __init__(self, generator: Generator, api_keys: ApiKeys) -> None:
        self._generator = generator
        self._api_keys = api_keys
        self._burst = EndOfTurn(Writes.begin)

    # Written with context.write, not as a generator: the deadline must also end a write that a
    # client who does not read has blocked.
    async def Generate(  # type: ignore[override]  # noqa: N802
        self, request: generation_pb2.GenerateRequest, context: Context
    ) -> None:
        timeout_s = self._generator.config.request_timeout_s
        client_s = context.time_remaining()
        deadline = deadline_after(timeout_s if client_s is None else min(timeout_s, client_s))
        try:
            tenant = self._check_key(context)
            async with self._generator.admission.until(deadline):
                self._generator.intake.check_model(request.model)
                with ExitStack() as place:
                    place.enter_context(self._generator.admission.admitted(1))
                    await self._generator.ready()
                    work, reading = await self._prepare(request, tenant)
                    encode = _encoder(request, work, reading)
                    writes = Writes(context.write, self._burst)
                    direct = Direct(
                        lambda: writes.ready, lambda chunk: writes.add_now(encode(chunk))
                    )
                    metadata = _metadata(context)
                    chunks = self._generator.generate(work, deadline, metadata, direct)
                    async with aclosing(chunks), writes:
                        async for chunk in chunks:
                            if chunk.ending is not None:  # whose client may ask anew at once
                                place.close()
                            await writes.add(encode(chunk))
        except Exception as error:
            await abort(context, error)

    async def ListModels(  # noqa: N802
        self,
        _request: generation_pb2.ListModelsRequest,
        context: Context,
    ) -> generation_pb2.ListModelsResponse:
        try:
            self._check_key(context)
        except Exception as error:
            await abort(context, error)
        config, pool = self._generator.config, self._generator.pool
        return generation_pb2.ListModelsResponse(
            models=[
                generation_pb2.Model(
                    id=name, max_model_len=pool.max_model_len, vocab_size=pool.vocab_size
                )
                for name in (*config.model_names, *pool.adapters)
            ]
        )

    def _check_key(self, context: Context) -> str:
        """Return the tenant."""
        given = dict(_metadata(context)).get("authorization")
        return self._api_keys.check(given if isinstance(given, str) else None)

    async def _prepare(
        self, request: generation_pb2.GenerateRequest, tenant: str
    ) -> tuple[GenerationRequest, Reading | None]:
        """Return the request that a scorer will take, and how its answer is read."""
        intake, param = self._generator.intake, request.WhichOneof("prompt")
        if param is None:
            raise InvalidRequestError("One of text, tokens and chat must be set.", param="prompt")
        plan = await self._plan(request)
        stop, scores_only = request.stop, _scores_only(request)
        max_tokens = stop.max_tokens if stop.HasField("max_tokens") else None
        ends = frozenset() if stop.ignore_eos else plan.ends
        speculation = speculation_from_proto(request.speculation)
        intake.check_advice(speculation.advice, "advice", "references")
        work = intake.prepare(
            plan.token_ids,
            param,
            Limits(
                max_tokens=1 if scores_only else max_tokens,
                stop_token_ids=ends.union(stop.stop_token_ids),
                ignore_eos=stop.ignore_eos,
                min_tokens=stop.min_tokens,
                stop_strings=tuple(request.stop_strings),
                stop_strings_param="stop_strings",
            ),
            Settings(
                operation="chat" if param == "chat" else "text_completion",
                sampling=sampling_from_proto(request.sampling, seed=intake.default_seed()),
                speculation=speculation,
                request_id=request.request_id,
                constraint=plan.constraint,
                marks=() if plan.reading is None else plan.reading.special,
                thinking=None if scores_only else plan.thinking,
                top_logprobs=request.top_logprobs if request.HasField("top_logprobs") else None,
                prompt_logprobs=(
                    request.prompt_logprobs if request.HasField("prompt_logprobs") else None
                ),
                tenant=tenant,
                stream_interval=request.stream_interval,
                adapter=intake.adapter_of(intake.check_model(request.model)),
                affinity=plan.affinity,
            ),
        )
        return work, plan.reading

    async def _plan(self, request: generation_pb2.GenerateRequest) -> Plan:
        """Return the prompt's tokens, and what they say of the answer."""
        intake, constraint = self._generator.intake, constraint_from_proto(request.constraint)
        plan = Plan(constraint, "")
        if request.suffix:
            require(request.HasField("text"), "suffix", "left out where the prompt is no text")
            asked = request.HasField("prompt_logprobs")
            require(not asked, "suffix", "left out where the prompt's logprobs are asked for")
            token_ids, ends = await intake.encode_infill(request.text, request.suffix, "text")
            return replace(plan, token_ids=token_ids, ends=ends)
        if request.HasField("chat"):
            return await plan_chat(chat_from_proto(request.chat, constraint), self._generator)
        if request.HasField("tokens"):
            return replace(plan, token_ids=list(request.tokens.token_ids))
        return replace(plan, token_ids=await intake.encode(request.text, "text"))


def _scores_only(request: generation_pb2.GenerateRequest) -> bool:
    """Tell whether nothing is to be generated."""
    stop = request.stop
    no_tokens = stop.HasField("max_tokens") and not stop.max_tokens
    return no_tokens and request.HasField("prompt_logprobs")


def _of_prompt(chunk: Chunk) -> Chunk:
    """Return a chunk of a completion whose one token is left out."""
    return Chunk((), None if chunk.ending is None else chunk.ending.of_prompt())


def _metadata(context: Context) -> Metadata:
    return [(str(key), value) for key, value in context.invocation_metadata() or ()]


def _token(token: OutputToken) -> generation_pb2.OutputToken:
    return generation_pb2.OutputToken(
        id=token.id,
        kind=KIND_TO_PROTO[token.kind],
        text=token.text,
        logprobs=None if token.logprobs is None else logprobs_to_proto(token.logprobs),
    )


def _encoder(
    request: generation_pb2.GenerateRequest, work: GenerationRequest, reading: Reading | None
) -> Callable[[Chunk], bytes]:
    """Return what makes the messages of one answer."""
    # Messages one behind the other are the message of all their fields.
    head = generation_pb2.GenerateResponse(request_id=work.request_id).SerializeToString()
    parser = None if reading is None else AnswerParser(reading)
    scores_only, aux_info = _scores_only(request), request.aux_info

    def encode(chunk: Chunk) -> bytes:
        if scores_only:
            chunk = _of_prompt(chunk)
        tokens, ending = chunk.tokens, chunk.ending
        if len(tokens) == 1 and ending is None and parser is None and tokens[0].logprobs is None:
            return head + _one_token(tokens[0])  # by far the most common case
        response = _response(chunk, aux_info=aux_info)
        if reading is not None and parser is not None:
            events = parser.feed(chunk.text)
            if ending is not None:
                events += parser.finish()
            response.parts.extend(parts_of(events, reading))
        return head + response.SerializeToString()

    return encode


@lru_cache(_TOKENS_CACHED)
def _one_token(token: OutputToken) -> bytes:
    response = generation_pb2.GenerateResponse(text=token.text, tokens=[_token(token)])
    return response.SerializeToString()


def _response(chunk: Chunk, *, aux_info: bool) -> generation_pb2.GenerateResponse:
    response = generation_pb2.GenerateResponse(
        text=chunk.text, tokens=[_token(token) for token in chunk.tokens]
    )
    if chunk.ending is not None:
        response.finish_reason = FINISH_TO_PROTO[chunk.ending.reason]
        response.usage.CopyFrom(chunk.ending.usage)
        if aux_info:
            response.aux_info.CopyFrom(chunk.ending.aux_info)
        if chunk.ending.prompt_logprobs is not None:
            prompt = prompt_logprobs_to_proto(chunk.ending.prompt_logprobs)
            response.prompt_logprobs.CopyFrom(prompt)
    return response
