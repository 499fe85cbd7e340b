"""ProposerService, which drafts for single prompts and describes the proposer."""

from __future__ import annotations

import secrets
from collections.abc import Callable
from typing import Any, Final

import grpc

from outrider.errors import CapacityError, InvalidRequestError, PromptTooLongError, UnavailableError
from outrider.params import require
from outrider.rpc import codec, status
from outrider.rpc.telemetry import Telemetry
from outrider.v1 import draft_pb2, proposer_pb2, proposer_pb2_grpc
from proposer_service.cycle import Proposal
from proposer_service.links import ScorerLinks
from proposer_service.worker import DraftWorker, MethodInfo

_DEFAULT_DRAFT_TOKENS: Final = 4
_MAX_PROPOSALS: Final = 32  # at once

Context = grpc.aio.ServicerContext[Any, Any]


class ProposerServicer(proposer_pb2_grpc.ProposerServiceServicer):
    """Answers UNAVAILABLE until `method` is set."""

    def __init__(
        self,
        worker: DraftWorker,
        hello: Callable[[], draft_pb2.Hello],
        links: ScorerLinks,
        telemetry: Telemetry,
    ) -> None:
        self.method: MethodInfo | None = None
        self._worker = worker
        self._hello = hello
        self._links = links
        self._telemetry = telemetry
        self._num_proposals = 0

    async def Propose(  # noqa: N802
        self, request: proposer_pb2.ProposeRequest, context: Context
    ) -> proposer_pb2.ProposeResponse:
        try:
            with self._telemetry.server_span("proposer.propose", context.invocation_metadata()):
                proposal = await self._propose(request)
        except Exception as error:
            await status.abort(context, error)
        return proposer_pb2.ProposeResponse(
            token_ids=proposal.tree.token_ids,
            parents=proposal.tree.parents,
            draft_us=proposal.draft_us,
        )

    async def GetProposerInfo(  # noqa: N802
        self,
        request: proposer_pb2.GetProposerInfoRequest,  # noqa: ARG002
        context: Context,
    ) -> proposer_pb2.GetProposerInfoResponse:
        if self.method is None:
            await status.abort(context, _starting())
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

    async def _propose(self, request: proposer_pb2.ProposeRequest) -> Proposal:
        if self.method is None:
            raise _starting()
        traits = self.method.traits
        if traits.features is not None:
            raise InvalidRequestError(
                f"{traits.method} drafts from hidden states of the target, which only a scorer "
                "sends: attach this proposer to one",
                reason="FEATURES_UNAVAILABLE",
            )
        wanted = (
            request.num_draft_tokens
            if request.HasField("num_draft_tokens")
            else min(_DEFAULT_DRAFT_TOKENS, traits.max_draft_tokens)
        )
        most = traits.max_draft_tokens
        require(1 <= wanted <= most, "num_draft_tokens", f"between 1 and {most}")
        token_ids = tuple(request.token_ids)
        if not token_ids:
            raise InvalidRequestError("token_ids must hold at least one token.", param="token_ids")
        known = not traits.vocab_size or max(token_ids) < traits.vocab_size
        require(known, "token_ids", f"below {traits.vocab_size}")
        if len(token_ids) + wanted >= traits.max_model_len:
            raise PromptTooLongError(
                f"{len(token_ids)} tokens and {wanted} more exceed what this proposer can draft "
                f"for ({traits.max_model_len}).",
                param="token_ids",
            )
        sampling = codec.sampling_from_proto(request.sampling, seed=secrets.randbits(64))
        if self._num_proposals >= _MAX_PROPOSALS:
            raise CapacityError(f"{_MAX_PROPOSALS} proposals are being made already")
        self._num_proposals += 1
        try:
            return await self._worker.propose(token_ids, wanted, sampling)
        finally:
            self._num_proposals -= 1


def _starting() -> UnavailableError:
    return UnavailableError("the proposer is starting or draining")
