"""Log probabilities of prompts' own tokens, from the forwards that fill the KV cache."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import chain

import torch
from torch import Tensor

from outrider.engine.sampling.logprobs import RowLogprobs, drawn_logprobs
from outrider.engine.step import ScheduledRow
from outrider.types import PromptLogprobs

Values = Sequence[Sequence[float]]
"""Rows of `drawn_logprobs`."""


def split_prompt_logits(logits: Tensor, rows: Sequence[ScheduledRow]) -> tuple[Tensor, Tensor]:
    """Return the logits to choose from, and `drawn_logprobs` [m, ..] of the prompts' m tokens.

    logits [n, vocab_size] has, row by row, those of the prompt before those to choose from.
    """
    wanted: list[RowLogprobs] = []
    tokens: list[int] = []  # that follow in the prompt; 0 where the target chooses
    chosen: list[int] = []
    for row in rows:
        count, first = row.num_prompt_logits, row.slice.start + 1
        wanted += [(count, 0), (row.slice.num_logits, None)]
        tokens += row.seq.token_ids[first : first + count]
        chosen += range(len(tokens), len(tokens) + row.slice.num_logits)
        tokens += [0] * row.slice.num_logits
    followers = torch.tensor(tokens).to(logits.device, non_blocking=True)
    values = drawn_logprobs(logits, followers, wanted)
    index = torch.tensor(chosen, dtype=torch.int64).to(logits.device, non_blocking=True)
    return logits[index], values


def split_rows(values: Values, rows: Sequence[ScheduledRow]) -> list[Values]:
    """Return the values of each row."""
    parts: list[Values] = []
    start = 0
    for row in rows:
        parts.append(values[start : start + row.num_prompt_logits])
        start += row.num_prompt_logits
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
