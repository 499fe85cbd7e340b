"""Chooses how products of few rows are computed, by measuring on the device at start-up.

Every candidate runs as in a step: recorded in a graph, among the products that come before and
after it, over the weights of one layer after another, so that they come from memory and not from a
cache. What is fastest alone may lose there, because neighbours overlap.
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
from concurrent.futures import ThreadPoolExecutor, wait
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TextIO

import torch
from torch import Tensor

from outrider.engine.cuda.gemm import hopper
from outrider.engine.cuda.gemm.candidates import CANDIDATES
from outrider.engine.cuda.gemm.linear import FewRowsLinear
from outrider.engine.cuda.gemm.tilings import HopperTiles, Tiling
from outrider.engine.cuda.launch import graph_us, launch_options
from outrider.engine.model.ops import Use

logger = logging.getLogger(__name__)

Run = Callable[[Use, Tensor, Tensor], Tensor]
"""The outputs of x [rows, in]; may write to its [rows, out]."""

_COLD_BYTES = 2**29  # of weights in a row, at least, so that a cache holds few of them;
_EACH = 8  # and products of each kind, of which one is a small part of the time
_REPEATS = 20
_GAIN = 0.002  # of the chain's time, that a candidate must save: less is noise
_NEAR = 0.03  # of it: so much slower than the best, a way may be faster beside other ways
_PATIENCE_S = 120.0  # for others that measure
_TOLERANCE = 0.02  # of the largest output: roundings of bfloat16 in another order
_INT8_TOLERANCE = 0.05  # and of weights to int8


@dataclass(frozen=True, slots=True)
class Kind:
    """Uses of equal shape are computed equally."""

    name: str
    outputs: int
    inner: int

    @classmethod
    def of(cls, use: Use, linear: FewRowsLinear) -> Kind:
        """The kind of this use of this layer."""
        if use.norm is None:
            name = "alone" if use.alone else "added"
        else:
            name = "gated" if use.gated else "normed"
        return cls(name, linear.out_features, linear.in_features)

    @property
    def size(self) -> int:
        """Of the weight, in numbers."""
        return self.outputs * self.inner

    def __str__(self) -> str:
        return f"{self.name} {self.outputs}x{self.inner}"


@torch.inference_mode()
def tune(uses: Sequence[Use], run: Run, *, int8: bool = False) -> None:
    """Set the choices of every `FewRowsLinear` among the uses, which are in a step's order.

    Whatever fails or is not faster is left to cuBLAS. `int8`: weights may be quantized.
    """
    chain = timed(uses, int8=int8)
    if not chain:
        return
    with _one_at_a_time():
        began = time.perf_counter()
        _compile(chain, run)
        for rows in CANDIDATES:
            if not any(linear.candidates(rows) for _, linear in chain):
                continue
            logger.info("products of %d rows: %s", rows, Chain(chain, rows, run).choose())
    all_rows = range(1, max(CANDIDATES) + 1)  # of launched steps: logits are of any number
    hopper.load(_variants(chain, all_rows), chain[0][1].weight.device)
    torch.cuda.empty_cache()
    logger.info("measured products of few rows in %.1f s", time.perf_counter() - began)


def _compile(chain: Sequence[tuple[Use, FewRowsLinear]], run: Run) -> None:
    """Compute everything once that is going to be tried, side by side.

    One after another the kernels take half a minute to compile. What fails fails again, and says
    why, when it is measured.
    """

    def once(use: Use, linear: FewRowsLinear, rows: int, way: Tiling) -> None:
        alone = copy.copy(linear)
        alone.choices = dict.fromkeys(CANDIDATES, way)
        weight = linear.weight
        with torch.cuda.device(weight.device), torch.inference_mode():
            x = weight.new_zeros(rows, linear.in_features)
            run(replace(use, linear=alone), x, weight.new_zeros(rows, linear.out_features))

    launch_options()  # is measured: not beside those that compile
    first = {Kind.of(use, linear): (use, linear) for use, linear in chain}
    with ThreadPoolExecutor(hopper.COMPILERS) as pool:
        wait(
            [
                pool.submit(once, use, linear, rows, way)
                for (use, linear), rows in itertools.product(first.values(), CANDIDATES)
                for way in linear.candidates(rows)
                if way.takes(*linear.weight.shape)
            ]
        )


def _variants(
    chain: Iterable[tuple[Use, FewRowsLinear]], numbers_of_rows: Iterable[int]
) -> Iterator[hopper.Variant]:
    """What the bulk tiles are computed by that were chosen."""
    for (use, linear), rows in itertools.product(chain, numbers_of_rows):
        way = linear.choice(rows)
        if isinstance(way, HopperTiles):
            add = use.norm is None and not use.alone
            yield way.variant(rows, *linear.weight.shape, gated=use.gated, add=add)


def timed(uses: Sequence[Use], *, int8: bool) -> list[tuple[Use, FewRowsLinear]]:
    """What is to be timed of a step's uses: some of each kind, as many as it takes to read weights
    from memory.

    All that are of one kind share their choices from now on, and are quantized if `int8`.
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
            size += 2 * kind.size
        linear.choices = choices.setdefault(kind, {})
    return chain


@contextlib.contextmanager
def _one_at_a_time() -> Iterator[None]:
    """Process that start together do not measure each other, where they share a folder.

    Whoever waits longer than `_PATIENCE_S` goes on: what is measured then may be worse chosen.
    """
    path = Path(tempfile.gettempdir()) / f"outrider-tuning-{os.getuid()}.lock"
    with contextlib.ExitStack() as held:
        with contextlib.suppress(OSError):  # nowhere to write: it is not worth failing
            _lock(held.enter_context(path.open("w")), time.monotonic() + _PATIENCE_S)
        yield


def _lock(file: TextIO, until: float) -> None:
    """Locks it if that succeeds in time."""
    while time.monotonic() < until:
        with contextlib.suppress(BlockingIOError):
            fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
            return
        time.sleep(0.1)


@dataclass(frozen=True, slots=True)
class _Found:
    """The best way of each kind beside the others."""

    us_before: float  # the first of them by cuBLAS
    us: float
    ways: dict[Kind, Tiling | None]
    near: dict[Kind, tuple[Tiling, ...]]  # nearly as fast as the best


class Chain:
    """Some layers' products, one after another, of this number of rows; at first by cuBLAS."""

    def __init__(self, chain: Sequence[tuple[Use, FewRowsLinear]], rows: int, run: Run) -> None:
        self._chain = chain
        self._rows = rows
        self._run = run
        self._most = next(most for most in CANDIDATES if rows <= most)
        like = chain[0][1].weight
        sizes = {size for _, x in chain for size in (x.in_features, x.out_features)}
        self._x = {n: torch.randn(rows, n, dtype=like.dtype, device=like.device) for n in sizes}
        self._out = {n: torch.zeros_like(x) for n, x in self._x.items()}
        first = {Kind.of(use, linear): (use, linear) for use, linear in reversed(chain)}
        self._first = dict(sorted(first.items(), key=lambda each: each[0].size, reverse=True))
        for kind in self._first:
            self.take(kind, None)

    @property
    def kinds(self) -> tuple[Kind, ...]:
        """Of its products, the largest first."""
        return tuple(self._first)

    def take(self, kind: Kind, way: Tiling | None) -> None:
        """Compute this kind so from now on; None: by cuBLAS."""
        choices = self._first[kind][1].choices
        choices.pop(self._most, None)
        if way is not None:
            choices[self._most] = way

    def choose(self) -> str:
        """Take the best ways, which depend on each other: a way that begins early gains nothing
        beside cuBLAS. So they are looked for from all by cuBLAS, and once more from ways that are
        nearly as fast as the best; says which are chosen and why.
        """
        ways = {kind: linear.candidates(self._most) for kind, (_, linear) in self._first.items()}
        first = self._descend(ways)
        for kind, near in first.near.items():
            self.take(kind, next(iter(near), None))
        best = min(first, self._descend(first.near), key=lambda found: found.us)
        for kind, way in best.ways.items():
            self.take(kind, way)
        said = "; ".join(f"{kind} by {way or 'cuBLAS'}" for kind, way in best.ways.items())
        return f"{best.us:.0f} us, all by cuBLAS {first.us_before:.0f}: {said}"

    def _descend(self, candidates: Mapping[Kind, Sequence[Tiling]]) -> _Found:
        """Take the best way of kind after kind, beside what is taken for the others."""
        us: list[float] = []
        found: dict[Kind, Tiling | None] = {}
        near: dict[Kind, tuple[Tiling, ...]] = {}
        for kind in self._first:
            times = self.compare(kind, candidates[kind])
            best = min(times, key=times.__getitem__)
            limit = times[best] * (1 + _NEAR)
            near[kind] = tuple(way for way, time in times.items() if way and time <= limit)
            if times[best] >= times[None] * (1 - _GAIN):
                best = None
            self.take(kind, best)
            found[kind] = best
            us += times[None], times[best]
        return _Found(us[0], us[-1], found, near)

    def compare(self, kind: Kind, ways: Iterable[Tiling]) -> dict[Tiling | None, float]:
        """Microseconds of the chain by each way of computing one kind of product; None: cuBLAS,
        by which it is computed from now on.

        What cannot compute it, or not rightly, is left out.
        """
        self.take(kind, None)
        expected = self._outputs(kind)
        times: dict[Tiling | None, float] = {None: self._us()}
        for way in ways:
            if way.takes(kind.outputs, kind.inner):
                self.take(kind, way)
                if (us := self._us_if_right(way, kind, expected)) is not None:
                    times[way] = us
        self.take(kind, None)
        return times

    def _us_if_right(self, way: Tiling, kind: Kind, expected: Tensor) -> float | None:
        try:
            error = (self._outputs(kind) - expected).abs().max()
            tolerance = _INT8_TOLERANCE if way.int8 else _TOLERANCE
            if error <= tolerance * expected.abs().max():
                return self._us()
            logger.warning("%s of %d rows is wrong by %s", kind, self._rows, way)
        except Exception as reason:  # of a compiler or a device that nobody has tried
            logger.warning("%s of %d rows fails by %s: %s", kind, self._rows, way, reason)
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
