"""Choose the kernels for products of few rows by timing them at a first start.

Every candidate runs as in a step: captured in a graph, between the products before and after it,
over the weights of one layer after another, so that weights come from memory and not from a cache.
The fastest kernel alone may lose there, because neighbours overlap.
"""

from __future__ import annotations

import contextlib
import copy
import fcntl
import itertools
import logging
import os
import tempfile
import time
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import TextIO

import torch
from torch import Tensor

from outrider import start_times
from outrider.engine.cuda.compile import COMPILERS, compile_together
from outrider.engine.cuda.gemm import hopper, kept_tilings
from outrider.engine.cuda.gemm.candidates import CANDIDATES, MANY_ROWS
from outrider.engine.cuda.gemm.linear import FewRowsLinear, Kind
from outrider.engine.cuda.gemm.tilings import HopperTiles, Small, Tiling
from outrider.engine.cuda.launch import graph_us
from outrider.engine.layers.ops import Use

logger = logging.getLogger(__name__)

Run = Callable[[Use, Tensor, Tensor], Tensor]
"""Computes the outputs of x [rows, in]; may write to its [rows, out]."""

_COLD_BYTES = 2**29  # of weights in a chain, at least, so that a cache holds few of them
_EACH = 3  # products of each kind in a chain, at least
_REPEATS = 10
_GAIN = 0.002  # of the chain's time, that a candidate must save; less is noise
_NEAR = 0.03  # a tiling that is slower by this share may win beside other tilings
_PATIENCE_S = 120.0  # for other processes that measure
_TOLERANCE = 0.02  # of the largest output, for bfloat16 sums in another order
_ROUNDED_TOLERANCE = 0.05  # and for weights or inputs rounded to 8 bits
_TIMED = {**{rows: rows for rows in CANDIDATES}, **MANY_ROWS}
"""The largest number of rows of a choice -> how many are timed."""


@torch.inference_mode()
def tune(uses: Sequence[Use], run: Run, *, int8: bool = False) -> None:
    """Set the choices of every `FewRowsLinear` among a step's uses, given in their order.

    cuBLAS keeps a product where a candidate fails or is not faster. With `int8` weights may be
    quantized.
    """
    chain = timed(uses, int8=int8)
    if not chain:
        return
    began = time.perf_counter()
    with start_times.phase("tilings"):
        with _one_at_a_time():
            _choose_or_recall(chain, run)
        hopper.load(_variants(chain), chain[0][1].device)
        torch.cuda.empty_cache()
    logger.info("chose kernels for few rows in %.1f s", time.perf_counter() - began)


def _choose_or_recall(chain: Sequence[tuple[Use, FewRowsLinear]], run: Run) -> None:
    """Take the tilings that an earlier start chose, or choose and keep them."""
    first = {Kind.of(use, linear): linear for use, linear in chain}
    products = [Kind.of(use, linear) for use, linear in chain]
    tried = {(kind, rows): x.candidates(rows) for kind, x in first.items() for rows in _TIMED}
    kept = kept_tilings.load(products, tried)
    if kept is None:
        _choose(chain, run)
        chosen = {(kind, rows): first[kind].choices.get(rows) for kind, rows in tried}
        kept_tilings.keep(products, tried, chosen)
        return
    for (kind, rows), tiling in kept.items():
        first[kind].choose(rows, tiling)


def _choose(chain: Sequence[tuple[Use, FewRowsLinear]], run: Run) -> None:
    logger.info("measuring products of few rows: some 10 s, which later starts do not take")
    _compile(chain, run)
    for most, rows in _TIMED.items():
        part = chain
        if most in MANY_ROWS:  # where products are long, those without a choice change nothing
            part = [(use, linear) for use, linear in chain if linear.candidates(most)]
        if any(linear.candidates(most) for _, linear in part):
            logger.info("products of %d rows: %s", rows, Chain(part, rows, run).choose())


def _compile(chain: Sequence[tuple[Use, FewRowsLinear]], run: Run) -> None:
    """Run every candidate once, in parallel, so that measuring waits for no compiler.

    A failure is reported when the candidate is measured.
    """

    def once(use: Use, linear: FewRowsLinear, rows: int, tiling: Tiling) -> None:
        alone = copy.copy(linear)
        alone.choices = dict.fromkeys(_TIMED, tiling)
        with torch.inference_mode():
            x, out = (
                torch.zeros(rows, size, dtype=linear.dtype, device=linear.device)
                for size in (linear.in_features, linear.out_features)
            )
            run(replace(use, linear=alone), x, out)

    first = {Kind.of(use, linear): (use, linear) for use, linear in chain}
    works = [
        partial(once, use, linear, rows, tiling)
        for (use, linear), (most, rows) in itertools.product(first.values(), _TIMED.items())
        for tiling in linear.candidates(most)
        if tiling.takes(linear.out_features, linear.in_features)
    ]
    compile_together(works, at_once=COMPILERS)


def _variants(chain: Iterable[tuple[Use, FewRowsLinear]]) -> Iterator[hopper.Variant]:
    """Yield the variants of the chosen Hopper tilings, for any number of rows."""
    numbers_of_rows = (*range(1, max(CANDIDATES) + 1), *MANY_ROWS)
    for (use, linear), rows in itertools.product(chain, numbers_of_rows):
        tiling = linear.choice(rows)
        if isinstance(tiling, HopperTiles):
            add = use.norm is None and not use.alone
            parts = rows > tiling.most_rows  # of any size
            for part in range(8, tiling.most_rows + 1, 8) if parts else (rows,):
                yield linear.variant(tiling, part, gated=use.gated, add=add)


def timed(uses: Sequence[Use], *, int8: bool) -> list[tuple[Use, FewRowsLinear]]:
    """Select the uses to time, enough of each kind that weights are read from memory.

    All uses of one kind share their choices from now on, and are quantized if `int8`.
    """
    choices: dict[Kind, dict[int, Tiling]] = {}
    chain: list[tuple[Use, FewRowsLinear]] = []
    taken: Counter[Kind] = Counter()
    size = 0
    for use in uses:
        linear = use.linear
        if not isinstance(linear, FewRowsLinear):
            continue
        if int8:
            linear.quantize()
        kind = Kind.of(use, linear)
        if taken[kind] < _EACH or size < _COLD_BYTES:
            chain.append((use, linear))
            taken[kind] += 1
            size += linear.nbytes
        linear.choices = choices.setdefault(kind, {})
    return chain


@contextlib.contextmanager
def _one_at_a_time() -> Iterator[None]:
    """Wait while another process on this host measures, for `_PATIENCE_S` at most."""
    path = Path(tempfile.gettempdir()) / f"outrider-tuning-{os.getuid()}.lock"
    with contextlib.ExitStack() as held:
        with contextlib.suppress(OSError):  # there may be no writable folder
            _lock(held.enter_context(path.open("w")), time.monotonic() + _PATIENCE_S)
        yield


def _lock(file: TextIO, until: float) -> None:
    """Lock the file if that succeeds in time."""
    while time.monotonic() < until:
        with contextlib.suppress(BlockingIOError):
            fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
            return
        time.sleep(0.1)


@dataclass(frozen=True, slots=True)
class _Found:
    """The best tiling of each kind beside those of the others; None is cuBLAS."""

    us_before: float  # with the first kind by cuBLAS
    us: float
    tilings: dict[Kind, Tiling | None]
    near: dict[Kind, tuple[Tiling, ...]]  # nearly as fast as the best


class Chain:
    """Products of some layers in a row, with this number of rows; at first by cuBLAS."""

    def __init__(self, chain: Sequence[tuple[Use, FewRowsLinear]], rows: int, run: Run) -> None:
        self._chain = chain
        self._rows = rows
        self._run = run
        self._most = next(most for most in _TIMED if rows <= most)
        dtype, device = chain[0][1].dtype, chain[0][1].device
        sizes = {size for _, x in chain for size in (x.in_features, x.out_features)}
        self._x = {n: torch.randn(rows, n, dtype=dtype, device=device) for n in sizes}
        self._out = {n: torch.zeros_like(x) for n, x in self._x.items()}
        first = {Kind.of(use, linear): (use, linear) for use, linear in reversed(chain)}
        # The largest kinds come first.
        by_size = sorted(first.items(), key=lambda each: each[1][1].nbytes, reverse=True)
        self._first = dict(by_size)
        for kind in self._first:
            self._take(kind, None)

    def _take(self, kind: Kind, tiling: Tiling | None) -> None:
        """Compute this kind with a tiling from now on, or by cuBLAS."""
        self._first[kind][1].choose(self._most, tiling)

    def choose(self) -> str:
        """Take the best tilings and describe them.

        The best tiling of a kind depends on those of the others. A kernel that starts early gains
        nothing beside cuBLAS, for example. So the search runs twice: first from cuBLAS for all
        kinds, and then from tilings that were nearly as fast as the best.
        """
        tilings = {kind: linear.candidates(self._most) for kind, (_, linear) in self._first.items()}
        first = self._descend(tilings)
        for kind, near in first.near.items():
            self._take(kind, next(iter(near), None))
        best = min(first, self._descend(first.near), key=lambda found: found.us)
        for kind, tiling in best.tilings.items():
            self._take(kind, tiling)
        said = "; ".join(f"{kind} by {how or 'cuBLAS'}" for kind, how in best.tilings.items())
        return f"{best.us:.0f} us, all by cuBLAS {first.us_before:.0f}: {said}"

    def _descend(self, candidates: Mapping[Kind, Sequence[Tiling]]) -> _Found:
        """Take the best tiling of one kind after another, beside those of the others."""
        us: list[float] = []
        found: dict[Kind, Tiling | None] = {}
        near: dict[Kind, tuple[Tiling, ...]] = {}
        for kind in self._first:
            times = self.compare(kind, candidates[kind])
            best = min(times, key=times.__getitem__)
            limit = times[best] * (1 + _NEAR)
            near[kind] = tuple(tiling for tiling, time in times.items() if tiling and time <= limit)
            if times[best] >= times[None] * (1 - _GAIN):
                best = None
            self._take(kind, best)
            found[kind] = best
            us += times[None], times[best]
        return _Found(us[0], us[-1], found, near)

    def compare(self, kind: Kind, tilings: Iterable[Tiling]) -> dict[Tiling | None, float]:
        """Time the chain, in microseconds, with each tiling for one kind; None is cuBLAS.

        Tilings that fail or compute wrong numbers are left out. cuBLAS has the kind afterwards.
        """
        self._take(kind, None)
        expected = self._outputs(kind)
        times: dict[Tiling | None, float] = {None: self._us()}
        for tiling in tilings:
            if tiling.takes(kind.outputs, kind.inner):
                self._take(kind, tiling)
                if (us := self._us_if_right(tiling, kind, expected)) is not None:
                    times[tiling] = us
        self._take(kind, None)
        return times

    def _us_if_right(self, tiling: Tiling, kind: Kind, expected: Tensor) -> float | None:
        linear = self._first[kind][1]
        try:
            error = (self._outputs(kind) - expected).abs().max()
            quantizes = linear.kind == "" and tiling.reads != "bf16"
            rounded = quantizes or (isinstance(tiling, Small) and tiling.planes == 1)
            rounded |= isinstance(tiling, HopperTiles) and tiling.rounds
            tolerance = _ROUNDED_TOLERANCE if rounded else _TOLERANCE
            if error <= tolerance * expected.abs().max():
                return self._us()
            logger.warning("%s of %d rows is wrong by %s", kind, self._rows, tiling)
        except Exception as reason:  # any failure of a compiler or a device
            logger.warning("%s of %d rows fails by %s: %s", kind, self._rows, tiling, reason)
        return None

    def _outputs(self, kind: Kind) -> Tensor:
        use, linear = self._first[kind]
        out = self._out[linear.out_features].zero_()
        return self._run(use, self._x[linear.in_features], out).clone()

    def _us(self) -> float:
        def products() -> None:
            for use, linear in self._chain:
                self._run(use, self._x[linear.in_features], self._out[linear.out_features])

        return graph_us([products], _REPEATS)
