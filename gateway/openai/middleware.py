"""Headers of every HTTP answer, and the page origins that may read answers."""

from __future__ import annotations

import uuid
from collections.abc import Sequence

from starlette.datastructures import Headers, MutableHeaders
from starlette.middleware import Middleware
from starlette.middleware.cors import CORSMiddleware
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from gateway.admission import Admission
from gateway.intake import MAX_REQUEST_ID_CHARS

REQUEST_ID = "x-request-id"


def middleware(admission: Admission, cors_origins: Sequence[str]) -> list[Middleware]:
    """Return what surrounds the routes; pages of `cors_origins` may call them."""
    layers = [Middleware(_AnswerHeaders, admission)]
    if cors_origins:
        layers.append(
            Middleware(
                CORSMiddleware,
                allow_origins=cors_origins,
                allow_methods=["*"],
                allow_headers=["*"],
                expose_headers=[REQUEST_ID, "retry-after"],
            )
        )
    return layers


def request_id(scope: Scope) -> str:
    """Return the id of a request that `_AnswerHeaders` let pass."""
    return str(scope["state"][REQUEST_ID])


class _AnswerHeaders:
    """Names the request in its answer, by the client's own id if it sent one.

    While the gateway shuts down the connection is closed after each answer. Otherwise a client's
    next request on that connection would meet its end.
    """

    def __init__(self, app: ASGIApp, admission: Admission) -> None:
        self._app = app
        self._admission = admission

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http":
            await self._app(scope, receive, send)
            return
        given = Headers(scope=scope).get(REQUEST_ID, "")
        usable = given.isascii() and given.isprintable() and len(given) <= MAX_REQUEST_ID_CHARS // 2
        name = given if given and usable else uuid.uuid4().hex
        scope.setdefault("state", {})[REQUEST_ID] = name

        async def named(message: Message) -> None:
            if message["type"] == "http.response.start":
                headers = MutableHeaders(scope=message)
                headers[REQUEST_ID] = name
                if scope["path"].startswith("/v1/messages"):
                    headers["request-id"] = name  # as Anthropic's API names it
                if self._admission.draining:
                    headers["connection"] = "close"
            await send(message)

        await self._app(scope, receive, named)
