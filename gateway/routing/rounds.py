"""Decode what a scorer adds to a request."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import NamedTuple

from outrider.params import TokenIds
from outrider.rpc.codec import FINISH_FROM_PROTO, logprobs_from_proto
from outrider.types import FinishReason, PromptLogprobs, TokenKind, TokenLogprobs, VerifiedDraft
from outrider.v1 import common_pb2, scorer_pb2


class Round(NamedTuple):  # one per request and step: a frozen dataclass takes three times as long
    """Tokens that one message committed; `finish_reason` with the last."""

    token_ids: TokenIds
    kinds: tuple[TokenKind, ...]
    finish_reason: FinishReason | None
    logprobs: tuple[TokenLogprobs, ...] = ()  # one per token, or none
    stop_token_id: int | None = None  # that ended the text, with the last
    prompt_logprobs: PromptLogprobs | None = None  # with the first, if the request asks
    usage: common_pb2.Usage | None = None  # with the last, or always if the request asks
    aux_info: common_pb2.AuxInfo | None = None  # with usage
    drafts: tuple[VerifiedDraft, ...] = ()  # that were verified, if the request asks


TakeRound = Callable[[Round], bool]
"""Takes a round of tokens alone at once, or returns False: it is to wait for the request's task."""


def round_from_proto(
    token_ids: Iterable[int],
    kinds: tuple[TokenKind, ...],
    response: scorer_pb2.ScorerServiceGenerateResponse,
) -> Round:
    """Decode tokens with what their message says besides."""
    finish = response.finish_reason
    reported = response.HasField("aux_info")
    return Round(
        tuple(token_ids),
        kinds,
        None if finish == common_pb2.FINISH_REASON_UNSPECIFIED else FINISH_FROM_PROTO[finish],
        tuple(logprobs_from_proto(entry) for entry in response.logprobs),
        response.stop_token_id if response.HasField("stop_token_id") else None,
        _prompt_logprobs(response),
        response.usage if reported else None,
        response.aux_info if reported else None,
        tuple([VerifiedDraft(d.base_len, (*d.token_ids,), (*d.parents,)) for d in response.drafts]),
    )


def _prompt_logprobs(
    response: scorer_pb2.ScorerServiceGenerateResponse,
) -> PromptLogprobs | None:
    if not response.HasField("prompt_logprobs"):
        return None
    message = response.prompt_logprobs
    return PromptLogprobs(
        list(message.logprobs), list(message.top_token_ids), list(message.top_logprobs)
    )
