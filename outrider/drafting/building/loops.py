"""The draft loops that are captured at start on a CUDA device."""

from __future__ import annotations

import contextlib
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace

import torch

from outrider import start_times
from outrider.drafting.ahead.branches import NUM_RANKS
from outrider.drafting.building.config import Say
from outrider.drafting.draft_model.loops import DraftModelLoops
from outrider.drafting.drafters import CATCH_UP
from outrider.drafting.graphs.loop_inputs import LoopShape, make_shapes
from outrider.drafting.graphs.loops import LoopCapture, triton_sampler
from outrider.engine.graphs.capture import CudaGraphs, Work, replay_seconds
from outrider.engine.graphs.prefill_graphs import PrefillGraphs
from outrider.engine.graphs.prefill_inputs import make_prefill_buckets
from outrider.engine.model.paged_model import PagedModel
from outrider.engine.tree_mask import MAX_TREE_NODES
from outrider.errors import ConfigError

_ROWS = (1, 4, 8, 16, 32, 64, 128, 256)
"""Rows of a loop; padding costs little, as long as the weights are what takes the time."""
_FORK_ROWS = (1, 4, 8, 16, 32, 48, 64, 96, 128, 192, 256)
"""Likewise with candidates. Branches are many, and rows above 64 cost nearly as much as they do."""
_FEW_ROWS = (4, 32, 128)
"""Rows of loops that are seldom needed: long catch-ups, and rows with cuts."""
_LONG_CATCH_UP = 16
"""Tokens after rounds without a draft."""
_BLOCKS = (4, 8)
"""Draft tokens of loops that feed fewer slots than a whole block."""
_NUM_TOKENS = (1, 2, 3, 4, 6, 8, 12)
"""Draft tokens. With candidates one less is fed: the last token's place is known without it."""


def loop_shapes(*, max_sessions: int, max_draft_tokens: int, max_branches: int) -> list[LoopShape]:
    """Return a draft model's loops: chains, and ahead chains with candidates and branches."""
    lengths = _lengths(max_draft_tokens)
    kinds = [(max_sessions, CATCH_UP, 0)]
    if max_branches:
        kinds.append((max_sessions, CATCH_UP, NUM_RANKS))
        kinds.append((max_sessions * max_branches, 1, NUM_RANKS))
    # One session often lacks but one token, and products of one row are the fastest by far.
    shapes = make_shapes(rows=(1,), query_lens=(1,), num_tokens=lengths)
    for fanout in {fanout for *_, fanout in kinds}:
        shapes += make_shapes(
            rows=_up_to(max_sessions, _FEW_ROWS),
            query_lens=(_LONG_CATCH_UP,),
            num_tokens=_fed(lengths, fanout),
            fanout=fanout,
        )
    for cut in (False, True):
        for count, query_len, fanout in kinds:
            sizes = _FEW_ROWS if cut else _FORK_ROWS if fanout else _ROWS
            if fanout or not cut:  # any loop of chains can cut
                shapes += make_shapes(
                    rows=_up_to(count, sizes),
                    query_lens=(query_len,),
                    num_tokens=_fed(lengths, fanout),
                    fanout=fanout,
                    cut=cut,
                )
    return shapes


def recurrent_shapes(*, max_rows: int, max_draft_tokens: int, width: int = 1) -> list[LoopShape]:
    """Return a draft module's loops: it is fed what was accepted again, and one row more.

    `width` is that of trees, whose nodes are no more than a mask has bits. 1: chains.
    """
    if width > 1:
        max_draft_tokens = min(max_draft_tokens, 1 + MAX_TREE_NODES // width)
    few = _up_to(max_rows, _FEW_ROWS)
    shapes = [
        LoopShape(n, k + 1, k, cut=cut, width=width)
        for k in _lengths(max_draft_tokens)
        for cut, sizes in ((False, _up_to(max_rows, _ROWS)), (True, few if width > 1 else ()))
        for n in sizes
    ]
    long = max(_LONG_CATCH_UP, max_draft_tokens + 2)
    return shapes + [LoopShape(n, long, max_draft_tokens, width=width) for n in few]


def block_shapes(
    *, max_rows: int, limits: tuple[int, int], width: int, num_slots: Callable[[int], int]
) -> list[LoopShape]:
    """Return the loops of a module that guesses blocks.

    `limits` are the most draft tokens of a round and of a block; `num_slots` tells how many slots
    so many of a block take.
    """
    most, depth = limits
    lengths = [*(k for k in _BLOCKS if k < min(most, depth)), most]
    fed = {k: min(k, depth) for k in lengths}
    few = _up_to(max_rows, _FEW_ROWS)
    shapes = [
        LoopShape(n, fed[k] + 1, k, cut=cut, width=width, slots=num_slots(fed[k]))
        for k in lengths
        for cut, sizes in ((False, _up_to(max_rows, _ROWS)), (True, few))
        for n in sizes
    ]
    long = max(_LONG_CATCH_UP, fed[most] + 2)
    slots = num_slots(fed[most])
    return shapes + [LoopShape(n, long, most, width=width, slots=slots) for n in few]


def one_shot_shapes(*, max_rows: int, max_depth: int) -> list[LoopShape]:
    """Return the loops of a head that guesses from one state: `max_rows` at once, any depth."""
    return [
        LoopShape(rows, 1, depth, cut=cut)
        for cut, sizes in ((False, _ROWS), (True, _FEW_ROWS))
        for rows in _up_to(max_rows, sizes)
        for depth in range(1, max_depth + 1)
    ]


def _lengths(max_draft_tokens: int) -> list[int]:
    return [*(k for k in _NUM_TOKENS if k < max_draft_tokens), max_draft_tokens]


def _fed(lengths: Sequence[int], fanout: int) -> list[int]:
    """Return the chains of loops whose drafts have these lengths."""
    return [k - 1 for k in lengths] if fanout else list(lengths)


def _up_to(count: int, sizes: Sequence[int]) -> list[int]:
    """Return the sizes below `count`, and the next one if there is one."""
    return [size for i, size in enumerate(sizes) if i == 0 or sizes[i - 1] < count]


def capture_loops(
    model: PagedModel, shapes: Sequence[LoopShape], max_sessions: int, say: Say
) -> DraftModelLoops | None:
    """Capture draft loops and forwards of prompts; None, said, if the attention prevents it.

    Raises `ConfigError` if they do not fit into the device's memory.
    """
    if not model.capturable:
        say("CUDA graphs cannot capture this attention: every forward runs eagerly")
        return None
    sizes = (model.vocab_size, model.dtype, model.kv_bytes_per_page, model.max_model_len)
    with loop_capture(shapes, model.device, say, sizes) as capture:
        if not model.layered:  # its modules keep state while they run, so they run one at a time
            return DraftModelLoops(model, replace(capture, precompile=lambda _: None))
        forwards = PrefillGraphs(
            model,
            make_prefill_buckets(model.max_model_len, max_sessions),
            capture=capture.capture,
            seconds=replay_seconds,
        )
        return DraftModelLoops(model, capture, forwards)


@contextlib.contextmanager
def loop_capture(
    shapes: Sequence[LoopShape], device: torch.device, say: Say, sizes: Sequence[object]
) -> Iterator[LoopCapture]:
    """Yield what captures loops within, and say its progress.

    `sizes` tell models with other kernels apart.

    Raises `ConfigError` if they do not fit into the device's memory.
    """
    # Imported here: without CUDA there may be no Triton.
    from outrider.engine.cuda.compile import compile_once

    say("compiling the draft's loops, some 8 s unless an earlier start did it, and capturing them")

    def precompile(works: Sequence[Work]) -> None:
        compile_once(works, [*shapes, *sizes])

    began = time.perf_counter()
    free = torch.cuda.mem_get_info(device)[0]

    def on_progress(done: int, total: int) -> None:
        if done * 10 // total > (done - 1) * 10 // total:
            seconds = time.perf_counter() - began
            mib = (free - torch.cuda.mem_get_info(device)[0]) // 2**20
            say(f"captured {done} of {total} draft loops: {seconds:.1f} s, {mib} MiB")

    try:
        with start_times.phase("draft loops"):
            yield LoopCapture(shapes, CudaGraphs(), triton_sampler(), on_progress, precompile)
    except torch.OutOfMemoryError as error:
        raise ConfigError(
            "The captured draft loops do not fit into the device's memory: lower "
            "--kv-cache-memory, --max-draft-tokens or --max-sessions (a scorer's --max-num-seqs)."
        ) from error
