"""A request of vLLM as the draft side knows it, and the fields that clients may add to it.

vLLM carries them in `SamplingParams.extra_args`, which its HTTP API calls `vllm_xargs`.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from itertools import chain
from typing import Any, Final

from outrider.errors import InvalidRequestError
from outrider.methods import METHOD_ALIASES, METHODS
from outrider.params import (
    MAX_ADVICE_TOKENS,
    MAX_REFERENCES,
    Advice,
    SamplingParams,
    SpeculationParams,
    StopParams,
    Verification,
    VerificationRule,
    require,
)
from outrider.types import Request
from outrider.vllm import adapter

_PREFIX: Final = "outrider_"
_MAX_CHARS: Final = 256  # of a name


@dataclass(frozen=True, slots=True)
class Extras:
    """The part of a request that is for the draft side only."""

    speculation: SpeculationParams
    tenant: str = ""
    traceparent: str = ""

    def to_args(self) -> dict[str, Any]:
        """Return the entries of `extra_args` that `of` reads."""
        params, advice = self.speculation, self.speculation.advice
        fields = {
            "num_speculative_tokens": params.num_speculative_tokens if params.enabled else 0,
            "methods": list(params.methods),
            "advice": list(advice.token_ids),
            "advice_edit": int(advice.edit),
            "advice_match": [advice.min_token_match, advice.max_token_match],
            "references": [list(tokens) for tokens in advice.references],
            "tenant": self.tenant,
            "traceparent": self.traceparent,
        }
        return {_PREFIX + name: value for name, value in fields.items() if value is not None}

    @staticmethod
    def of(extra_args: Mapping[str, Any] | None) -> Extras:
        """Read them. Raises `InvalidRequestError`."""
        try:
            return Extras._read(extra_args or {})
        except (TypeError, ValueError, OverflowError) as error:
            raise InvalidRequestError(
                f"a field of {_PREFIX}... has a wrong type: {error}"
            ) from error

    @staticmethod
    def _read(extra_args: Mapping[str, Any]) -> Extras:
        given = {k[len(_PREFIX) :]: v for k, v in extra_args.items() if k[:9] == _PREFIX}
        k, methods = given.get("num_speculative_tokens"), given.get("methods") or ()
        given_names = methods.split(",") if isinstance(methods, str) else map(str, methods)
        names = tuple(METHOD_ALIASES.get(name.strip(), name.strip()) for name in given_names)
        for name in names:
            require(name in METHODS, "methods", f"one of {', '.join(METHODS)}, not {name!r:.40}")
        low, high = given.get("advice_match") or (2, 2)
        expected, references = given.get("advice") or (), given.get("references") or ()
        size = len(expected) + sum(map(len, references))  # not read if it is too much for a step
        fits = size <= MAX_ADVICE_TOKENS and len(references) <= MAX_REFERENCES
        require(fits, "advice", f"at most {MAX_ADVICE_TOKENS} tokens in {MAX_REFERENCES} texts")
        advice = Advice(
            token_ids=tuple(map(int, expected)),
            edit=bool(given.get("advice_edit")),
            min_token_match=int(low),
            max_token_match=int(high),
            references=tuple(tuple(map(int, each)) for each in references),
        )
        speculation = SpeculationParams(
            enabled=k is None or int(k) > 0,
            methods=names,
            num_speculative_tokens=None if k is None else int(k),
            advice=advice,
        )
        return Extras(speculation, str(given.get("tenant", "")), str(given.get("traceparent", "")))

    def check(self, vocab_size: int) -> None:
        """Raise `InvalidRequestError` for what no proposer could be sent."""
        advice = self.speculation.advice
        tokens = [*advice.token_ids, *chain.from_iterable(advice.references)]
        known = all(0 <= token < vocab_size for token in tokens)
        require(known, "advice", f"tokens below {vocab_size}")
        for name, text in (("tenant", self.tenant), ("traceparent", self.traceparent)):
            short = len(text) <= _MAX_CHARS and text.isprintable()
            require(short, name, f"at most {_MAX_CHARS} printable characters")


def read_request(
    new: Any, session_id: int, served: adapter.Served, *, coupled: bool
) -> tuple[Request, Extras, frozenset[int]] | None:
    """Return a `NewRequestData` as a request, its extras and its stop tokens.

    None for a request that nobody can draft for: it has embeddings for a prompt. Where vLLM's own
    rejection rule decides, a proposer drafts greedily, as that rule takes a draft for certain.
    Raises `InvalidRequestError` for parameters that no proposer knows, and wrong extras.
    """
    params, prompt = new.sampling_params, new.prompt_token_ids
    if params is None or not prompt:
        return None
    extras = Extras.of(params.extra_args)
    extras.check(served.vocab_size)
    asked = extras.speculation
    limit, rule = served.num_speculative_tokens, VerificationRule.COUPLED
    if asked.num_speculative_tokens is not None:
        limit = min(limit, asked.num_speculative_tokens)
    temperature = params.temperature
    if not coupled:
        temperature, rule = 0.0, VerificationRule.REJECTION
    request = Request(
        session_id=session_id,
        prompt_token_ids=tuple(prompt),
        sampling=SamplingParams(
            temperature=min(2.0, temperature),
            top_k=max(0, min(params.top_k, served.vocab_size)),
            top_p=params.top_p,
            seed=adapter.seed_of(new.req_id, params.seed, served.seed),
            presence_penalty=params.presence_penalty,
            frequency_penalty=params.frequency_penalty,
            repetition_penalty=min(10.0, params.repetition_penalty),
        ),
        stop=StopParams(
            max_tokens=min(params.max_tokens or served.max_model_len, served.max_model_len),
            ignore_eos=params.ignore_eos,
        ),
        speculation=SpeculationParams(
            enabled=asked.enabled,
            methods=asked.methods,
            num_speculative_tokens=limit,
            verification=Verification(rule),
            advice=asked.advice,
        ),
        tenant=extras.tenant,
    )
    ends = (*(params.stop_token_ids or ()), params.eos_token_id)
    return request, extras, frozenset(token for token in ends if token is not None)
