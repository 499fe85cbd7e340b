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


async def within_budget(
    stream: Stream,
    request: GenerationRequest,
    budget: ThinkingBudget,
    account: Account,
    spell: Callable[[int], bytes],
) -> AsyncGenerator[Round, None]:
    """Yield the rounds of a request; its reasoning ends after as many tokens as it may have.

    The tokens that end it are part of the output. What follows is what the model writes after
    them, at the same positions with any draft.
    """
    if budget.max_tokens >= request.stop.max_tokens:
        async with aclosing(stream(request)) as rounds:
            async for round_ in rounds:
                yield round_
        return
    tokens: list[int] = []
    if budget.max_tokens:
        stop = replace(
            request.stop,
            max_tokens=budget.max_tokens,
            min_tokens=min(request.stop.min_tokens, budget.max_tokens),
        )
        async with aclosing(stream(replace(request, stop=stop))) as rounds:
            async for round_ in rounds:
                tokens += round_.token_ids
                spent = round_.finish_reason is FinishReason.LENGTH
                if spent and len(tokens) == budget.max_tokens:
                    yield round_._replace(finish_reason=None)
                    break
                yield round_
                if round_.finish_reason is not None:
                    return
    left = request.stop.max_tokens - len(tokens)
    if budget.goes_on(b"".join(map(spell, tokens))):
        inserted = budget.end[:left]
        left -= len(inserted)
        tokens += inserted
        account.insert(len(inserted))
        yield Round(
            inserted,
            (TokenKind.PLAIN,) * len(inserted),
            None if left else FinishReason.LENGTH,
            () if request.top_logprobs is None else (TokenLogprobs(0.0, ()),) * len(inserted),
        )
        if not left:
            return
    stop = replace(
        request.stop, max_tokens=left, min_tokens=max(0, request.stop.min_tokens - len(tokens))
    )
    rest = replace(
        request,
        prompt_token_ids=(*request.prompt_token_ids, *tokens),
        num_resumed=len(tokens),
        stop=stop,
    )
    async with aclosing(stream(rest)) as rounds:
        async for round_ in rounds:
            yield round_
