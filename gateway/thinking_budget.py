"""Reasoning that is ended after so many tokens, and the answer behind it."""

from __future__ import annotations

from collections.abc import AsyncGenerator, Callable
from contextlib import aclosing
from dataclasses import replace

from gateway.account import Account
from gateway.intake import GenerationRequest, ThinkingBudget
from gateway.routing.rounds import Round
from outrider.types import FinishReason, TokenKind, TokenLogprobs

Stream = Callable[[GenerationRequest], AsyncGenerator[Round, None]]


class Reasoning:
    """The parts of a request whose reasoning ends after as many tokens as it may have.

    The tokens that end it are part of the output. What follows is what the model writes after
    them, at the same positions with any draft.
    """

    def __init__(
        self, request: GenerationRequest, budget: ThinkingBudget, spell: Callable[[int], bytes]
    ) -> None:
        self._request = request
        self._budget = budget
        self._spell = spell
        self._tokens: list[int] = []  # of the first part
        self._bounded = budget.max_tokens < request.stop.max_tokens
        self.first: GenerationRequest | None = request
        """The part that begins the request; None if nothing may be reasoned."""
        if self._bounded:
            most = budget.max_tokens
            min_tokens = min(request.stop.min_tokens, most)
            stop = replace(request.stop, max_tokens=most, min_tokens=min_tokens) if most else None
            self.first = None if stop is None else replace(request, stop=stop)

    def spent(self, round_: Round) -> bool:
        """Return whether this round of the first part used up what may be reasoned."""
        self._tokens += round_.token_ids
        ended = round_.finish_reason is FinishReason.LENGTH
        return self._bounded and ended and len(self._tokens) == self._budget.max_tokens

    def rest(self) -> tuple[Round | None, GenerationRequest | None]:
        """Return what ends the reasoning, if it goes on, and the part that follows, if any."""
        request, tokens, ends = self._request, self._tokens, None
        left = request.stop.max_tokens - len(tokens)
        if self._budget.goes_on(b"".join(map(self._spell, tokens))):
            inserted = self._budget.end[:left]
            left -= len(inserted)
            tokens = [*tokens, *inserted]
            ends = Round(
                inserted,
                (TokenKind.PLAIN,) * len(inserted),
                None if left else FinishReason.LENGTH,
                () if request.top_logprobs is None else (TokenLogprobs(0.0, ()),) * len(inserted),
            )
        if not left:
            return ends, None
        min_tokens = max(0, request.stop.min_tokens - len(tokens))
        return ends, replace(
            request,
            prompt_token_ids=(*request.prompt_token_ids, *tokens),
            num_resumed=len(tokens),
            stop=replace(request.stop, max_tokens=left, min_tokens=min_tokens),
        )


async def within_budget(
    stream: Stream,
    request: GenerationRequest,
    budget: ThinkingBudget,
    account: Account,
    spell: Callable[[int], bytes],
) -> AsyncGenerator[Round, None]:
    """Yield the rounds of all parts of a request, see `Reasoning`."""
    reasoning = Reasoning(request, budget, spell)
    if reasoning.first is not None:
        async with aclosing(stream(reasoning.first)) as rounds:
            async for round_ in rounds:
                if reasoning.spent(round_):
                    yield round_._replace(finish_reason=None)
                    break
                yield round_
                if round_.finish_reason is not None:
                    return
    ends, rest = reasoning.rest()
    if ends is not None:
        account.insert(len(ends.token_ids))
        yield ends
    if rest is not None:
        async with aclosing(stream(rest)) as rounds:
            async for round_ in rounds:
                yield round_
