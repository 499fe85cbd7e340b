"""Log probabilities of prompts' own tokens, from the forwards that fill the KV cache."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from itertools import chain

import torch
from torch import Tensor

from outrider.engine.sampling.logprobs import RowLogprobs, drawn_logprobs
from outrider.params import TokenIds
from outrider.types import PromptLogprobs

Values = Sequence[Sequence[float]]
"""Rows of `drawn_logprobs`."""


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
