"""Between protobuf messages and `outrider.types`: one function per message and direction."""

from __future__ import annotations

from typing import Final

from outrider.errors import InvalidRequestError
from outrider.types import (
    FinishReason,
    RequestStats,
    SamplingParams,
    SpeculationParams,
    StopParams,
    TokenKind,
)
from outrider.v1 import common_pb2

PROTOCOL_VERSION: Final = 1
"""The version of the Draft stream that this code speaks (Hello, Welcome, GetScorerInfo)."""

VERIFICATION: Final = "coupled"

METHODS: Final = ("draft_model", "ngram")
"""Methods a proposer may name in Hello."""

METHOD_ALIASES: Final = {"inference_with_reference": "ngram"}
"""Other names that clients may use in `SpeculationParams.method`."""

KIND_TO_PROTO: Final = {
    TokenKind.PLAIN: common_pb2.TOKEN_KIND_PLAIN,
    TokenKind.ACCEPTED: common_pb2.TOKEN_KIND_ACCEPTED,
    TokenKind.RECOVERED: common_pb2.TOKEN_KIND_RECOVERED,
    TokenKind.BONUS: common_pb2.TOKEN_KIND_BONUS,
}
KIND_FROM_PROTO: Final = {value: kind for kind, value in KIND_TO_PROTO.items()}

FINISH_TO_PROTO: Final = {
    FinishReason.STOP: common_pb2.FINISH_REASON_STOP,
    FinishReason.LENGTH: common_pb2.FINISH_REASON_LENGTH,
}
FINISH_FROM_PROTO: Final = {value: reason for reason, value in FINISH_TO_PROTO.items()}


def sampling_from_proto(msg: common_pb2.SamplingParams, *, seed: int) -> SamplingParams:
    """Resolves unset fields to their defaults; `seed` stands in for an unset one.

    Raises `InvalidRequestError` for a value out of range.
    """
    default = SamplingParams()
    return SamplingParams(
        temperature=msg.temperature if msg.HasField("temperature") else default.temperature,
        top_k=msg.top_k if msg.HasField("top_k") else default.top_k,
        top_p=msg.top_p if msg.HasField("top_p") else default.top_p,
        min_p=msg.min_p if msg.HasField("min_p") else default.min_p,
        seed=msg.seed if msg.HasField("seed") else seed,
    )


def sampling_to_proto(params: SamplingParams) -> common_pb2.SamplingParams:
    """Every field set: the receiver need not know our defaults."""
    return common_pb2.SamplingParams(
        temperature=params.temperature,
        top_k=params.top_k,
        top_p=params.top_p,
        min_p=params.min_p,
        seed=params.seed,
    )


def stop_from_proto(msg: common_pb2.StopParams, *, default_max_tokens: int) -> StopParams:
    """Raises `InvalidRequestError` for a value out of range."""
    return StopParams(
        max_tokens=msg.max_tokens if msg.HasField("max_tokens") else default_max_tokens,
        stop_token_ids=frozenset(msg.stop_token_ids),
        ignore_eos=msg.ignore_eos,
        min_tokens=msg.min_tokens,
    )


def stop_to_proto(params: StopParams) -> common_pb2.StopParams:
    return common_pb2.StopParams(
        max_tokens=params.max_tokens,
        stop_token_ids=sorted(params.stop_token_ids),
        ignore_eos=params.ignore_eos,
        min_tokens=params.min_tokens,
    )


def speculation_from_proto(msg: common_pb2.SpeculationParams) -> SpeculationParams:
    """An alias of a method becomes its name; method "none" becomes `enabled=False`.

    Raises `InvalidRequestError` for a value out of range and for a method that does not exist; a
    method that no attached proposer offers is not an error: the request goes on without drafts.
    """
    method = METHOD_ALIASES.get(msg.method, msg.method) or None
    if method not in (None, "none", *METHODS):
        known = ", ".join((*METHODS, *METHOD_ALIASES, "none"))
        raise InvalidRequestError(f"method must be one of {known}.", param="method")
    enabled = msg.enabled if msg.HasField("enabled") else True
    num_tokens = msg.num_speculative_tokens if msg.HasField("num_speculative_tokens") else None
    return SpeculationParams(
        enabled=enabled and method != "none",
        method=None if method == "none" else method,
        num_speculative_tokens=num_tokens,
    )


def speculation_to_proto(params: SpeculationParams) -> common_pb2.SpeculationParams:
    return common_pb2.SpeculationParams(
        enabled=params.enabled,
        method=params.method,
        num_speculative_tokens=params.num_speculative_tokens,
    )


def usage(stats: RequestStats) -> common_pb2.Usage:
    return common_pb2.Usage(
        prompt_tokens=stats.prompt_tokens,
        completion_tokens=stats.output_tokens,
        cached_prompt_tokens=stats.cached_prompt_tokens,
    )


def aux_info(
    stats: RequestStats, *, cost_time_ms: float, scorer_id: str, retries: int
) -> common_pb2.AuxInfo:
    """The public account of a request, from the engine's statistics."""
    return common_pb2.AuxInfo(
        cost_time=cost_time_ms,
        output_len=stats.output_tokens,
        iter_count=stats.iter_count,
        avg_tokens_per_iter=stats.output_tokens / max(1, stats.iter_count),
        rounds=stats.rounds,
        drafted=stats.drafted,
        accepted=stats.accepted,
        accepted_per_pos=stats.accepted_per_pos,
        k_histogram=stats.k_histogram,
        hits=stats.hits,
        misses_late=stats.misses_late,
        misses_wrong=stats.misses_wrong,
        waits=stats.waits,
        wait_ms=stats.wait_ms,
        fallback_rounds=stats.fallback_rounds,
        queue_ms=stats.queue_ms,
        prefill_ms=stats.prefill_ms,
        propose_ms=stats.propose_ms,
        score_ms=stats.score_ms,
        network_ms=stats.network_ms,
        cached_prompt_tokens=stats.cached_prompt_tokens,
        proposer_ids=stats.proposer_ids,
        scorer_id=scorer_id,
        retries=retries,
        verification=VERIFICATION,
        preemptions=stats.preemptions,
        rounds_after_hit=stats.rounds_after_hit,
        hits_after_hit=stats.hits_after_hit,
        rounds_after_miss=stats.rounds_after_miss,
        hits_after_miss=stats.hits_after_miss,
    )
