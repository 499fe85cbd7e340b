"""Log probabilities of drawn tokens, for the requests that ask for them.

They are the log_softmax of the raw logits, before any edit, which is vLLM's default.
"""

from __future__ import annotations

from collections.abc import Sequence
from itertools import islice

import torch
from torch import Tensor

from outrider.params import MAX_TOP_LOGPROBS
from outrider.types import TokenLogprobs

MAX_VALUES = 2**23  # log probabilities held at once; 4 bytes each

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
    values: Sequence[Sequence[float]], rows: Sequence[RowLogprobs], counts: Sequence[int]
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


def _token_logprobs(values: Sequence[float], top_logprobs: int) -> TokenLogprobs:
    logprob, *likeliest = values
    top = len(likeliest) // 2
    pairs = zip(map(int, likeliest[top:]), likeliest[:top], strict=True)
    return TokenLogprobs(logprob, tuple(islice(pairs, top_logprobs)))
