"""The loop that drafts chains: run eagerly here, and captured in `draft_model` and heads."""

from __future__ import annotations

import itertools
from collections.abc import Callable, Sequence

import torch
from torch import Tensor

from outrider.draft_tree import DraftProbs
from outrider.drafting.confidence import confidences_of
from outrider.drafting.drafters import Chain, DraftInput, FedRows, Forks
from outrider.drafting.graphs.batches import DraftForward, LoopBatches, eager_batches
from outrider.drafting.likeliest import draw_of_likeliest, possible, top_candidates
from outrider.engine.batch import PackedBatch, pack
from outrider.engine.sampling.noise import Lane
from outrider.engine.sampling.sample import SamplingBatch, sample

Forward = Callable[[PackedBatch], Tensor]
Draw = Callable[[Tensor, SamplingBatch | None], tuple[Tensor, ...]]
"""Returns tokens int64 [n] of logits [n, vocab], and perhaps more about them."""


def run_loop(
    forward: Forward, batches: LoopBatches, num_draws: int, draw: Draw
) -> list[tuple[Tensor, ...]]:
    """Feed the catch-up and draw, then feed what was drawn and draw again. May be captured."""
    batch = batches.catch_up
    drawn: list[tuple[Tensor, ...]] = []
    for i in range(num_draws):
        if i:
            batch = batches.step(drawn[-1][0], i - 1)
        drawn.append(draw(forward(batch)[: batches.num_rows[i]], batches.sampling_at(i)))
    return drawn


def chain_loop(
    forward: Forward,
    batches: LoopBatches,
    num_draws: int,
    choose: Callable[[Tensor, SamplingBatch], Tensor],
) -> Tensor:
    """Return the chains of a captured loop: int32 [rows, draws]."""

    def draw(logits: Tensor, batch: SamplingBatch | None) -> tuple[Tensor, ...]:
        assert batch is not None
        return (choose(logits, batch),)

    drawn = run_loop(forward, batches, num_draws, draw)
    return torch.stack([tokens for (tokens,) in drawn], dim=1).to(torch.int32)


def draft_chains(
    model: DraftForward,
    rows: Sequence[DraftInput],
    lead: int = 1,
    *,
    with_confidences: bool = False,
) -> list[Chain]:
    """Feed rows, as `eager_batches` takes them, and draft a chain for each that wants one.

    No token comes to the host before the end, unless a row is masked.
    """
    draw = _choose_of_two if with_confidences else _choose
    with torch.inference_mode():
        if not rows[0].wanted:
            feed(model, rows)[-1:, :1].tolist()  # a wait: the device's time belongs to this round
            return []
        batches = eager_batches(rows, model, lead=lead)
        drawn = run_loop(model.forward, batches, rows[0].wanted, _masked(draw, rows))
        flat, *gaps = [torch.cat(parts).cpu() for parts in zip(*drawn, strict=True)]
    of_all = confidences_of(gaps[0][:, 1].numpy()) if gaps else b""
    ends = itertools.accumulate([len(part[0]) for part in drawn], initial=0)
    starts, tokens = [*ends][:-1], flat.tolist()
    chains: list[Chain] = []
    for i, row in enumerate(rows):
        if row.wanted:
            places = [start + i for start in starts[: row.wanted]]
            confidences = bytes([of_all[place] for place in places]) if gaps else b""
            chains.append(([tokens[place] for place in places], confidences))
    return chains


def sample_chains(
    model: DraftForward, rows: Sequence[DraftInput], lead: int = 1
) -> list[tuple[list[int], list[DraftProbs | None]]]:
    """Draft chains as `draft_chains`, for rejection: with noise of their own and distributions.

    All rows want drafts, and none is greedy.
    """
    chains: list[tuple[list[int], list[DraftProbs | None]]] = [([], []) for _ in rows]
    with torch.inference_mode():
        batches = eager_batches(rows, model, lead=lead, lane=Lane.DRAFT)
        drawn = run_loop(model.forward, batches, rows[0].wanted, _masked(_draw_sampled, rows))
        for parts in drawn:
            by_row = zip(chains, *(part.tolist() for part in parts), strict=False)
            for (tokens, drawn_from), token, *likeliest in by_row:
                tokens.append(token)
                drawn_from.append(possible(*likeliest))
    return chains


def draft_forks(model: DraftForward, rows: FedRows, num_tokens: int, fanout: int) -> Forks:
    """Feed rows, then draft `num_tokens` after each, with `fanout` candidates per place.

    The last token of a chain is fed, too: page tables must cover `num_tokens` more than the slices.
    """
    pairs = zip(rows.slices, rows.sampling, strict=True)
    inputs = [DraftInput(row, num_tokens + 1, params) for row, params in pairs]

    def draw(logits: Tensor, batch: SamplingBatch | None) -> tuple[Tensor, ...]:
        top, gaps = top_candidates(logits, batch, fanout)
        return top[:, 0], top, gaps

    with torch.inference_mode():
        batches = eager_batches(inputs, model)
        drawn = run_loop(model.forward, batches, num_tokens + 1, draw)
        _, tops, gaps = zip(*drawn, strict=True)
        candidates = torch.stack(tops, dim=1).to(torch.int32).cpu()
        return Forks(candidates.numpy(), torch.stack(gaps, dim=1).cpu().numpy())


def feed(model: DraftForward, rows: Sequence[DraftInput]) -> Tensor:
    """Feed rows that want no draft; return their logits, which the device may still compute."""
    return model.forward(pack([row.slice for row in rows], model.page_size, model.device))


def _choose(logits: Tensor, batch: SamplingBatch | None) -> tuple[Tensor, ...]:
    return (logits.argmax(dim=-1) if batch is None else sample(logits, batch),)


def _choose_of_two(logits: Tensor, batch: SamplingBatch | None) -> tuple[Tensor, ...]:
    top, gaps = top_candidates(logits, batch, 2)
    return top[:, 0], gaps


def _draw_sampled(logits: Tensor, batch: SamplingBatch | None) -> tuple[Tensor, ...]:
    assert batch is not None, "no row is greedy"
    return draw_of_likeliest(logits, batch)


def _masked(draw: Draw, rows: Sequence[DraftInput]) -> Draw:
    """Return `draw` within the rows' constraints, which waits for the tokens if there are any."""
    masks = [(i, row.mask) for i, row in enumerate(rows) if row.mask is not None]
    if not masks:
        return draw

    def masked_draw(logits: Tensor, batch: SamplingBatch | None) -> tuple[Tensor, ...]:
        for i, mask in masks:
            if i < len(logits):
                mask.edit(logits[i : i + 1], ())
        drawn = draw(logits, batch)
        tokens = drawn[0].tolist()
        for i, mask in masks:
            mask.commit(tuple(tokens[i : i + 1]))
        return drawn

    return masked_draw
