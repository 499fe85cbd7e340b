"""Edits of logits before a token is chosen: masks, then biases and penalties.

One row of logits is processed in vLLM's order: constraint mask, min_tokens mask, logit_bias,
repetition, frequency and presence penalties; then the greedy argmax, or temperature, top_k, top_p,
min_p and noise (sample.py). Masks are a sequence's `LogitsEditor`s and run one by one. Biases and
penalties touch few tokens, and run for all rows at once (`adjust`).

Their state follows from the committed tokens alone, so rejected drafts and preemption need no
undoing.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple, Protocol

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from outrider.params import SamplingParams, TokenIds
from outrider.types import Request


class LogitsEditor(Protocol):
    """Edits the logits of one sequence. Only the scheduler commits to it."""

    def edit(self, logits: Tensor, draft: TokenIds, /) -> None:
        """Edit logits float32 [len(draft) + 1, vocab_size] in place.

        Row j follows the output so far and draft[:j]: the result must be what `edit` without a
        draft gives once draft[:j] is committed.
        """

    def commit(self, tokens: TokenIds, /) -> None:
        """Take in output tokens, trimmed at a stop."""


class MinTokens:
    """Masks stop tokens before `min_tokens` tokens, unless an earlier mask left nothing else."""

    def __init__(self, stop_ids: frozenset[int], min_tokens: int) -> None:
        self._stop_ids = sorted(stop_ids)
        self._ids: Tensor | None = None  # those of the vocabulary, where the logits are
        self._missing = min_tokens

    def edit(self, logits: Tensor, _draft: TokenIds) -> None:
        if self._missing <= 0:
            return
        early = logits[: self._missing]
        if self._ids is None:
            ids = torch.tensor(
                [i for i in self._stop_ids if i < logits.shape[1]], dtype=torch.int64
            )
            self._ids = ids.to(logits.device, non_blocking=True)
        masked = early.index_fill(1, self._ids, -torch.inf)
        possible = masked.amax(dim=1, keepdim=True) > -torch.inf
        early.copy_(torch.where(possible, masked, early))

    def commit(self, tokens: TokenIds) -> None:
        self._missing -= len(tokens)


class Adjustments(NamedTuple):
    """Changes of e single logits.

    x becomes y / divisor - penalty if y = x + bias is positive, else y * divisor - penalty.
    """

    rows: NDArray[np.int64]  # [e]
    token_ids: NDArray[np.int64]  # [e]; no token twice in a row
    bias: NDArray[np.float32]  # [e]
    divisor: NDArray[np.float32]  # [e]
    penalty: NDArray[np.float32]  # [e]


class Adjuster:
    """Applies logit_bias and the penalties of one sequence. Only the scheduler commits to it.

    With c the number of times that the output holds a token: the repetition penalty divides a
    positive and multiplies a negative logit where c > 0 or the prompt holds the token (Keskar et
    al., arXiv 1909.05858; the prompt as in Hugging Face); frequency_penalty * c and
    presence_penalty * [c > 0] are subtracted (OpenAI).
    """

    def __init__(self, params: SamplingParams, prompt: TokenIds, output: TokenIds) -> None:
        self._params = params
        self._places: dict[int, int] = {}  # of tokens, in the arrays
        self._token_ids = np.zeros(0, np.int64)
        self._bias = np.zeros(0, np.float32)
        self._in_prompt = np.zeros(0, np.bool_)
        self._counts = np.zeros(0, np.float32)  # in the output
        biased = self._places_of([token for token, _ in params.logit_bias])
        self._bias[biased] = [bias for _, bias in params.logit_bias]
        if params.repetition_penalty != 1.0:
            held = self._places_of(prompt)
            self._in_prompt[held] = True
        self.commit(output)

    def commit(self, tokens: TokenIds) -> None:
        """Take in output tokens, trimmed at a stop."""
        if self._params.has_penalties:
            places = self._places_of(tokens)
            np.add.at(self._counts, places, 1)

    def adjustments(self, draft: TokenIds) -> Adjustments:
        """Return the changes of the rows after the output so far and draft[:j], for every j."""
        num_rows = len(draft) + 1
        drafted = self._places_of(draft) if self._params.has_penalties else ()
        counts = np.tile(self._counts, (num_rows, 1))  # [rows, tokens]
        for j, place in enumerate(drafted, start=1):
            counts[j:, place] += 1
        present = counts > 0
        repeated = present | self._in_prompt
        params = self._params
        frequency = np.float32(params.frequency_penalty) * counts
        presence = np.float32(params.presence_penalty) * present.astype(np.float32)
        return Adjustments(
            rows=np.repeat(np.arange(num_rows), len(self._places)),
            token_ids=np.tile(self._token_ids, num_rows),
            bias=np.tile(self._bias, num_rows),
            divisor=np.where(
                repeated, np.float32(params.repetition_penalty), np.float32(1)
            ).ravel(),
            penalty=(frequency + presence).ravel(),
        )

    def _places_of(self, tokens: Sequence[int]) -> list[int]:
        """Return the tokens' places in the arrays; new tokens get one."""
        new = [token for token in dict.fromkeys(tokens) if token not in self._places]
        if new:
            self._places |= {token: i for i, token in enumerate(new, start=len(self._places))}
            self._token_ids = np.append(self._token_ids, np.array(new, np.int64))
            self._bias, self._in_prompt, self._counts = (
                np.append(held, np.zeros(len(new), held.dtype))
                for held in (self._bias, self._in_prompt, self._counts)
            )
        return [self._places[token] for token in tokens]


def adjust(logits: Tensor, adjustments: Sequence[Adjustments]) -> None:
    """Apply `adjustments`, whose rows are rows of `logits`, float32 [n, vocab_size], in place."""
    rows, token_ids, bias, divisor, penalty = (
        torch.from_numpy(np.concatenate(parts)).to(logits.device, non_blocking=True)
        for parts in zip(*adjustments, strict=True)
    )
    values = logits[rows, token_ids] + bias
    values = torch.where(values > 0, values / divisor, values * divisor) - penalty
    logits[rows, token_ids] = values


def make_editors(request: Request, stop_ids: frozenset[int]) -> tuple[LogitsEditor, ...]:
    """Return the masks of the request's stop parameters."""
    if not stop_ids or request.stop.min_tokens == 0:
        return ()
    return (MinTokens(stop_ids, request.stop.min_tokens),)


def make_adjuster(request: Request) -> Adjuster | None:
    """Return the request's biases and penalties; None if it has none."""
    params = request.sampling
    if not params.logit_bias and not params.has_penalties:
        return None
    written = len(request.prompt_token_ids) - request.num_resumed_tokens
    return Adjuster(params, request.prompt_token_ids[:written], request.prompt_token_ids[written:])
