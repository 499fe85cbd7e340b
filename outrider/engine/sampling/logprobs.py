"""Log probabilities of drawn tokens and of prompts' own, for the requests that ask for them.

They are the log_softmax of the raw logits, before any edit, which is vLLM's default. Those of
prompts come from the forwards that fill the KV cache.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from itertools import chain, islice

import torch
from torch import Tensor

from outrider.params import MAX_TOP_LOGPROBS, TokenIds
from outrider.types import PromptLogprobs, TokenLogprobs

MAX_VALUES = 2**23  # log probabilities held at once; 4 bytes each

Values = Sequence[Sequence[float]]
"""Rows of `drawn_logprobs`."""
RowLogprobs = tuple[int, int | None]
"""A row's number of logits, and of likeliest tokens to report; None: the row does not ask."""


def drawn_logprobs(
    logits: Tensor, drawn: Tensor, rows: Sequence[RowLogprobs], order: Tensor | None = None
) -> Tensor:
    """Return float64 [m, 1 + 2 * top] for the m rows of `logits` that are asked for, in order.

    logits [n, vocab_size] unedited; drawn int64 [n]. `order` int64 [n] replaces rows of `logits` by
    others. The columns are the log probability of the drawn token, those of the `top` likeliest in
    falling order, and these tokens: numbers of one type for one copy. `top` does not depend on the
    request, and so neither does the order of equal ones.
    """
    index: list[int] = []
    start = 0
    for num_logits, top_logprobs in rows:
        if top_logprobs is not None:
            index += range(start, start + num_logits)
        start += num_logits
    top = min(MAX_TOP_LOGPROBS, logits.shape[1])
    at_once = max(1, MAX_VALUES // logits.shape[1])
    parts = []
    places = torch.tensor(index).to(logits.device, non_blocking=True)
    if order is not None:
        places = order[places]
    for part in torch.split(places, at_once):
        logprobs = logits[part].float().log_softmax(dim=-1)
        own = logprobs.gather(1, drawn[part, None])
        likeliest = logprobs.topk(top, dim=1)
        parts.append(torch.cat((own.double(), likeliest.values, likeliest.indices), dim=1))
    return torch.cat(parts)


def to_token_logprobs(
    values: Values, rows: Sequence[RowLogprobs], counts: Sequence[int]
) -> list[tuple[TokenLogprobs, ...]]:
    """Return `drawn_logprobs` of each row's first `counts[i]` tokens; () if it does not ask."""
    remaining = iter(values)
    result: list[tuple[TokenLogprobs, ...]] = []
    for (num_logits, top_logprobs), count in zip(rows, counts, strict=True):
        if top_logprobs is None:
            result.append(())
            continue
        own = list(islice(remaining, num_logits))
        result.append(tuple(_token_logprobs(each, top_logprobs) for each in own[:count]))
    return result


def split_prompt_logits(
    logits: Tensor, scored: Sequence[TokenIds], num_logits: Sequence[int]
) -> tuple[Tensor, Tensor]:
    """Return the logits to choose from, and `drawn_logprobs` [m, ..] of the prompts' m tokens.

    logits [n, vocab_size] has, row by row, those that tell the prompt's `scored` tokens before the
    `num_logits` to choose from.
    """
    wanted: list[RowLogprobs] = []
    tokens: list[int] = []  # that follow in the prompt; 0 where the target chooses
    chosen: list[int] = []
    for followers, count in zip(scored, num_logits, strict=True):
        wanted += [(len(followers), 0), (count, None)]
        tokens += followers
        chosen += range(len(tokens), len(tokens) + count)
        tokens += [0] * count
    drawn = torch.tensor(tokens).to(logits.device, non_blocking=True)
    values = drawn_logprobs(logits, drawn, wanted)
    index = torch.tensor(chosen, dtype=torch.int64).to(logits.device, non_blocking=True)
    return logits[index], values


def split_rows(values: Values, counts: Iterable[int]) -> list[Values]:
    """Return the values of each row, of which there are `counts`."""
    parts: list[Values] = []
    start = 0
    for count in counts:
        parts.append(values[start : start + count])
        start += count
    return parts


def narrow(values: Values, top: int) -> list[list[float]]:
    """Keep the `top` likeliest of each row, so that waiting for the rest holds little memory."""
    if not values:
        return []
    most = len(values[0]) // 2
    return [[row[0], *row[1 : 1 + top], *row[1 + most : 1 + most + top]] for row in values]


def to_prompt_logprobs(values: Values, top: int) -> PromptLogprobs:
    """Return the logprobs of a whole prompt from its rows that `narrow` left."""
    return PromptLogprobs(
        [row[0] for row in values],
        [int(token) for token in chain.from_iterable(row[1 + top :] for row in values)],
        list(chain.from_iterable(row[1 : 1 + top] for row in values)),
    )


def _token_logprobs(values: Sequence[float], top_logprobs: int) -> TokenLogprobs:
    logprob, *likeliest = values
    top = len(likeliest) // 2
    pairs = zip(map(int, likeliest[top:]), likeliest[:top], strict=True)
    return TokenLogprobs(logprob, tuple(islice(pairs, top_logprobs)))
