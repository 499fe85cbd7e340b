"""The HTTP face: OpenAI's and Anthropic's APIs."""

from __future__ import annotations

import time
from collections.abc import Callable, Coroutine
from functools import partial
from typing import Any, TypeVar

from prometheus_client import CollectorRegistry
from starlette.applications import Starlette
from starlette.exceptions import HTTPException
from starlette.requests import ClientDisconnect, Request
from starlette.responses import JSONResponse, Response
from starlette.routing import Route

from gateway.admission import deadline_after
from gateway.anthropic import errors as anthropic_errors
from gateway.anthropic.rendering import MessageRendering
from gateway.anthropic.requests import CountRequest, MessagesRequest
from gateway.api_keys import ApiKeys
from gateway.chat import plan_chat
from gateway.config import GatewayConfig
from gateway.generation import Generator
from gateway.openai.answer import CompletionResponse, Made, Refusal, while_connected
from gateway.openai.body import read_as
from gateway.openai.errors import NotServedError, error_body, error_response, public_error
from gateway.openai.job import Job, admit, make_job
from gateway.openai.middleware import middleware, request_id
from gateway.openai.parse import parse
from gateway.openai.rendering import Choices, Rendering
from gateway.openai.requests import ChatRequest, CompletionRequest
from gateway.openai.requests import Request as OpenAIRequest
from gateway.openai.tokens import TokenRoutes
from gateway.openai.translation import named, read, renamed
from gateway.playground import playground
from gateway.responses_api.rendering import ResponseRendering
from gateway.responses_api.requests import ALLOWED, NAMES, ResponseRequest
from gateway.server_routes import ServerRoutes, not_served, served
from outrider.errors import InvalidRequestError, OutriderError, UnavailableError
from outrider.rpc.exposition import encode

_T = TypeVar("_T")


def create_app(
    generator: Generator,
    config: GatewayConfig,
    api_keys: ApiKeys,
    metrics: CollectorRegistry | None,
) -> Starlette:
    """Return the ASGI application over a generator; /metrics shows `metrics`, if any."""
    return _OpenAI(generator, config, api_keys, metrics).app


class _OpenAI:
    def __init__(
        self,
        generator: Generator,
        config: GatewayConfig,
        api_keys: ApiKeys,
        metrics: CollectorRegistry | None,
    ) -> None:
        self._generator = generator
        self._config = config
        self._api_keys = api_keys
        self._started = int(time.time())
        completions = self._guarded(partial(self._openai, kind=CompletionRequest))
        chats = self._guarded(partial(self._openai, kind=ChatRequest))
        anthropic = partial(self._guarded, refusal=anthropic_errors.error_response)
        self.app = Starlette(
            routes=[
                Route("/v1/completions", completions, methods=["POST"]),
                # Where a client of completions looks whose base_url ends in /v1/chat/completions.
                Route("/v1/chat/completions/completions", completions, methods=["POST"]),
                Route("/v1/chat/completions", chats, methods=["POST"]),
                Route("/v1/responses", self._guarded(self._responses), methods=["POST"]),
                Route("/v1/messages", anthropic(self._messages), methods=["POST"]),
                Route("/v1/messages/count_tokens", anthropic(self._count), methods=["POST"]),
                Route("/v1/models", self._guarded(self._models)),
                Route("/v1/models/", self._guarded(self._models)),
                Route("/v1/models/{model:path}", self._guarded(self._model)),
                *TokenRoutes(generator, config).routes(self._guarded),
                *ServerRoutes(generator).routes(),
                *([] if metrics is None else [Route("/metrics", _metrics(metrics))]),
                *([Route("/", playground)] if config.playground else []),
            ],
            exception_handlers={HTTPException: _http_error},
            middleware=middleware(generator.admission, config.cors_origins),
        )

    def _guarded(
        self,
        handler: Callable[[Request, str, float], Coroutine[Any, Any, Response]],
        refusal: Callable[[OutriderError], Response] = error_response,
    ) -> Callable[[Request], Coroutine[Any, Any, Response]]:
        """Wrap a handler: the key names the tenant, the deadline (loop time) ends the request.

        An error becomes the body that `refusal` makes of it.
        """

        async def endpoint(request: Request) -> Response:
            deadline = deadline_after(self._generator.config.request_timeout_s)
            try:
                tenant = self._api_keys.check(_authorization(request))
                async with self._generator.admission.until(deadline):
                    return await handler(request, tenant, deadline)
            except ClientDisconnect:  # before its body was complete: nobody reads an answer
                return Response(status_code=400)
            except Exception as error:
                return refusal(public_error(error))

        return endpoint

    async def _openai(
        self, request: Request, tenant: str, deadline: float, kind: type[OpenAIRequest]
    ) -> Response:
        body = await self._read(request, partial(parse, kind))
        return self._answer(body, Choices, request, tenant, deadline)

    async def _responses(self, request: Request, tenant: str, deadline: float) -> Response:
        body, chat = await self._read(request, _response_and_chat)
        shape = partial(ResponseRendering, body, chat)
        with named(NAMES):
            return self._answer(chat, shape, request, tenant, deadline, _refuse_response)

    async def _messages(self, request: Request, tenant: str, deadline: float) -> Response:
        body, chat = await self._read(request, _message_and_chat)
        shape, refuse = partial(MessageRendering, body), anthropic_errors.error_response
        return self._answer(chat, shape, request, tenant, deadline, refuse)

    async def _count(self, request: Request, _tenant: str, _deadline: float) -> Response:
        chat = await self._read(request, lambda body: read(CountRequest, body, {}).chat())
        generator = self._generator
        generator.intake.check_model(chat.model)
        with admit(chat, generator):
            if not generator.pool.max_model_len:
                await while_connected(request, generator.ready())
            plan = await plan_chat(chat.chat(), generator)
        return JSONResponse({"input_tokens": len(plan.token_ids)})

    async def _read(self, request: Request, make: Callable[[bytes], _T]) -> _T:
        return await read_as(request, self._config.max_body_bytes, make)

    def _answer(
        self,
        body: OpenAIRequest,
        shape: Callable[[Job], Rendering],
        request: Request,
        tenant: str,
        deadline: float,
        refuse: Refusal = error_response,
    ) -> CompletionResponse:
        """Take places before the prompts are worked on. Raises `OutriderError`s."""
        generator = self._generator
        generator.intake.check_model(body.model)
        if body.stream and body.wanted_prompt_logprobs() is not None:
            raise InvalidRequestError(
                "A prompt's logprobs (prompt_logprobs, or echo with logprobs) are not streamed: "
                "leave stream out.",
                param="stream",
            )

        async def make() -> Made:
            if not generator.pool.max_model_len:
                await generator.ready()
            job = await make_job(body, generator, tenant, request_id(request.scope))
            return job, shape(job)

        with admit(body, generator) as places:
            stream = bool(body.stream)
            return CompletionResponse(
                generator, make, refuse, deadline, places.pop_all(), stream=stream
            )

    async def _models(self, _request: Request, _tenant: str, _deadline: float) -> Response:
        cards = [self._model_card(name) for name in self._names()]
        return JSONResponse({"object": "list", "data": cards})

    async def _model(self, request: Request, _tenant: str, _deadline: float) -> Response:
        name = self._generator.intake.check_model(request.path_params["model"])
        return JSONResponse(self._model_card(name))

    def _names(self) -> tuple[str, ...]:
        return (*self._config.model_names, *self._generator.pool.adapters)

    def _model_card(self, name: str) -> dict[str, object]:
        pool = self._generator.pool
        if not (pool.max_model_len or self._generator.accepting):
            raise UnavailableError("The model is not loaded yet. Try again soon.")
        return {
            "id": name,
            "object": "model",
            "created": self._started,
            "owned_by": "outrider",
            "max_model_len": pool.max_model_len,
        }


def _response_and_chat(body: bytes) -> tuple[ResponseRequest, ChatRequest]:
    response = read(ResponseRequest, body, ALLOWED)
    return response, response.chat()


def _message_and_chat(body: bytes) -> tuple[MessagesRequest, ChatRequest]:
    message = read(MessagesRequest, body, {})
    return message, message.chat()


def _authorization(request: Request) -> str | None:
    """Return the header with a key; Anthropic's clients send theirs as x-api-key."""
    key = request.headers.get("x-api-key")
    return request.headers.get("authorization") or (None if key is None else f"Bearer {key}")


def _refuse_response(error: OutriderError) -> Response:
    return error_response(renamed(error, NAMES))


def _metrics(registry: CollectorRegistry) -> Callable[[Request], Coroutine[Any, Any, Response]]:
    async def endpoint(request: Request) -> Response:
        text, content_type = encode(registry, request.headers.get("accept", ""))
        return Response(text, headers={"Content-Type": content_type})

    return endpoint


async def _http_error(request: Request, error: Exception) -> Response:
    """Unknown routes and methods, in the same shape."""
    assert isinstance(error, HTTPException)
    path = request.url.path
    elsewhere = "Metrics are on --metrics-port." if path == "/metrics" else served(request.app)
    said = {
        404: f"There is no {path} here. {elsewhere}",
        405: f"{path} does not take {request.method}.",
    }
    shown = InvalidRequestError(said.get(error.status_code, str(error.detail)))
    if error.status_code == 404 and (why := not_served(path, request.app)) is not None:
        shown = NotServedError(why)
    body = error_body(shown)
    return JSONResponse(body, error.status_code, error.headers)
