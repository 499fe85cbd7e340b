"""How the scorer's service comes to a server."""

from __future__ import annotations

from typing import Any, cast

import grpc

from outrider.rpc.feature_codec import response_to_bytes
from outrider.v1 import draft_pb2, scorer_pb2_grpc
from scorer_service.servicer import SERVICE_NAME, ScorerServicer


def add_to_server(servicer: ScorerServicer, server: grpc.aio.Server) -> None:
    """Like the generated function, but for how Draft's messages are written."""
    generated = _Handlers()
    scorer_pb2_grpc.add_ScorerServiceServicer_to_server(
        servicer, cast("grpc.aio.Server", generated)
    )
    draft = grpc.stream_stream_rpc_method_handler(
        servicer.Draft,
        request_deserializer=draft_pb2.DraftRequest.FromString,
        response_serializer=response_to_bytes,
    )
    handlers = {**generated.handlers, "Draft": draft}
    server.add_generic_rpc_handlers((grpc.method_handlers_generic_handler(SERVICE_NAME, handlers),))
    server.add_registered_method_handlers(SERVICE_NAME, handlers)


class _Handlers:
    """Takes what the generated function would register at a server."""

    def __init__(self) -> None:
        self.handlers: dict[str, Any] = {}

    def add_generic_rpc_handlers(self, handlers: object) -> None:
        """The same, by another name."""

    def add_registered_method_handlers(self, service: str, handlers: dict[str, Any]) -> None:  # noqa: ARG002
        self.handlers = handlers
