"""ProposerService, which describes the proposer."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import grpc

from outrider.errors import UnavailableError
from outrider.rpc import status
from outrider.v1 import draft_pb2, proposer_pb2, proposer_pb2_grpc
from proposer_service.links import ScorerLinks
from proposer_service.worker import DraftWorker

Context = grpc.aio.ServicerContext[Any, Any]


class ProposerServicer(proposer_pb2_grpc.ProposerServiceServicer):
    """Answers UNAVAILABLE until it is `ready`."""

    def __init__(
        self,
        worker: DraftWorker,
        hello: Callable[[], draft_pb2.Hello],
        links: ScorerLinks,
    ) -> None:
        self.ready = False
        self._worker = worker
        self._hello = hello
        self._links = links

    async def GetProposerInfo(  # noqa: N802
        self,
        request: proposer_pb2.GetProposerInfoRequest,  # noqa: ARG002
        context: Context,
    ) -> proposer_pb2.GetProposerInfoResponse:
        if not self.ready:
            error = UnavailableError("the proposer is starting or draining")
            await status.abort(context, error)
        hello = self._hello()
        return proposer_pb2.GetProposerInfoResponse(
            proposer_id=hello.proposer_id,
            incarnation=hello.incarnation,
            method=hello.method,
            model=hello.model,
            vocab_size=hello.vocab_size,
            tokenizer_hash=hello.tokenizer_hash,
            max_sessions=hello.max_sessions,
            max_draft_tokens=hello.max_draft_tokens,
            max_model_len=hello.max_model_len,
            protocol_version=hello.protocol_version,
            sessions=self._worker.num_sessions,
            scorers=self._links.status(),
        )
