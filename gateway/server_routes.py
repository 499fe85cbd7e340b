"""The server itself over HTTP, in vLLM's form: /health, /ping, /load, /version."""

from __future__ import annotations

from typing import Final

from starlette.applications import Starlette
from starlette.requests import Request
from starlette.responses import JSONResponse, Response
from starlette.routing import Route

from gateway.generation import Generator
from outrider import __version__

_OTHER_KINDS: Final = {
    **dict.fromkeys(("embeddings", "embed", "pooling"), "embeddings"),
    **dict.fromkeys(("rerank", "score", "classify", "moderations"), "scores of texts"),
    "audio": "audio",
    "images": "images",
    "videos": "videos",
    "realtime": "audio",
}
"""Parts of paths of other servers -> what these make."""


class ServerRoutes:
    """Paths that anyone may ask."""

    def __init__(self, generator: Generator) -> None:
        self._generator = generator

    def routes(self) -> list[Route]:
        """Return the paths."""
        return [
            Route("/health", self._health),
            Route("/ping", self._health, methods=["GET", "POST"]),
            Route("/load", self._load),
            Route("/version", self._version),
        ]

    async def _health(self, _request: Request) -> Response:
        serving, known = len(self._generator.pool.serving), len(self._generator.pool.scorers)
        accepting = self._generator.accepting
        body = {
            "status": "ok" if serving else "holding" if accepting else "unavailable",
            "scorers_serving": serving,
            "scorers": known,
        }
        return JSONResponse(body, 200 if accepting else 503)

    async def _load(self, _request: Request) -> Response:
        return JSONResponse({"server_load": self._generator.admission.in_flight_everywhere})

    async def _version(self, _request: Request) -> Response:
        return JSONResponse({"version": __version__})


def not_served(path: str, app: Starlette) -> str | None:
    """Return why a path of another kind of model is not served; None for any other path."""
    kinds = [_OTHER_KINDS[part] for part in path.split("/") if part in _OTHER_KINDS]
    if not kinds:
        return None
    return f"There is no {path} here: the model generates text, not {kinds[0]}. {served(app)}"


def served(app: Starlette) -> str:
    """Return the paths that answer requests, as a sentence."""
    paths = {route.path.rstrip("/") for route in app.routes if isinstance(route, Route)}
    known = sorted(p for p in paths if p.startswith("/v1/") and p.count("completions") < 2)
    return f"Served: {', '.join(path for path in known if '{' not in path)}."
