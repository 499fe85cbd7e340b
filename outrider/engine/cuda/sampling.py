"""`sample` on the device: cuts without a sort, and no noise stored."""

from __future__ import annotations

import torch
import triton
from torch import Tensor

from outrider.engine.cuda.kernels.sampling import (
    choose_block_kernel,
    noised_kernel,
    top_block_kernel,
    top_row_kernel,
)
from outrider.engine.cuda.kernels.topk_topp import choose_row_kernel, verify_row_kernel
from outrider.engine.sampling.coupled import SamplingBatch
from outrider.engine.sampling.verify import VerifyBatch

_BLOCK = 1024  # of the vocabulary per program: enough programs for a whole GPU at one row
_WARPS = 2
_LANES, _ROW_WARPS = 8192, 16  # of a row, which one program goes through


def sample(logits: Tensor, batch: SamplingBatch) -> Tensor:
    """The token each row draws, as `outrider.engine.sampling.coupled.sample` does: int64 [n].

    logits [n, vocab], any dtype; of `batch` only the tensors are read. Of equal scores the lowest
    token wins. The hash has the same bits as on a CPU; its logarithm may differ in the last bit of
    a float64, and a sum of weights that cuts in that of a float32. Safe to capture in a CUDA graph.
    """
    return _chosen(logits, batch, repeat=1, ahead=0)


def choose_and_verify(logits: Tensor, batch: VerifyBatch, out: Tensor) -> None:
    """As `outrider.engine.sampling.verify.choose_and_verify`, drawing as `sample` does.

    All tensors contiguous. Safe to capture in a CUDA graph.
    """
    rows, width = batch.input_ids.shape
    chosen = _chosen(logits, batch.sampling, repeat=width, ahead=1)
    verify_row_kernel[(rows,)](
        chosen,
        batch.input_ids,
        batch.draft_lens,
        out,
        width,
        triton.next_power_of_2(width),
        num_warps=1,
    )


def _chosen(logits: Tensor, batch: SamplingBatch, *, repeat: int, ahead: int) -> Tensor:
    """The token each row draws: int64 [n].

    `repeat` rows of logits share a row of `batch` but for positions; each draws the token `ahead`
    of its position.
    """
    n, vocab = logits.shape
    assert logits.stride(1) == 1
    blocks = triton.cdiv(vocab, _BLOCK)
    best = torch.empty((n, blocks), dtype=torch.float32, device=logits.device)
    token = torch.empty((n, blocks), dtype=torch.int32, device=logits.device)
    chosen = torch.empty(n, dtype=torch.int64, device=logits.device)
    choose_block_kernel[(n, blocks)](
        logits,
        batch.temperature,
        batch.seed,
        batch.position,
        best,
        token,
        logits.stride(0),
        vocab,
        repeat,
        ahead,
        _BLOCK,
        logits.is_cuda,
        num_warps=_WARPS,
    )
    choose_row_kernel[(n,)](
        logits,
        batch.temperature,
        batch.top_k,
        batch.top_p,
        batch.min_p,
        batch.seed,
        batch.position,
        best,
        token,
        chosen,
        logits.stride(0),
        vocab,
        blocks,
        repeat,
        ahead,
        triton.next_power_of_2(blocks),
        _BLOCK,
        min(_LANES, triton.next_power_of_2(vocab)),
        logits.is_cuda,
        num_warps=_ROW_WARPS,
    )
    return chosen


def choose_top(
    logits: Tensor, temperature: Tensor, keys: Tensor, positions: Tensor, count: int
) -> tuple[Tensor, Tensor]:
    """The `count` tokens of highest score per row, and how far each is from the best.

    temperature float32 [n], 0: greedy; keys int64 [n, 2] and positions int64 [n] as in
    `SamplingBatch`. The first of them is `sample`'s without cuts, but where scores differ by less
    than float32 tells apart. Returns int64 [n, count], best first, and float32 [n, count]; where it
    is infinite, the token is none (its logit is -inf, or the vocabulary ends). Safe to capture in a
    CUDA graph.
    """
    n, vocab = logits.shape
    assert logits.stride(1) == 1
    blocks = triton.cdiv(vocab, _BLOCK)
    scores = blocks * count
    best = torch.empty((n, scores), dtype=torch.int64, device=logits.device)
    top_block_kernel[(n, blocks)](
        logits,
        temperature,
        keys,
        positions,
        best,
        logits.stride(0),
        vocab,
        count,
        _BLOCK,
        logits.is_cuda,
        num_warps=_WARPS,
    )
    chosen = torch.empty((n, count), dtype=torch.int64, device=logits.device)
    gaps = torch.empty((n, count), dtype=torch.float32, device=logits.device)
    top_row_kernel[(n,)](
        best, chosen, gaps, scores, vocab, count, triton.next_power_of_2(scores), num_warps=8
    )
    return chosen, gaps


def noised(
    logits: Tensor, temperature: Tensor, keys: Tensor, positions: Tensor, ahead: int
) -> Tensor:
    """`logits` [n, m, vocab] plus temperature times noise, which m places share: float32.

    The noise is that of `positions` + `ahead`; the others are as `choose_top` takes them. Safe to
    capture in a CUDA graph.
    """
    n, repeat, vocab = logits.shape
    logits = logits.contiguous()
    out = torch.empty_like(logits, dtype=torch.float32)
    noised_kernel[(n * repeat, triton.cdiv(vocab, _BLOCK))](
        logits, temperature, keys, positions, out, vocab, ahead, repeat, _BLOCK
    )
    return out
