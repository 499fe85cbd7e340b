"""The forwards of one drafting round, with as little host work between them as possible."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import NamedTuple, Protocol

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from outrider.draft_tree import DraftProbs
from outrider.drafting.likeliest import draw_of_likeliest, possible, top_candidates
from outrider.engine.batch import PackedBatch, RowSlice, pack
from outrider.engine.sampling.constraint import ConstraintEditor
from outrider.engine.sampling.coupled import Lane, SamplingBatch, sample
from outrider.params import SamplingParams


class ReadyRow(NamedTuple):
    """A row whose catch-up tokens end its committed text of `length` tokens."""

    length: int
    wanted: int  # draft tokens, at least 1
    sampling: SamplingParams
    mask: ConstraintEditor | None = None  # stands after the committed text; used up


class DraftForward(Protocol):
    """What drafts, over a paged KV cache: as `outrider.engine.batch.Model`."""

    @property
    def page_size(self) -> int: ...

    @property
    def device(self) -> torch.device: ...

    def forward(self, batch: PackedBatch) -> Tensor: ...


class ChainDrafter(Protocol):
    """A faster way to do `draft_chains` for few tokens, over the model's own cache."""

    @property
    def max_tokens(self) -> int:
        """Up to so many tokens to catch up, of all rows together, it is faster."""
        ...

    def draft(self, slices: Sequence[RowSlice], ready: Sequence[ReadyRow]) -> list[list[int]]:
        """Feed `slices`, then drafts a chain for each; `ready` are as many."""
        ...

    def feed(self, slices: Sequence[RowSlice]) -> bool:
        """Feed rows that no draft is wanted for; False if there is no faster way."""
        ...


def draft_chains(
    model: DraftForward, slices: Sequence[RowSlice], ready: Sequence[ReadyRow], lead: int = 1
) -> list[list[int]]:
    """Feed `slices`, then drafts a chain for each of `ready`, which are the first of them.

    `ready` is ordered by `wanted`, largest first, and page tables must cover
    length + wanted - lead tokens. `lead` is how far a drawn token is from the position that it was
    drawn at: 1 for a language model, 2 for a draft module, whose row p reads the token at p + 1
    (drafting/heads). All tensors of the later forwards are made at once before the
    first: a step only picks a row of each, and no token comes to the host before the end, unless
    a row is masked.
    """
    with torch.inference_mode():
        batch = pack(slices, model.page_size, model.device)
        steps = _Steps(model, slices[: len(ready)], ready, lead=lead) if ready else None
        logits = model.forward(batch)
        if steps is None:
            logits[-1:, :1].tolist()  # waits for the device: its time belongs to this round
            return []
        drawn = [steps.draw(logits[: len(ready)], 0)]
        for step in range(1, ready[0].wanted):
            steps.follow(drawn[-1])
            drawn.append(steps.draw(model.forward(steps.batch(drawn[-1], step)), step))
        flat = torch.cat(drawn).tolist()
    chains: list[list[int]] = [[] for _ in ready]
    start = 0
    for part in drawn:
        for chain, token in zip(chains, flat[start : start + len(part)], strict=False):
            chain.append(token)
        start += len(part)
    return chains


def sample_chains(
    model: DraftForward, slices: Sequence[RowSlice], ready: Sequence[ReadyRow], lead: int = 1
) -> list[tuple[list[int], list[DraftProbs | None]]]:
    """As `draft_chains`, for rejection: drawn with noise of their own, with what they came from.

    All rows are ready, and none is greedy.
    """
    drawn: list[Tensor] = []
    ids: list[Tensor] = []
    probs: list[Tensor] = []
    with torch.inference_mode():
        batch = pack(slices, model.page_size, model.device)
        steps = _Steps(model, slices, ready, Lane.DRAFT, lead)
        for step in range(ready[0].wanted):
            if step:
                steps.follow(drawn[-1])
                batch = steps.batch(drawn[-1], step)
            params = steps.sampling(step)
            assert params is not None
            logits = steps.masked(model.forward(batch))
            for to, part in zip(
                (drawn, ids, probs), draw_of_likeliest(logits, params), strict=True
            ):
                to.append(part)
        chains: list[tuple[list[int], list[DraftProbs | None]]] = [([], []) for _ in ready]
        for parts in zip(drawn, ids, probs, strict=True):
            rows = zip(chains, *(part.tolist() for part in parts), strict=False)
            for (tokens, drawn_from), token, *likeliest in rows:
                tokens.append(token)
                drawn_from.append(possible(*likeliest))
    return chains


@dataclass(frozen=True, slots=True)
class Forks:
    """Chains of K tokens, and where the true texts may leave them.

    `candidates[r, i]` are the F likeliest tokens, best first, after row r's text and the first i
    tokens of its chain: K + 1 places. The best of each of the first K places is the chain itself.
    """

    candidates: NDArray[np.int32]  # [rows, K + 1, F]
    gaps: NDArray[np.float32]  # [rows, K + 1, F]: how far a score is from the best of its place

    @property
    def chains(self) -> NDArray[np.int32]:
        """[rows, K]"""
        return self.candidates[:, :-1, 0]


def draft_forks(
    model: DraftForward,
    slices: Sequence[RowSlice],
    sampling: Sequence[SamplingParams],
    num_tokens: int,
    fanout: int,
) -> Forks:
    """Feed `slices`, then drafts `num_tokens` after each, with `fanout` candidates per place.

    The last token of a chain is fed, too: page tables must cover `num_tokens` more than the
    slices. No token comes to the host before the end.
    """
    ready = [
        ReadyRow(row.start + len(row.token_ids), num_tokens + 1, params)
        for row, params in zip(slices, sampling, strict=True)
    ]
    tokens: list[Tensor] = []
    gaps: list[Tensor] = []
    with torch.inference_mode():
        batch = pack(slices, model.page_size, model.device)
        steps = _Steps(model, slices, ready)
        for step in range(num_tokens + 1):
            if step:
                batch = steps.batch(tokens[-1][:, 0], step)
            top, gap = top_candidates(model.forward(batch), steps.sampling(step), fanout)
            tokens.append(top)
            gaps.append(gap)
        candidates = torch.stack(tokens, dim=1).to(torch.int32).cpu()
        return Forks(candidates.numpy(), torch.stack(gaps, dim=1).cpu().numpy())


class _Steps:
    """The inputs of the one-token forwards 1, 2, ... and of all draws."""

    def __init__(
        self,
        model: DraftForward,
        slices: Sequence[RowSlice],
        ready: Sequence[ReadyRow],
        lane: Lane = Lane.SHARED,
        lead: int = 1,
    ) -> None:
        self._page_size = page_size = model.page_size
        lengths = [row.length for row in ready]
        num_steps, num_rows = ready[0].wanted, len(ready)
        # Rows that still draft at step j; they come first.
        self._num_rows = [sum(row.wanted > step for row in ready) for step in range(num_steps)]
        # Step j draws the token at length + j from the row at length + j - lead.
        drawn = np.asarray(lengths, np.int64) + np.arange(num_steps)[:, None]  # [steps, rows]
        fed = drawn - lead
        num_pages = -(-(max(lengths) + num_steps - lead) // page_size)
        table = np.zeros((num_rows, num_pages), np.int32)
        for i, row in enumerate(slices):
            pages = row.block_table[:num_pages]
            table[i, : len(pages)] = pages
        slots = table[np.arange(num_rows), fed // page_size] * page_size + fed % page_size
        device = model.device
        # One transfer: [fed, slots, drawn] by step and row, 64-bit as an index must be.
        moved = torch.from_numpy(np.stack((fed, slots, drawn))).to(device, non_blocking=True)
        self._fed, self._slots, self._drawn = moved.unbind()
        self._seq_lens = (self._fed + 1).to(torch.int32)
        self._table = torch.from_numpy(table).to(device, non_blocking=True)
        self._cu_seqlens = torch.arange(num_rows + 1, dtype=torch.int32, device=device)
        self._index = torch.arange(num_rows, device=device)
        self._ones = (1,) * num_rows
        self._lengths = lengths
        self._behind = lead - 1
        self._masks = [(i, row.mask) for i, row in enumerate(ready) if row.mask is not None]
        self._sampling: SamplingBatch | None = None
        if not all(row.sampling.greedy for row in ready):
            params = [row.sampling for row in ready]
            self._sampling = SamplingBatch.build(params, lengths, device, [lane] * num_rows)

    def batch(self, tokens: Tensor, step: int) -> PackedBatch:
        """Feed the tokens [rows] that were drawn at `step` - 1."""
        n = self._num_rows[step]
        return PackedBatch(
            input_ids=tokens[:n],
            positions=self._fed[step, :n],
            slot_mapping=self._slots[step, :n],
            cu_seqlens_q=self._cu_seqlens[: n + 1],
            seq_lens=self._seq_lens[step, :n],
            block_table=self._table[:n],
            logits_index=self._index[:n],
            query_lens=self._ones[:n],
            context_lens=tuple([length + step - self._behind for length in self._lengths[:n]]),
            page_size=self._page_size,
        )

    def draw(self, logits: Tensor, step: int) -> Tensor:
        """The tokens [rows] at position length + `step`."""
        logits = self.masked(logits)
        params = self.sampling(step)
        return logits.argmax(dim=-1) if params is None else sample(logits, params)

    def masked(self, logits: Tensor) -> Tensor:
        """`logits` [rows, vocab], changed in place where rows are constrained."""
        for i, mask in self._masks:
            if i < len(logits):
                mask.edit(logits[i : i + 1], ())
        return logits

    def follow(self, tokens: Tensor) -> None:
        """Move the masks by the tokens [rows] that were drawn; waits for them if there are any."""
        if self._masks:
            drawn = tokens.tolist()
            for i, mask in self._masks:
                mask.commit(tuple(drawn[i : i + 1]))

    def sampling(self, step: int) -> SamplingBatch | None:
        """How the tokens at position length + `step` are drawn; None: all greedily."""
        if self._sampling is None:
            return None
        n = self._num_rows[step]
        params = self._sampling
        return SamplingBatch(
            temperature=params.temperature[:n],
            top_k=params.top_k[:n],
            top_p=params.top_p[:n],
            min_p=params.min_p[:n],
            seed=params.seed[:n],
            position=self._drawn[step, :n],
            all_greedy=False,
            any_greedy=params.any_greedy,
            any_sorted=params.any_sorted,
            any_min_p=params.any_min_p,
        )
