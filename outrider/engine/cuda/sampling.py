"""Sample and verify on the device, without a sort and without storing noise."""

from __future__ import annotations

import torch
import triton
from torch import Tensor

from outrider.engine.cuda.kernels.beams import beam_kernel, best_nodes_kernel
from outrider.engine.cuda.kernels.likeliest import likeliest_block_kernel, likeliest_row_kernel
from outrider.engine.cuda.kernels.sampling import (
    choose_block_kernel,
    top_parts_kernel,
    top_row_kernel,
)
from outrider.engine.cuda.kernels.topk_topp import choose_row_kernel, verify_row_kernel
from outrider.engine.sampling.sample import SamplingBatch
from outrider.engine.sampling.verify import VerifyBatch

_BLOCK = 1024  # tokens per program, so that one row fills a GPU
_WARPS = 2
Bias = tuple[Tensor, Tensor, Tensor]
"""Table [any, rank], its rows int64 [paths], and weight [vocab, rank]: their product is added."""
_PART = 128  # tokens of which the best score is noted to find the best of a row
_TOP_WARPS = 8  # of the program that finds them
_LANES, _ROW_WARPS = 8192, 16  # of the program of a row


def sample(logits: Tensor, batch: SamplingBatch) -> Tensor:
    """Sample a token per row as `outrider.engine.sampling.sample.sample` does: int64 [n].

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


def likeliest(
    logits: Tensor,
    batch: SamplingBatch,
    ahead: int,
    count: int,
    *,
    ids: Tensor | None = None,
    bias: Bias | None = None,
) -> tuple[Tensor, Tensor]:
    """Return the `count` likeliest tokens of each path and their log probabilities, best first.

    `logits` [n, m, vocab] are of m paths of each row of `batch`, at its positions + `ahead`. A
    score is a logit plus temperature times noise, and its softmax over all of the path is the
    probability: int64 and float32 [n, m, count], tokens of which there are less at -inf.

    `logits` are of the tokens `ids` int64 [vocab], if these are given. With a `bias` logits are
    [n, 1, vocab], and `m` is the bias's. A CUDA graph can capture it.
    """
    n, m, vocab = logits.shape
    logits = logits if logits.stride(2) == 1 and m == 1 else logits.contiguous()
    table, before, weight = (logits,) * 3 if bias is None else bias
    paths, rank = (n * m, 0) if bias is None else (len(before), weight.shape[1])
    at_once, block = (1, _BLOCK) if bias is None else (16, 128)
    blocks = triton.cdiv(vocab, block)
    best = torch.empty((paths, blocks, count), dtype=torch.int64, device=logits.device)
    sums = torch.empty((paths, blocks), dtype=torch.float32, device=logits.device)
    names = logits if ids is None else ids
    likeliest_block_kernel[(triton.cdiv(paths, at_once), blocks)](
        *(logits, table, before, weight, names, batch.temperature, batch.seed, batch.position),
        *(best, sums, paths, vocab, logits.stride(0) if m == 1 else vocab, ahead),
        *(paths // (n * m), paths // n, rank, ids is not None, count, at_once, block),
        *(min(64, max(16, triton.next_power_of_2(rank))), logits.is_cuda),
        num_warps=_WARPS if bias is None else 4,
    )
    tokens = torch.empty((n, paths // n, count), dtype=torch.int64, device=logits.device)
    chances = torch.empty_like(tokens, dtype=torch.float32)
    likeliest_row_kernel[(paths,)](
        *(best, sums, names, tokens, chances, blocks, vocab, ids is not None, count),
        *(triton.next_power_of_2(blocks), triton.next_power_of_2(blocks * count)),
        num_warps=8,
    )
    return tokens, chances


def grow_beam(
    scores: Tensor, nodes: Tensor, found: Tensor, log_probs: Tensor, width: int, num_nodes: int
) -> tuple[Tensor, Tensor, Tensor, Tensor, Tensor]:
    """Do as `outrider.drafting.graphs.beams.grow_beam`, of equal scores the first.

    Of the beam it takes `scores` and `nodes`. Returns the next one's tokens, scores, nodes and
    sources, then all as nodes. A CUDA graph can capture it.
    """
    n, m, count = found.shape
    cells, width, device = m * count, min(width, m * count), found.device
    ints = torch.empty((3, n, width), dtype=torch.int64, device=device)
    best = torch.empty((n, width), dtype=torch.float32, device=device)
    new = torch.empty((n, 3, cells), dtype=torch.int32, device=device)
    beam_kernel[(n,)](
        *(scores, nodes, found, log_probs, ints[0], best, ints[1], ints[2], new, num_nodes),
        *(m, count, width, triton.next_power_of_2(cells)),
        num_warps=2,
    )
    return ints[0], best, ints[1], ints[2], new


def best_nodes(nodes: Tensor, count: int) -> Tensor:
    """Do as `outrider.drafting.graphs.beams.best_nodes`. A CUDA graph can capture it."""
    n, _, total = nodes.shape
    count = min(count, total)
    best = torch.empty((n, 3, count), dtype=torch.int32, device=nodes.device)
    sizes = triton.next_power_of_2(count), triton.next_power_of_2(total)
    best_nodes_kernel[(n,)](nodes, best, total, count, *sizes, num_warps=4)
    return best
