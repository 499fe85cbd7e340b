"""Converts between protobuf messages and `outrider.types`."""

from __future__ import annotations

import struct
from collections.abc import Mapping, Sequence
from functools import lru_cache
from typing import Any, Final

from google.protobuf.message import Message

from outrider.draft_tree import MAX_DRAFT_PROBS, DraftProbs
from outrider.errors import InvalidRequestError
from outrider.methods import METHOD_ALIASES, METHODS
from outrider.params import (
    NO_ADVICE,
    REQUEST_RULES,
    Advice,
    Constraint,
    ConstraintKind,
    SamplingParams,
    SpeculationParams,
    StopParams,
    Verification,
    VerificationRule,
)
from outrider.types import FinishReason, RequestStats, TokenKind, TokenLogprobs
from outrider.v1 import common_pb2, draft_pb2

KIND_TO_PROTO: Final[Mapping[TokenKind, common_pb2.TokenKind]] = {
    kind: getattr(common_pb2, f"TOKEN_KIND_{kind.name}") for kind in TokenKind
}
KIND_FROM_PROTO: Final[Mapping[int, TokenKind]] = {
    value: kind for kind, value in KIND_TO_PROTO.items()
}

_KINDS_CACHED: Final = 4096
"""Rounds by the kinds of their tokens: few differ."""

FINISH_TO_PROTO: Final[Mapping[FinishReason, common_pb2.FinishReason]] = {
    reason: getattr(common_pb2, f"FINISH_REASON_{reason.name}") for reason in FinishReason
}
FINISH_FROM_PROTO: Final = {value: reason for reason, value in FINISH_TO_PROTO.items()}

RULE_TO_PROTO: Final[Mapping[VerificationRule, common_pb2.VerificationRule]] = {
    rule: getattr(common_pb2, f"VERIFICATION_RULE_{rule.name}") for rule in REQUEST_RULES
}
RULE_FROM_PROTO: Final = {value: rule for rule, value in RULE_TO_PROTO.items()}

_LEAST_TEMPERATURE: Final = 1e-5
"""Lower temperatures are greedy, as in vLLM: logits divided by them would leave float32."""

_SAMPLING_FIELDS: Final = (
    *("temperature", "top_k", "top_p", "min_p", "seed"),
    *("presence_penalty", "frequency_penalty", "repetition_penalty"),
)
_STATS_FIELDS: Final = (
    *("iter_count", "rounds", "drafted", "accepted", "accepted_per_pos", "k_histogram"),
    *("hits", "misses_late", "misses_wrong", "waits", "wait_ms", "fallback_rounds", "queue_ms"),
    *("prefill_ms", "propose_ms", "score_ms", "network_ms", "cached_prompt_tokens"),
    *("proposer_ids", "preemptions", "rounds_after_hit", "hits_after_hit", "rounds_after_miss"),
    *("hits_after_miss", "drafts_per_context", "accepted_per_context"),
)
"""Fields of `RequestStats` and AuxInfo with the same name and meaning."""
_VERIFICATION_FIELDS: Final = ("epsilon", "alpha", "max_candidate_len", "verify_window")


def sampling_from_proto(msg: common_pb2.SamplingParams, *, seed: int) -> SamplingParams:
    """Resolve unset fields to their defaults; `seed` stands in for an unset one.

    Raises `InvalidRequestError` for a value out of range.
    """
    given = _given(msg, *_SAMPLING_FIELDS)
    if 0 < given.get("temperature", 0) < _LEAST_TEMPERATURE:
        given["temperature"] = 0.0
    biases = tuple((bias.token_id, bias.bias) for bias in msg.logit_bias)
    return SamplingParams(**{"seed": seed, **given}, logit_bias=biases)


def sampling_to_proto(params: SamplingParams) -> common_pb2.SamplingParams:
    """Set every field, so that the receiver need not know the defaults."""
    return common_pb2.SamplingParams(
        **{name: getattr(params, name) for name in _SAMPLING_FIELDS},
        logit_bias=[
            common_pb2.LogitBias(token_id=token, bias=bias) for token, bias in params.logit_bias
        ],
    )


def stop_from_proto(msg: common_pb2.StopParams, *, default_max_tokens: int) -> StopParams:
    """Raise `InvalidRequestError` for a value out of range."""
    return StopParams(
        max_tokens=msg.max_tokens if msg.HasField("max_tokens") else default_max_tokens,
        stop_token_ids=frozenset(msg.stop_token_ids),
        ignore_eos=msg.ignore_eos,
        min_tokens=msg.min_tokens,
    )


def stop_to_proto(params: StopParams) -> common_pb2.StopParams:
    """Encode when a request ends."""
    return common_pb2.StopParams(
        max_tokens=params.max_tokens,
        stop_token_ids=sorted(params.stop_token_ids),
        ignore_eos=params.ignore_eos,
        min_tokens=params.min_tokens,
    )


def speculation_from_proto(msg: common_pb2.SpeculationParams) -> SpeculationParams:
    """Resolve aliases of methods, and turn method "none" into `enabled=False`.

    Raises `InvalidRequestError` for a value out of range and for an unknown method. Without an
    attached proposer of the method, a request goes on without drafts.
    """
    if msg.method and msg.methods:
        raise InvalidRequestError("Give method or methods, not both.", param="methods")
    param = "methods" if msg.methods else "method"
    named = tuple(msg.methods) if msg.methods else (msg.method,) * bool(msg.method)
    methods = tuple(METHOD_ALIASES.get(name, name) for name in named)
    if not {*methods} <= {"none", *METHODS} or ("none" in methods and len(methods) > 1):
        known = ", ".join((*METHODS, *METHOD_ALIASES, "none"))
        raise InvalidRequestError(f"{param} must be one of {known}.", param=param)
    enabled = msg.enabled if msg.HasField("enabled") else True
    return SpeculationParams(
        enabled=enabled and methods != ("none",),
        methods=() if methods == ("none",) else methods,
        verification=verification_from_proto(msg.verification),
        advice=advice_from_proto(msg.advice),
        **_given(msg, "num_speculative_tokens"),
    )


def speculation_to_proto(params: SpeculationParams) -> common_pb2.SpeculationParams:
    """Encode how a request is drafted for."""
    return common_pb2.SpeculationParams(
        enabled=params.enabled,
        methods=params.methods,
        num_speculative_tokens=params.num_speculative_tokens,
        verification=verification_to_proto(params.verification),
        advice=advice_to_proto(params.advice),
    )


def verification_from_proto(msg: common_pb2.Verification) -> Verification:
    """Raise `InvalidRequestError` for a value out of range or a rule that does not exist."""
    rule = msg.rule or common_pb2.VERIFICATION_RULE_COUPLED
    if rule not in RULE_FROM_PROTO:
        raise InvalidRequestError("verification.rule is unknown.", param="verification")
    required = msg.rule == common_pb2.VERIFICATION_RULE_COUPLED
    return Verification(
        RULE_FROM_PROTO[rule], **_given(msg, *_VERIFICATION_FIELDS), required=required
    )


def verification_to_proto(params: Verification) -> common_pb2.Verification:
    """Encode the rule that verifies drafts; the default one is set only where it is required."""
    unset = params.rule is VerificationRule.COUPLED and not params.required
    return common_pb2.Verification(
        rule=None if unset else RULE_TO_PROTO[params.rule],
        **{name: getattr(params, name) for name in _VERIFICATION_FIELDS},
    )


def advice_from_proto(msg: common_pb2.Advice) -> Advice:
    """Raise `InvalidRequestError` for a value out of range."""
    return Advice(
        token_ids=tuple(msg.token_ids),
        references=tuple(tuple(reference.token_ids) for reference in msg.references),
        **_given(msg, "edit", "min_token_match", "max_token_match"),
    )


def advice_to_proto(params: Advice) -> common_pb2.Advice | None:
    """Return None where there is no advice."""
    if params == NO_ADVICE:
        return None
    return common_pb2.Advice(
        token_ids=params.token_ids,
        edit=params.edit,
        min_token_match=params.min_token_match,
        max_token_match=params.max_token_match,
        references=[common_pb2.Reference(token_ids=ids) for ids in params.references],
    )


def constraint_from_proto(msg: common_pb2.Constraint) -> Constraint | None:
    """Raise `InvalidRequestError` for an empty or overlong source."""
    kind = msg.WhichOneof("kind")
    if kind is None or (kind == "json_object" and not msg.json_object):
        return None
    return Constraint(ConstraintKind(kind), "" if kind == "json_object" else getattr(msg, kind))


def constraint_to_proto(constraint: Constraint | None) -> common_pb2.Constraint | None:
    """Encode a constraint; None stays None."""
    if constraint is None:
        return None
    source: str | bool = constraint.source or True
    return common_pb2.Constraint(**{constraint.kind.value: source})  # type: ignore[arg-type]


def draft_probs_to_proto(probs: DraftProbs | None) -> draft_pb2.DraftProbs:
    """Encode None, which is a point mass, as an empty message."""
    if probs is None:
        return draft_pb2.DraftProbs()
    packed = struct.pack(f"<{len(probs.probs)}f", *probs.probs)
    return draft_pb2.DraftProbs(token_ids=probs.token_ids, probs=packed)


def draft_probs_from_proto(msg: draft_pb2.DraftProbs) -> DraftProbs:
    """Raise `InvalidRequestError` for odd bytes, or more than is worth converting.

    `DraftTree.validated` checks the rest.
    """
    count, rest = divmod(len(msg.probs), 4)
    if max(count, len(msg.token_ids)) > MAX_DRAFT_PROBS:
        raise InvalidRequestError(
            f"a distribution has at most {MAX_DRAFT_PROBS} tokens", param="draft_probs"
        )
    if rest:
        raise InvalidRequestError("probs are float32 values", param="draft_probs")
    return DraftProbs(tuple(msg.token_ids), struct.unpack(f"<{count}f", msg.probs))


@lru_cache(_KINDS_CACHED)
def kinds_to_bytes(kinds: tuple[TokenKind, ...]) -> bytes:
    """Encode the kinds of tokens, a byte each."""
    return bytes([KIND_TO_PROTO[kind] for kind in kinds])


@lru_cache(_KINDS_CACHED)
def kinds_from_bytes(data: bytes) -> tuple[TokenKind, ...]:
    """Decode the kinds of tokens; an unknown one is plain."""
    return tuple([KIND_FROM_PROTO.get(value, TokenKind.PLAIN) for value in data])


def logprobs_to_proto(logprobs: TokenLogprobs) -> common_pb2.TokenLogprobs:
    """Encode a token's logprobs."""
    return common_pb2.TokenLogprobs(
        logprob=logprobs.logprob,
        top_token_ids=[token for token, _ in logprobs.top],
        top_logprobs=[logprob for _, logprob in logprobs.top],
    )


def prompt_logprobs_to_proto(prompt: Sequence[TokenLogprobs]) -> common_pb2.PromptLogprobs:
    """Encode the logprobs of a prompt's tokens but the first."""
    return common_pb2.PromptLogprobs(
        logprobs=[each.logprob for each in prompt],
        top_token_ids=[token for each in prompt for token, _ in each.top],
        top_logprobs=[logprob for each in prompt for _, logprob in each.top],
    )


def logprobs_from_proto(msg: common_pb2.TokenLogprobs) -> TokenLogprobs:
    """Decode a token's logprobs."""
    top = zip(msg.top_token_ids, msg.top_logprobs, strict=True)
    return TokenLogprobs(msg.logprob, tuple(top))


def usage(stats: RequestStats) -> common_pb2.Usage:
    """Encode the token counts of a request."""
    return common_pb2.Usage(
        prompt_tokens=stats.prompt_tokens,
        completion_tokens=stats.output_tokens,
        cached_prompt_tokens=stats.cached_prompt_tokens,
    )


def aux_info(stats: RequestStats, *, cost_time_ms: float, scorer_id: str) -> common_pb2.AuxInfo:
    """Encode a scorer's account of a request."""
    return common_pb2.AuxInfo(
        **{name: getattr(stats, name) for name in _STATS_FIELDS},
        cost_time=cost_time_ms,
        output_len=stats.output_tokens,
        avg_tokens_per_iter=stats.output_tokens / max(1, stats.iter_count),
        scorer_id=scorer_id,
        verification=stats.verification.value,
        exact=stats.verification.exact,
        by_method=[common_pb2.MethodCounts(**counts._asdict()) for counts in stats.by_method],
    )


def _given(msg: Message, *names: str) -> dict[str, Any]:
    """Return the optional fields that are set."""
    return {name: getattr(msg, name) for name in names if msg.HasField(name)}
