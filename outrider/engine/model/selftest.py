"""Check at start-up that the paged model agrees with the model's own eager attention.

Three rows of random tokens go through chunked prefill over scattered pages, mixed with wrong drafts
that are rolled back. The logits of every position are compared.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, Protocol

import torch
from torch import Tensor, nn

from outrider.engine.batch import Model, RowSlice, pack
from outrider.errors import UnsupportedModelError

_NUM_ROWS = 3
_MAX_LEN = 40
# Bounds of the relative error of a position's logits, as the median over positions. A mistake in
# mask, position or cache is of order 1 everywhere. A mixture's router may flip at a near tie.
_TOLERANCE = {torch.float64: 1e-5, torch.float32: 1e-3, torch.bfloat16: 0.1, torch.float16: 0.05}


class _Runnable(Model, Protocol):
    @property
    def dtype(self) -> torch.dtype: ...


@dataclass(frozen=True, slots=True)
class Reference:
    """Random rows and the unchanged model's logits for them."""

    token_ids: Tensor  # int64 [rows, length]
    logits: Tensor  # [rows, length, vocab_size]


@torch.inference_mode()
def eager_reference(
    model: nn.Module, *, page_size: int, num_pages: int, max_model_len: int
) -> Reference:
    """Run the unchanged model with its own eager attention and no cache."""
    parts: Any = model
    rows = min(_NUM_ROWS, num_pages)
    length = min(_MAX_LEN, max_model_len, num_pages // rows * page_size)
    generator = torch.Generator().manual_seed(0)
    vocab_size = parts.config.get_text_config(decoder=True).vocab_size
    tokens = torch.randint(0, vocab_size, (rows, length), generator=generator).to(parts.device)
    before = parts.config._attn_implementation
    parts.set_attn_implementation("eager")
    try:
        logits = parts(input_ids=tokens, use_cache=False).logits
    finally:
        parts.set_attn_implementation(before)
    return Reference(tokens, logits)


def check_against(model: _Runnable, reference: Reference) -> None:
    """Raise `UnsupportedModelError` if the paged model disagrees with the reference."""
    rows, length = reference.token_ids.shape
    try:
        logits = _run(model, reference.token_ids.tolist())
    except torch.OutOfMemoryError:
        raise
    except Exception as error:
        # An unknown architecture may fail in any way, and is then not served.
        raise UnsupportedModelError(f"The model cannot run over paged keys: {error}") from error
    expected = reference.logits.to(logits.dtype).reshape(rows * length, -1)
    difference = (logits - expected).norm(dim=-1) / expected.norm(dim=-1).clamp_min(1e-9)
    error_ = float(difference.median()) if bool(difference.isfinite().all()) else float("inf")
    if not error_ <= _TOLERANCE[model.dtype]:
        raise UnsupportedModelError(
            f"The self-test failed: logits differ from the model's own by {error_:.2g} of their "
            f"size (at most {_TOLERANCE[model.dtype]:g} is rounding). This architecture needs "
            "something that the paged attention does not do."
        )


def _run(model: _Runnable, token_ids: list[list[int]]) -> Tensor:
    """Return logits [rows * length, vocab_size] of all positions, computed as a server does."""
    num_rows, length = len(token_ids), len(token_ids[0])
    pages = -(-length // model.page_size)
    # The pages of a row are neither contiguous nor in order.
    tables = [[page * num_rows + i for page in reversed(range(pages))] for i in range(num_rows)]
    done = [0] * num_rows
    pieces: list[list[Tensor]] = [[] for _ in range(num_rows)]
    step = 0
    while any(n < length for n in done):
        # Each row has a long chunk, one token or a few tokens, and a wrong draft in between.
        sizes = [(max(length // 2, 1), 1, 3)[(step + i) % 3] for i in range(num_rows)]
        live = [i for i in range(num_rows) if done[i] < length]
        rows = [
            _draft(token_ids[i], done[i], sizes[i], tables[i]) for i in live if step % 2 == 1
        ] or [
            _known(token_ids[i], done[i], min(sizes[i], length - done[i]), tables[i]) for i in live
        ]
        logits = model.forward(pack(rows, model.page_size, model.device)).clone()
        if step % 2 == 0:
            parts = torch.split(logits, [row.num_logits for row in rows])
            for i, part in zip(live, parts, strict=True):
                pieces[i].append(part)
                done[i] += len(part)
        step += 1
    return torch.cat([torch.cat(row) for row in pieces])


def _known(token_ids: list[int], start: int, size: int, table: list[int]) -> RowSlice:
    return RowSlice(token_ids[start : start + size], start, table, size)


def _draft(token_ids: list[int], start: int, size: int, table: list[int]) -> RowSlice:
    """Return wrong tokens in place of the next ones; the next step overwrites them."""
    size = min(size, len(token_ids) - start)
    return RowSlice([token_ids[0]] * size, start, table, size)
