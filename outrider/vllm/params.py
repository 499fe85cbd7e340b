"""Map a request onto the fields of vLLM's `SamplingParams`, or refuse it. Imports no vLLM."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, Final

from outrider.engine.sampling.grammar import mended
from outrider.errors import InvalidRequestError, UnavailableError
from outrider.params import Constraint, ConstraintKind, VerificationRule
from outrider.types import EngineInfo, Request
from outrider.vllm.requests import Extras

_STRUCTURED: Final = {
    ConstraintKind.JSON_OBJECT: "json",
    ConstraintKind.JSON_SCHEMA: "json",
    ConstraintKind.REGEX: "regex",
    ConstraintKind.GRAMMAR: "grammar",
}
"""Fields of vLLM's `StructuredOutputsParams`."""


@dataclass(frozen=True, slots=True)
class Abilities:
    """The abilities of this engine, as it was started."""

    coupled: bool = False
    """vLLM's samplers choose tokens by coupled sampling."""
    num_speculative_tokens: int = 0
    """K of vLLM's speculation, by proposers or its own; 0: it does not speculate."""
    own_method: str | None = None
    """vLLM's own speculation; None: proposers', if any."""
    takes_proposers: bool = False
    """vLLM's worker hosts a draft side, which follows what a request says of speculation."""

    def rule(self, request: Request) -> VerificationRule:
        """Return the rule by which drafts of a request are verified."""
        exact = self.coupled or request.sampling.greedy
        return VerificationRule.COUPLED if exact else VerificationRule.REJECTION


def sampling_fields(request: Request, info: EngineInfo, can: Abilities) -> dict[str, Any]:
    """Return the fields, all of which vLLM has under these names.

    Raises `InvalidRequestError` for what this engine cannot do, and `UnavailableError` for what
    only the scorer can continue that began it.
    """
    _check(request, can)
    sampling, stop = request.sampling, request.stop
    ends = stop.stop_token_ids | (frozenset() if stop.ignore_eos else info.eos_token_ids)
    room = info.max_model_len - len(request.prompt_token_ids)
    return {
        "temperature": sampling.temperature,
        "top_k": sampling.top_k,
        "top_p": sampling.top_p,
        "min_p": sampling.min_p,
        "seed": None if sampling.greedy else sampling.seed,
        "presence_penalty": sampling.presence_penalty,
        "frequency_penalty": sampling.frequency_penalty,
        "repetition_penalty": sampling.repetition_penalty,
        "logit_bias": dict(sampling.logit_bias) or None,
        "max_tokens": min(stop.max_tokens, room),
        "min_tokens": min(stop.min_tokens, room),
        # vLLM takes the model's ends from other files than `read_eos_token_ids`.
        "ignore_eos": True,
        "stop_token_ids": sorted(ends),
        "logprobs": request.top_logprobs,
        "prompt_logprobs": request.prompt_logprobs,
        "detokenize": False,
        "extra_args": (
            Extras(request.speculation, request.tenant).to_args() if can.takes_proposers else None
        ),
    }


def structured_fields(constraint: Constraint) -> dict[str, Any]:
    """Return the fields of vLLM's `StructuredOutputsParams`, for the native engine's language.

    Raises `InvalidRequestError` for a constraint that the native engine would refuse, too.
    """
    try:
        return {_STRUCTURED[constraint.kind]: mended(constraint)}
    except ValueError as error:
        param = constraint.kind.value
        raise InvalidRequestError(f"{param} cannot be used: {error}.", param=param) from error


def _check(request: Request, can: Abilities) -> None:
    speculation, sampling = request.speculation, request.sampling
    verification = speculation.verification
    asked, rule = verification.rule, can.rule(request)
    named = verification.required or asked is not VerificationRule.COUPLED
    other = not asked.exact or (named and asked is not rule)
    if other and not sampling.greedy:  # without randomness all rules are the same
        raise InvalidRequestError(
            f"verification {asked.value} is not what this scorer's engine, vLLM, does: it verifies "
            f"by {rule.value}. Leave verification out, or ask a scorer with --engine native.",
            param="verification",
        )
    if can.num_speculative_tokens and (sampling.logit_bias or sampling.min_p):
        param = "logit_bias" if sampling.logit_bias else "min_p"
        raise InvalidRequestError(
            f"{param} cannot be used: vLLM has none while it speculates. Leave it out, or start "
            "the scorer with --num-speculative-tokens 0.",
            param=param,
        )
    if can.own_method is not None:
        _check_own_speculation(request, can.own_method, can.num_speculative_tokens)
    if request.num_resumed_tokens:
        _check_resumed(request)


def _check_own_speculation(request: Request, method: str, k: int) -> None:
    speculation = request.speculation
    asked = speculation.num_speculative_tokens
    other = speculation.methods and method not in speculation.methods
    if not speculation.enabled or other or asked not in (None, k):
        raise InvalidRequestError(
            f"this scorer speculates by vLLM's own {method} with {k} draft tokens, which no "
            "request can change: leave speculation out.",
            param="speculation",
        )


def _check_resumed(request: Request) -> None:
    sampling = request.sampling
    for name, given in (
        ("presence_penalty", sampling.presence_penalty),
        ("frequency_penalty", sampling.frequency_penalty),
        (request.constraint.kind.value if request.constraint else "", request.constraint),
    ):
        if given:
            raise UnavailableError(
                f"a request with {name} cannot be continued by this scorer: its engine, vLLM, "
                "takes the output so far as part of the prompt."
            )
