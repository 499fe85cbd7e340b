"""Texts and their tokens over HTTP, in vLLM's form: /tokenize, /detokenize, /tokenizer_info."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Coroutine, Mapping
from functools import partial
from typing import Any

from pydantic_core import from_json
from starlette.requests import Request
from starlette.responses import JSONResponse, Response
from starlette.routing import Route

from gateway.config import GatewayConfig
from gateway.generation import Generator
from gateway.openai.answer import while_connected
from gateway.openai.body import read_as
from gateway.openai.parse import parse, validated
from gateway.openai.request_objects import UINT32, Items, Strict
from gateway.openai.requests import ChatRequest, CompletionRequest

Handler = Callable[[Request, str, float], Coroutine[Any, Any, Response]]
"""Takes a request, its tenant and its deadline."""
Guard = Callable[[Handler], Callable[[Request], Coroutine[Any, Any, Response]]]


class TokenizeText(CompletionRequest):
    """A text to tokenise."""

    prompt: str
    add_special_tokens: bool = True
    return_token_strs: bool | None = None


class TokenizeChat(ChatRequest):
    """A conversation to tokenise, as it is for an answer."""

    return_token_strs: bool | None = None


class Detokenize(Strict):
    """Tokens to spell."""

    model: str | None = None
    tokens: Items[UINT32]


class TokenRoutes:
    """The three paths over a generator."""

    def __init__(self, generator: Generator, config: GatewayConfig) -> None:
        self._generator = generator
        self._config = config

    def routes(self, guarded: Guard) -> list[Route]:
        """Return the paths; `guarded` checks keys and deadlines."""
        return [
            Route("/tokenize", guarded(self._tokenize), methods=["POST"]),
            Route("/detokenize", guarded(self._detokenize), methods=["POST"]),
            Route("/tokenizer_info", guarded(self._info)),
        ]

    async def _tokenize(self, request: Request, _tenant: str, _deadline: float) -> Response:
        generator = self._generator
        body = await read_as(request, self._config.max_body_bytes, _read_text)
        generator.intake.check_model(body.model)
        with generator.admission.admitted(1):
            await self._known(request)
            if isinstance(body, TokenizeChat):
                conversation = body.conversation()
                token_ids, _ = await generator.intake.encode_chat(conversation, "messages")
            elif body.suffix:
                prompt, suffix = body.prompt, body.suffix
                token_ids, _ = await generator.intake.encode_infill(prompt, suffix, "prompt")
            else:
                special = body.add_special_tokens
                encode = generator.intake.encode_plain
                token_ids = [*await encode(body.prompt, "prompt", add_special_tokens=special)]
        spell = generator.tokenizer.spell
        return JSONResponse(
            {
                "count": len(token_ids),
                "max_model_len": generator.pool.max_model_len,
                "tokens": token_ids,
                "token_strs": [*map(spell, token_ids)] if body.return_token_strs else None,
            }
        )

    async def _detokenize(self, request: Request, _tenant: str, _deadline: float) -> Response:
        generator = self._generator
        make = partial(validated, Detokenize)
        body = await read_as(request, self._config.max_body_bytes, make)
        generator.intake.check_model(body.model)
        with generator.admission.admitted(1):
            await self._known(request)
            generator.intake.check_tokens(body.tokens, "tokens")
            text = await asyncio.to_thread(
                generator.tokenizer.decode, body.tokens, skip_special_tokens=False
            )
        return JSONResponse({"prompt": text})

    async def _info(self, _request: Request, _tenant: str, _deadline: float) -> Response:
        tokenizer = self._generator.tokenizer
        source = tokenizer.chat_template_source
        return JSONResponse({**tokenizer.facts, "chat_template": source or None})

    async def _known(self, request: Request) -> None:
        """Wait until a scorer has told the context's length."""
        if not self._generator.pool.max_model_len:
            await while_connected(request, self._generator.ready())


def _read_text(body: bytes) -> TokenizeText | TokenizeChat:
    """Raise `InvalidRequestError`."""
    try:
        fields = from_json(body)
    except ValueError:
        fields = None
    if not isinstance(fields, Mapping):
        return parse(TokenizeText, body)  # which says what is wrong
    if "messages" in fields:
        return parse(TokenizeChat, fields)
    return parse(TokenizeText, fields)
