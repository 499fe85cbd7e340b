"""Sample and verify on the device, without a sort and without storing noise."""

from __future__ import annotations

import torch
import triton
from torch import Tensor

from outrider.engine.cuda.kernels.sampling import (
    choose_block_kernel,
    noised_kernel,
    top_parts_kernel,
    top_row_kernel,
)
from outrider.engine.cuda.kernels.topk_topp import choose_row_kernel, verify_row_kernel
from outrider.engine.sampling.coupled import SamplingBatch
from outrider.engine.sampling.verify import VerifyBatch

_BLOCK = 1024  # tokens per program, so that one row fills a GPU
_WARPS = 2
_PART = 128  # tokens of which the best score is noted to find the best of a row
_TOP_WARPS = 8  # of the program that finds them
_LANES, _ROW_WARPS = 8192, 16  # of the program of a row


def sample(logits: Tensor, batch: SamplingBatch) -> Tensor:
    """Sample a token per row as `outrider.engine.sampling.coupled.sample` does: int64 [n].

    logits [n, vocab] in any dtype. Only the tensors of `batch` are read, so that a CUDA graph can
    capture it. Of equal scores the lowest token wins. Noise may differ from a CPU's in the last bit
    of a float64, and sums of weights in that of a float32.
    """
    return _chosen(logits, batch, ahead=0)


def choose_and_verify(logits: Tensor, batch: VerifyBatch, out: Tensor) -> None:
    """Sample and verify as `outrider.engine.sampling.verify.choose_and_verify` does.

    All tensors are contiguous. A CUDA graph can capture it.
    """
    rows, width = out.shape[0], out.shape[1] - 1
    chosen = _chosen(logits, batch.sampling, ahead=1)
    tensors = (chosen, batch.input_ids, batch.cu_seqlens, batch.draft_lens, out)
    verify_row_kernel[(rows,)](*tensors, width, triton.next_power_of_2(width), num_warps=1)


def _chosen(logits: Tensor, batch: SamplingBatch, *, ahead: int) -> Tensor:
    """Sample a token per row, the one `ahead` of its position: int64 [n]."""
    n, vocab = logits.shape
    assert logits.stride(1) == 1
    blocks = triton.cdiv(vocab, _BLOCK)
    best = torch.empty((n, blocks), dtype=torch.float32, device=logits.device)
    token = torch.empty((n, blocks), dtype=torch.int32, device=logits.device)
    chosen = torch.empty(n, dtype=torch.int64, device=logits.device)
    noise = (batch.seed, batch.position)
    choose_block_kernel[(n, blocks)](
        *(logits, batch.temperature, *noise, best, token),
        *(logits.stride(0), vocab, ahead, _BLOCK, logits.is_cuda),
        num_warps=_WARPS,
    )
    limits = (batch.top_k, batch.top_p, batch.min_p)
    choose_row_kernel[(n,)](
        *(logits, batch.temperature, *limits, *noise, best, token, chosen),
        *(logits.stride(0), vocab, blocks, ahead),
        *(triton.next_power_of_2(blocks), _BLOCK, min(_LANES, triton.next_power_of_2(vocab))),
        logits.is_cuda,
        num_warps=_ROW_WARPS,
    )
    return chosen


def choose_top(
    logits: Tensor, temperature: Tensor, keys: Tensor, positions: Tensor, count: int
) -> tuple[Tensor, Tensor]:
    """Return the `count` best tokens per row, best first, and their distances from the best.

    temperature float32 [n], 0: greedy; keys int64 [n, 2] and positions int64 [n] as in
    `SamplingBatch`. The first token is that of `sample` without top_k, top_p and min_p, unless
    float32 cannot tell scores apart. Returns int64 [n, count] and float32 [n, count], infinite
    where there is no further token. A CUDA graph can capture it.
    """
    n, vocab = logits.shape
    assert logits.stride(1) == 1
    parts = _BLOCK // _PART
    blocks = triton.cdiv(vocab, _BLOCK)
    best = torch.empty((n, blocks * parts), dtype=torch.float32, device=logits.device)
    given = (logits, temperature, keys, positions, best)
    top_parts_kernel[(n, blocks)](
        *given, logits.stride(0), vocab, parts, _PART, logits.is_cuda, num_warps=_WARPS
    )
    chosen = torch.empty((n, count), dtype=torch.int64, device=logits.device)
    gaps = torch.empty((n, count), dtype=torch.float32, device=logits.device)
    top_row_kernel[(n,)](
        *(*given, chosen, gaps, logits.stride(0), best.stride(0), vocab, count),
        *(triton.next_power_of_2(each) for each in (count, triton.cdiv(vocab, _PART))),
        *(_PART, logits.is_cuda),
        num_warps=_TOP_WARPS,
    )
    return chosen, gaps


def noised(
    logits: Tensor, temperature: Tensor, keys: Tensor, positions: Tensor, ahead: int
) -> Tensor:
    """Add temperature times noise to `logits` [n, m, vocab], equally for the m rows: float32.

    The noise is that of `positions` + `ahead`. The other arguments are those of `choose_top`. A
    CUDA graph can capture it.
    """
    n, repeat, vocab = logits.shape
    logits = logits.contiguous()
    out = torch.empty_like(logits, dtype=torch.float32)
    noised_kernel[(n * repeat, triton.cdiv(vocab, _BLOCK))](
        logits, temperature, keys, positions, out, vocab, ahead, repeat, _BLOCK
    )
    return out
