"""The OpenAI-compatible HTTP face."""

from __future__ import annotations

import time
import uuid
from collections.abc import Callable, Coroutine
from typing import Any

from starlette.applications import Starlette
from starlette.exceptions import HTTPException
from starlette.requests import Request
from starlette.responses import JSONResponse, Response
from starlette.routing import Route

from gateway.admission import deadline_after
from gateway.api_keys import ApiKeys
from gateway.generation import Generator
from gateway.openai_answer import Answer
from gateway.openai_errors import BodyTooLargeError, error_body, error_response, public_error
from gateway.openai_models import ChatRequest, CompletionRequest, parse
from gateway.openai_responses import Shaper
from outrider.errors import InvalidRequestError, ModelNotFoundError

_SSE_HEADERS = {"Cache-Control": "no-cache", "X-Accel-Buffering": "no"}


def create_app(generator: Generator, api_keys: ApiKeys) -> Starlette:
    """The ASGI application over a started generator."""
    return _OpenAI(generator, api_keys).app


class _OpenAI:
    def __init__(self, generator: Generator, api_keys: ApiKeys) -> None:
        self._generator = generator
        self._api_keys = api_keys
        self._started = int(time.time())
        self.app = Starlette(
            routes=[
                Route("/v1/completions", self._guarded(self._completions), methods=["POST"]),
                Route("/v1/chat/completions", self._guarded(self._chat), methods=["POST"]),
                Route("/v1/models", self._guarded(self._models)),
                Route("/v1/models/{model:path}", self._guarded(self._model)),
                Route("/health", self._health),
                Route("/metrics", self._metrics),
            ],
            exception_handlers={HTTPException: _http_error},
        )

    def _guarded(
        self, handler: Callable[[Request], Coroutine[Any, Any, Response]]
    ) -> Callable[[Request], Coroutine[Any, Any, Response]]:
        """Checks the key; an error becomes OpenAI's error body."""

        async def endpoint(request: Request) -> Response:
            try:
                self._api_keys.check(request.headers.get("authorization"))
                return await handler(request)
            except Exception as error:
                return error_response(public_error(error))

        return endpoint

    async def _completions(self, request: Request) -> Response:
        deadline = deadline_after(self._generator.config.request_timeout_s)
        async with self._generator.admission.until(deadline):
            body = parse(CompletionRequest, await self._body(request))
        self._generator.check_model(body.model)
        request_id, limits = uuid.uuid4().hex, body.limits()
        speculation = body.speculation_params()
        prompts = body.prompts()
        if not prompts:
            raise InvalidRequestError("prompt must not be empty.", param="prompt")
        self._generator.admission.check_size(len(prompts))
        work = [
            self._generator.prepare(
                await self._generator.encode(prompt, "prompt")
                if isinstance(prompt, str)
                else prompt,
                operation="text_completion",
                param="prompt",
                sampling=body.sampling(self._generator.default_seed()),
                limits=limits,
                speculation=speculation,
                request_id=f"{request_id}-{number}" if len(prompts) > 1 else request_id,
            )
            for number, prompt in enumerate(prompts)
        ]
        shaper = Shaper.create(
            "text_completion",
            request_id,
            self._generator.config.served_model_name,
            len(work),
            aux_info=body.aux_info,
            include_usage=body.include_usage,
        )
        return Answer(self._generator, work, shaper, deadline, stream=bool(body.stream))

    async def _chat(self, request: Request) -> Response:
        deadline = deadline_after(self._generator.config.request_timeout_s)
        async with self._generator.admission.until(deadline):
            body = parse(ChatRequest, await self._body(request))
        self._generator.check_model(body.model)
        messages = [message.for_template() for message in body.messages]
        work = self._generator.prepare(
            await self._generator.encode_chat(messages, "messages"),
            operation="chat",
            param="messages",
            sampling=body.sampling(self._generator.default_seed()),
            limits=body.limits(),
            speculation=body.speculation_params(),
        )
        shaper = Shaper.create(
            "chat",
            work.request_id,
            self._generator.config.served_model_name,
            1,
            aux_info=body.aux_info,
            include_usage=body.include_usage,
        )
        return Answer(self._generator, [work], shaper, deadline, stream=bool(body.stream))

    async def _models(self, _request: Request) -> Response:
        return JSONResponse({"object": "list", "data": [self._model_card()]})

    async def _model(self, request: Request) -> Response:
        self._generator.check_model(request.path_params["model"])
        return JSONResponse(self._model_card())

    def _model_card(self) -> dict[str, object]:
        return {
            "id": self._generator.config.served_model_name,
            "object": "model",
            "created": self._started,
            "owned_by": "outrider",
            "max_model_len": self._generator.pool.max_model_len,
        }

    async def _health(self, _request: Request) -> Response:
        serving, known = len(self._generator.pool.serving), len(self._generator.pool.scorers)
        body = {
            "status": "ok" if serving else "unavailable",
            "scorers_serving": serving,
            "scorers": known,
        }
        return JSONResponse(body, 200 if serving else 503)

    async def _metrics(self, request: Request) -> Response:
        text, content_type = self._generator.telemetry.metrics_text(
            request.headers.get("accept", "")
        )
        return Response(text, headers={"Content-Type": content_type})

    async def _body(self, request: Request) -> bytes:
        """The body; raises `BodyTooLargeError` as soon as it is known to be too large."""
        limit = self._generator.config.max_body_bytes
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


async def _http_error(_request: Request, error: Exception) -> Response:
    """Unknown routes and methods, in the same shape."""
    assert isinstance(error, HTTPException)
    if error.status_code == 404:
        return error_response(ModelNotFoundError("There is no such path here."))
    body = error_body(InvalidRequestError(str(error.detail)))
    return JSONResponse(body, error.status_code, error.headers)
