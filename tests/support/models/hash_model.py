"""A model without weights that notices every mistake in paging.

Its "KV cache" stores token ids and positions in the slots that a forward is told to write. Each
row of logits is a pseudo-random function of the whole context, read back through the block table:
a stale page, a wrong slot, a bad rollback or a wrongly shared prefix changes the output.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import torch
from torch import Tensor

from outrider.engine.batch import PackedBatch
from outrider.engine.sampling.sample import SamplingBatch, sample
from outrider.params import SamplingParams
from outrider.types import FinishReason, Request

MASK = np.uint64(0xFFFFFFFF)


class HashModel:
    """Implements `outrider.engine.batch.Model`. `peak` sharpens the distribution."""

    def __init__(
        self,
        vocab_size: int = 32,
        page_size: int = 4,
        num_pages: int = 64,
        max_model_len: int = 64,
        *,
        peak: float = 3.0,
    ) -> None:
        self.vocab_size = vocab_size
        self.page_size = page_size
        self.num_pages = num_pages
        self.max_model_len = max_model_len
        self.device = torch.device("cpu")
        self.peak = peak
        self.forwards = 0
        self.fail_next = False
        self._slots = np.full(num_pages * page_size, -1, np.int64)
        self._positions = np.full(num_pages * page_size, -1, np.int64)

    def forward(self, batch: PackedBatch) -> Tensor:
        self.forwards += 1
        slots = batch.slot_mapping.numpy()
        assert len(np.unique(slots)) == len(slots), "two tokens in one slot"
        self._slots[slots] = batch.input_ids.numpy()
        self._positions[slots] = batch.positions.numpy()
        if self.fail_next:
            self.fail_next = False
            raise RuntimeError("the device fell over")
        rows = torch.searchsorted(batch.cu_seqlens_q[1:].long(), batch.logits_index, right=True)
        states = [
            context_hash(self._context(batch, row, index))
            for row, index in zip(rows.tolist(), batch.logits_index.tolist(), strict=True)
        ]
        return torch.from_numpy(self._logits(np.array(states, np.uint64)))

    def copy_pages(self, source: Tensor, target: Tensor) -> None:
        for held in (self._slots, self._positions):
            pages = held.reshape(-1, self.page_size)  # a view
            pages[target.numpy()] = pages[source.numpy()]

    def move_slots(self, source: Tensor, target: Tensor) -> None:
        for held in (self._slots, self._positions):
            moved = held[source.numpy()]
            held[target.numpy()] = moved

    def _context(self, batch: PackedBatch, row: int, index: int) -> list[int]:
        """Tokens at positions 0 .. position of token `index`, as the pages hold them."""
        places = np.arange(int(batch.positions[index]) + 1)
        if batch.trees is not None and (lineage := int(batch.trees.visible[index])):
            first = int(batch.trees.starts[row])
            nodes = [first + i for i in range(64) if lineage >> i & 1]
            assert first + len(nodes) == len(places), "a position that is not its depth's"
            places[first:] = nodes
        slots = self._slots_of(batch, row, places)
        expected = np.arange(len(places))
        assert (self._positions[slots] == expected).all(), "a slot holds another position"
        return self._slots[slots].tolist()  # type: ignore[no-any-return]

    def _slots_of(self, batch: PackedBatch, row: int, places: np.ndarray) -> np.ndarray:
        """The slots at `places` of a row's pages."""
        pages = batch.block_table[row].numpy()[places // self.page_size]
        slots: np.ndarray = pages * self.page_size + places % self.page_size
        return slots

    def _logits(self, states: np.ndarray) -> np.ndarray:
        x = (np.arange(self.vocab_size, dtype=np.uint64) * 0x9E3779B1 + states[:, None]) & MASK
        x = ((x ^ (x >> 16)) * 0x21F0AAAD) & MASK
        x = ((x ^ (x >> 15)) * 0x735A2D97) & MASK
        return ((x ^ (x >> 15)) * (self.peak * 2.0**-31) - self.peak).astype(np.float32)

    def logits_of(self, context: Sequence[int]) -> np.ndarray:
        """float32 [vocab_size]: what a forward over just this context returns."""
        return self._logits(np.array([context_hash(context)], np.uint64))[0]

    def greedy_text(self, prompt: Sequence[int], length: int) -> list[int]:
        """What it says without speculation at temperature 0, straight from its definition."""
        text = list(prompt)
        for _ in range(length):
            text.append(int(self.logits_of(text).argmax()))
        return text[len(prompt) :]


def context_hash(context: Sequence[int]) -> int:
    """32 bits that depend on every token and its place."""
    state = 0x811C9DC5
    for token in context:
        state = ((state ^ (token + 1)) * 0x01000193 + 0x9E3779B9) & 0xFFFFFFFF
        state ^= state >> 15
    return state


class Sequential:
    """What a HashModel says to one request alone, one token at a time: the truth for tests."""

    def __init__(self, model: HashModel) -> None:
        self._model = model
        self._streams: dict[tuple[object, ...], list[int]] = {}

    def tokens(
        self,
        prompt: tuple[int, ...],
        sampling: SamplingParams,
        count: int,
        *,
        resumed: int = 0,
        stops: frozenset[int] = frozenset(),
        min_tokens: int = 0,
    ) -> list[int]:
        """The first `count` tokens after `prompt`, going on after a stop.

        The prompt's last `resumed` tokens count as output; no stop is among the first `min_tokens`.
        """
        masked = stops if min_tokens else frozenset()
        resumed = resumed if sampling.has_penalties else 0
        stream = self._streams.setdefault((prompt, sampling, resumed, masked, min_tokens), [])
        while len(stream) < count:
            context = [*prompt, *stream]
            banned = masked if len(stream) < min_tokens else frozenset()
            written = len(prompt) - resumed
            logits = edited(self._model.logits_of(context), sampling, context, written, banned)
            if sampling.greedy:
                stream.append(int(logits.argmax()))
            else:
                batch = SamplingBatch.build([sampling], [len(context)])
                stream.append(int(sample(torch.from_numpy(logits)[None], batch)))
        return stream[:count]

    def stream(self, request: Request, count: int, eos: frozenset[int]) -> list[int]:
        """The first `count` tokens of `request`, going on after its stop."""
        return self.tokens(
            request.prompt_token_ids,
            request.sampling,
            count,
            resumed=request.num_resumed_tokens,
            stops=_stops(request, eos),
            min_tokens=request.stop.min_tokens,
        )

    def output(
        self, request: Request, max_model_len: int, eos: frozenset[int]
    ) -> tuple[list[int], FinishReason]:
        """What `request` must return."""
        stop = request.stop
        room = min(stop.max_tokens, max_model_len - len(request.prompt_token_ids))
        tokens = self.stream(request, room, eos)
        for i, token in enumerate(tokens):
            if token in _stops(request, eos):
                return tokens[:i], FinishReason.STOP
        return tokens, FinishReason.LENGTH

    def logprobs(self, prompt: tuple[int, ...], tokens: Sequence[int]) -> np.ndarray:
        """float64 [len(tokens), vocab_size]: of what may come instead of each token."""
        contexts = [[*prompt, *tokens[:i]] for i in range(len(tokens))]
        logits = np.array([self._model.logits_of(c) for c in contexts], np.float64)
        return logits - np.log(np.exp(logits).sum(axis=1, keepdims=True))


def _stops(request: Request, eos: frozenset[int]) -> frozenset[int]:
    return request.stop.stop_token_ids | (frozenset() if request.stop.ignore_eos else eos)


def edited(
    logits: np.ndarray,
    params: SamplingParams,
    context: Sequence[int],
    num_prompt_tokens: int,
    banned: frozenset[int],
) -> np.ndarray:
    """One row of logits after masks, biases and penalties, token by token as it is written down.

    Keeps the dtype of `logits` [vocab_size].
    """
    result, of = logits.copy(), logits.dtype.type
    output = list(context[num_prompt_tokens:])
    bias = dict(params.logit_bias)
    for token in range(len(logits)) if bias or banned or params.has_penalties else ():
        value = of(-np.inf) if token in banned else result[token]
        value += of(bias.get(token, 0.0))
        if token in context:
            repetition = of(params.repetition_penalty)
            value = value / repetition if value > 0 else value * repetition
        count = output.count(token)
        value -= of(params.frequency_penalty) * of(count) + of(params.presence_penalty) * of(
            count > 0
        )
        result[token] = value
    return result
