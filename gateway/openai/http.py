"""The OpenAI-compatible HTTP face."""

from __future__ import annotations

import time
from collections.abc import Callable, Coroutine, Sequence
from typing import Any

from prometheus_client import CollectorRegistry
from starlette.applications import Starlette
from starlette.datastructures import MutableHeaders
from starlette.exceptions import HTTPException
from starlette.middleware import Middleware
from starlette.middleware.cors import CORSMiddleware
from starlette.requests import ClientDisconnect, Request
from starlette.responses import JSONResponse, Response
from starlette.routing import Route
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from gateway.admission import Admission, deadline_after
from gateway.api_keys import ApiKeys
from gateway.config import GatewayConfig
from gateway.generation import Generator
from gateway.openai.answer import Answer
from gateway.openai.errors import BodyTooLargeError, error_body, error_response, public_error
from gateway.openai.job import admit, make_job
from gateway.openai.parse import parse
from gateway.openai.requests import ChatRequest, CompletionRequest
from gateway.openai.requests import Request as OpenAIRequest
from gateway.playground import playground
from outrider.errors import InvalidRequestError
from outrider.rpc.exposition import encode


def create_app(
    generator: Generator,
    config: GatewayConfig,
    api_keys: ApiKeys,
    metrics: CollectorRegistry | None,
) -> Starlette:
    """Return the ASGI application over a generator; /metrics shows `metrics`, if any."""
    return _OpenAI(generator, config, api_keys, metrics).app


class _CloseWhileDraining:
    """Closes the connection after each answer while the gateway shuts down.

    Otherwise a client's next request on that connection would meet its end.
    """

    def __init__(self, app: ASGIApp, admission: Admission) -> None:
        self._app = app
        self._admission = admission

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        async def told(message: Message) -> None:
            if message["type"] == "http.response.start" and self._admission.draining:
                MutableHeaders(scope=message)["connection"] = "close"
            await send(message)

        await self._app(scope, receive, told)


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
        completions = self._guarded(self._completions)
        self.app = Starlette(
            routes=[
                Route("/v1/completions", completions, methods=["POST"]),
                # Where a client of completions looks whose base_url ends in /v1/chat/completions.
                Route("/v1/chat/completions/completions", completions, methods=["POST"]),
                Route("/v1/chat/completions", self._guarded(self._chat), methods=["POST"]),
                Route("/v1/models", self._guarded(self._models)),
                Route("/v1/models/{model:path}", self._guarded(self._model)),
                Route("/health", self._health),
                *([] if metrics is None else [Route("/metrics", _metrics(metrics))]),
                *([Route("/", playground)] if config.playground else []),
            ],
            exception_handlers={HTTPException: _http_error},
            middleware=[
                Middleware(_CloseWhileDraining, generator.admission),
                *_cors(config.cors_origins),
            ],
        )

    def _guarded(
        self, handler: Callable[[Request, str, float], Coroutine[Any, Any, Response]]
    ) -> Callable[[Request], Coroutine[Any, Any, Response]]:
        """Wrap a handler: the key names the tenant, the deadline (loop time) ends the request.

        An error becomes OpenAI's error body.
        """

        async def endpoint(request: Request) -> Response:
            deadline = deadline_after(self._generator.config.request_timeout_s)
            try:
                tenant = self._api_keys.check(request.headers.get("authorization"))
                async with self._generator.admission.until(deadline):
                    return await handler(request, tenant, deadline)
            except ClientDisconnect:  # before its body was complete: nobody reads an answer
                return Response(status_code=400)
            except Exception as error:
                return error_response(public_error(error))

        return endpoint

    async def _completions(self, request: Request, tenant: str, deadline: float) -> Response:
        return await self._answer(CompletionRequest, request, tenant, deadline)

    async def _chat(self, request: Request, tenant: str, deadline: float) -> Response:
        return await self._answer(ChatRequest, request, tenant, deadline)

    async def _answer(
        self, kind: type[OpenAIRequest], request: Request, tenant: str, deadline: float
    ) -> Answer:
        """Take places before the prompts are worked on. Raises `OutriderError`s."""
        generator = self._generator
        body = parse(kind, await self._body(request))
        generator.intake.check_model(body.model)
        with admit(body, generator) as places:
            await generator.ready()
            job = await make_job(body, generator, tenant)
            return Answer(generator, job, deadline, places.pop_all(), stream=bool(body.stream))

    async def _models(self, _request: Request, _tenant: str, _deadline: float) -> Response:
        config = self._config
        names = (config.served_model_name, *config.served_model_aliases)
        return JSONResponse({"object": "list", "data": [*map(self._model_card, names)]})

    async def _model(self, request: Request, _tenant: str, _deadline: float) -> Response:
        name = request.path_params["model"]
        self._generator.intake.check_model(name)
        known = name in self._config.served_model_aliases
        return JSONResponse(self._model_card(name if known else self._config.served_model_name))

    def _model_card(self, name: str) -> dict[str, object]:
        return {
            "id": name,
            "object": "model",
            "created": self._started,
            "owned_by": "outrider",
            "max_model_len": self._generator.pool.max_model_len,
        }

    async def _health(self, _request: Request) -> Response:
        serving, known = len(self._generator.pool.serving), len(self._generator.pool.scorers)
        accepting = self._generator.accepting
        body = {
            "status": "ok" if serving else "holding" if accepting else "unavailable",
            "scorers_serving": serving,
            "scorers": known,
        }
        return JSONResponse(body, 200 if accepting else 503)

    async def _body(self, request: Request) -> bytes:
        """Read the body. Raises `BodyTooLargeError` as soon as it is known to be too large."""
        limit = self._config.max_body_bytes
        body = bytearray()
        declared = request.headers.get("content-length", "")
        too_large = declared.isdigit() and int(declared) > limit
        if not too_large:
            async for piece in request.stream():
                body += piece
                if too_large := len(body) > limit:
                    break
        if too_large:
            raise BodyTooLargeError(f"The body is larger than {limit} bytes.")
        return bytes(body)


def _metrics(registry: CollectorRegistry) -> Callable[[Request], Coroutine[Any, Any, Response]]:
    async def endpoint(request: Request) -> Response:
        text, content_type = encode(registry, request.headers.get("accept", ""))
        return Response(text, headers={"Content-Type": content_type})

    return endpoint


def _cors(origins: Sequence[str]) -> list[Middleware]:
    if not origins:
        return []
    return [
        Middleware(CORSMiddleware, allow_origins=origins, allow_methods=["*"], allow_headers=["*"])
    ]


async def _http_error(request: Request, error: Exception) -> Response:
    """Unknown routes and methods, in the same shape."""
    assert isinstance(error, HTTPException)
    path = request.url.path
    said = {404: f"There is no {path} here.", 405: f"{path} does not take {request.method}."}
    body = error_body(InvalidRequestError(said.get(error.status_code, str(error.detail))))
    return JSONResponse(body, error.status_code, error.headers)
