"""Check at start-up that the paged model agrees with the model's own eager forward.

The reference runs the unchanged model without a cache, in float32 where memory allows. Rows of
random tokens of several lengths go through chunked prefill over scattered pages, mixed with wrong
drafts that are rolled back. Then one row ends in a tree. Sliding windows are shortened on both
sides, so that every row is longer than every window.
"""

from __future__ import annotations

import contextlib
import copy
from collections.abc import Iterator, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass
from typing import Any, Protocol

import torch
from torch import Tensor, nn

from outrider.engine.batch import Model, RowSlice, pack
from outrider.engine.model.transformers_network import shortened_windows
from outrider.errors import UnsupportedModelError

_LENGTHS = (40, 33, 17)  # tokens of the rows
_WINDOW = 7  # keys; shorter than every row, and no multiple of a page
_TREE = (-1, -1, 0, 1)  # parents: two branches of two tokens
_PATHS = ((0, 2), (1, 3))  # nodes of each branch
# Bounds of the relative error of a position's logits, as the median over positions. A mistake in
# mask, position or cache is of order 1 everywhere. A mixture's router may flip at a near tie.
_TOLERANCE = {torch.float64: 1e-5, torch.float32: 1e-3, torch.bfloat16: 0.1, torch.float16: 0.05}
_FLOAT8_TOLERANCE = 0.5  # where keys and values are rounded; most in small random mixtures
_SPARE_BYTES = 2 * 2**30  # left free beside a float32 copy of the model


class _Runnable(Model, Protocol):
    dtype: torch.dtype

    def windows_at_most(self, length: int) -> AbstractContextManager[None]: ...


@dataclass(frozen=True, slots=True)
class Reference:
    """Random rows, a tree behind the first one, and the unchanged model's logits for them."""

    rows: tuple[tuple[int, ...], ...]
    tree: tuple[int, ...]  # tokens of the nodes
    logits: Tensor  # [positions of all rows, vocab_size], row by row
    tree_logits: Tensor  # [nodes, vocab_size]


@torch.inference_mode()
def eager_reference(
    model: nn.Module, *, page_size: int, num_pages: int, max_model_len: int
) -> Reference:
    """Run the unchanged model with its own eager attention and no cache."""
    parts: Any = model
    rows_in_pool = min(len(_LENGTHS), num_pages)
    longest = min(max_model_len, num_pages // rows_in_pool * page_size)
    room = max(1, longest - len(_PATHS[0]) - 2)  # the tree's four slots come behind the first row
    generator = torch.Generator().manual_seed(0)
    vocab_size = parts.config.get_text_config(decoder=True).vocab_size

    def draw(count: int) -> tuple[int, ...]:
        return tuple(torch.randint(0, vocab_size, (count,), generator=generator).tolist())

    rows = tuple(draw(min(length, room)) for length in _LENGTHS[:rows_in_pool])
    tree = draw(len(_TREE)) if longest >= len(rows[0]) + len(_TREE) else ()
    with _in_float32(model) as exact, shortened_windows(exact, _WINDOW):
        run: Any = exact

        def logits(tokens: Sequence[int]) -> Tensor:
            ids = torch.tensor([list(tokens)], device=parts.device)
            return run(input_ids=ids, use_cache=False).logits[0].float()  # type: ignore[no-any-return]

        try:
            of_rows = torch.cat([logits(row) for row in rows])
        except torch.OutOfMemoryError:
            raise
        except Exception as error:
            raise _cannot_run("in transformers", error) from error
        of_tree = of_rows.new_zeros(len(tree), of_rows.shape[-1])
        for path in _PATHS if tree else ():
            branch = logits((*rows[0], *(tree[node] for node in path)))
            of_tree[list(path)] = branch[-len(path) :]
    return Reference(rows, tree, of_rows, of_tree)


def _cannot_run(where: str, error: Exception) -> UnsupportedModelError:
    reason = " ".join(str(error).split()) or type(error).__name__
    return UnsupportedModelError(
        f"The model cannot run {where}: {reason}. Correct config.json, or serve it with vLLM."
    )


@contextlib.contextmanager
def _in_float32(model: nn.Module) -> Iterator[nn.Module]:
    """Yield the model with eager attention, as a float32 copy if there is memory for one."""
    parts: Any = model
    size = 4 * sum(weight.numel() for weight in model.parameters())
    wide = parts.dtype in (torch.float32, torch.float64)
    exact: Any = model
    if not wide and _free_bytes(parts.device) > size + _SPARE_BYTES:
        exact = copy.deepcopy(model).float()
    before = exact.config._attn_implementation
    exact.set_attn_implementation("eager")
    try:
        yield exact
    finally:
        exact.set_attn_implementation(before)
        if exact is not model and parts.device.type == "cuda":
            del exact
            torch.cuda.empty_cache()


def _free_bytes(device: torch.device) -> int:
    if device.type == "cuda":
        return torch.cuda.mem_get_info(device)[0]
    with contextlib.suppress(OSError), open("/proc/meminfo") as file:
        for line in file:
            if line.startswith("MemAvailable:"):
                return int(line.split()[1]) * 1024
    return 0


def check_against(model: _Runnable, reference: Reference, *, float8_cache: bool = False) -> None:
    """Raise `UnsupportedModelError` if the paged model disagrees with the reference."""
    try:
        with model.windows_at_most(_WINDOW):
            logits = torch.cat(_run(model, reference)).float()
    except torch.OutOfMemoryError:
        raise
    except Exception as error:
        # An unknown architecture may fail in any way, and is then not served.
        raise _cannot_run("over paged keys", error) from error
    expected = torch.cat((reference.logits, reference.tree_logits)).to(logits.device)
    difference = (logits - expected).norm(dim=-1) / expected.norm(dim=-1).clamp_min(1e-9)
    finite = bool(difference.isfinite().all())
    parts = difference.split([len(reference.logits), len(reference.tree_logits)])
    errors = [float(part.median()) for part in parts if len(part)]
    worst = max(errors) if finite else float("inf")
    bound = _FLOAT8_TOLERANCE if float8_cache else _TOLERANCE[model.dtype]
    if not worst <= bound:
        raise UnsupportedModelError(
            f"The self-test failed: logits differ from those of the model's own forward by "
            f"{worst:.2g} of their size (at most {bound:g} is rounding). This "
            "engine does not compute this architecture as transformers does; serve it with vLLM."
        )


def _run(model: _Runnable, reference: Reference) -> list[Tensor]:
    """Return logits of all positions, row by row, then of the tree, computed as a server does."""
    rows, num_rows = reference.rows, len(reference.rows)
    slots = len(rows[0]) + len(reference.tree)
    pages = -(-slots // model.page_size)
    # The pages of a row are neither contiguous nor in order.
    tables = [[page * num_rows + i for page in reversed(range(pages))] for i in range(num_rows)]
    done = [0] * num_rows
    pieces: list[list[Tensor]] = [[] for _ in range(num_rows)]
    step = 0
    while live := [i for i in range(num_rows) if done[i] < len(rows[i])]:
        # Each row has a long chunk, one token or a few tokens, and a wrong draft in between.
        sizes = [(max(len(row) // 2, 1), 1, 3)[(step + i) % 3] for i, row in enumerate(rows)]
        wrong = step % 2 == 1
        batch = [_slice(rows[i], done[i], sizes[i], tables[i], wrong=wrong) for i in live]
        logits = model.forward(pack(batch, model.page_size, model.device)).clone()
        if not wrong:
            parts = torch.split(logits, [row.num_logits for row in batch])
            for i, part in zip(live, parts, strict=True):
                pieces[i].append(part)
                done[i] += len(part)
        step += 1
    of_rows = [torch.cat(row) for row in pieces]
    if not reference.tree:
        return of_rows
    nodes = RowSlice(reference.tree, len(rows[0]), tables[0], len(reference.tree), _TREE)
    return [*of_rows, model.forward(pack([nodes], model.page_size, model.device)).clone()]


def _slice(
    token_ids: Sequence[int], start: int, size: int, table: list[int], *, wrong: bool
) -> RowSlice:
    """Return a row's next tokens, or wrong ones, which the next step overwrites."""
    size = min(size, len(token_ids) - start)
    tokens = [token_ids[0]] * size if wrong else token_ids[start : start + size]
    return RowSlice(tokens, start, table, size)
