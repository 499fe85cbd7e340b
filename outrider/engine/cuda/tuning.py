"""Chooses how products of few rows are computed, by measuring on the device at start-up.

Every candidate runs as in a step: recorded in a graph, among the products that come before and
after it, over the weights of one layer after another, so that they come from memory and not from a
cache. What is fastest alone may lose there, because neighbours overlap.
"""

from __future__ import annotations

import contextlib
import fcntl
import logging
import os
import tempfile
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TextIO

import torch
from torch import Tensor

from outrider.engine.cuda.launch import graph_us
from outrider.engine.cuda.products import FewRowsLinear
from outrider.engine.cuda.ways import CANDIDATES, Way
from outrider.engine.llama_ops import Use

logger = logging.getLogger(__name__)

Run = Callable[[Use, Tensor, Tensor], Tensor]
"""The outputs of x [rows, in]; may write to its [rows, out]."""

_COLD_BYTES = 2**32  # of weights in a row: a step's millisecond, of which a product is a part
_REPEATS = 20
_GAIN = 0.002  # of the chain's time, that a candidate must save: less is noise
_PATIENCE_S = 120.0  # for others that measure
_TOLERANCE = 0.02  # of the largest output: roundings of bfloat16 in another order
_INT8_TOLERANCE = 0.05  # and of weights to int8


@dataclass(frozen=True, slots=True)
class _Kind:
    """Uses of equal shape are computed equally."""

    name: str
    outputs: int
    inner: int


@torch.inference_mode()
def tune(uses: Sequence[Use], run: Run, *, int8: bool = False) -> None:
    """Sets the choices of every `FewRowsLinear` among the uses, which are in a step's order.

    Whatever fails or is not faster is left to cuBLAS. `int8`: weights may be quantized.
    """
    choices: dict[_Kind, dict[int, Way]] = {}
    chain: list[tuple[Use, FewRowsLinear]] = []
    size = 0
    for use in uses:
        linear = use.linear
        if not isinstance(linear, FewRowsLinear):
            continue
        if int8:
            linear.quantize()
        kind = _kind(use, linear)
        if kind not in choices or size < _COLD_BYTES:
            chain.append((use, linear))
            size += 2 * linear.in_features * linear.out_features
        linear.choices = choices.setdefault(kind, {})
    if not chain:
        return
    with _one_at_a_time():
        began = time.perf_counter()
        for rows in CANDIDATES:
            logger.info("products of %d rows: %s", rows, _Chain(chain, rows, run).choose())
    torch.cuda.empty_cache()
    logger.info("measured products of few rows in %.1f s", time.perf_counter() - began)


@contextlib.contextmanager
def _one_at_a_time() -> Iterator[None]:
    """Processes that start together do not measure each other, where they share a folder.

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


class _Chain:
    """Some layers' products, one after another, of this number of rows."""

    def __init__(self, chain: Sequence[tuple[Use, FewRowsLinear]], rows: int, run: Run) -> None:
        self._chain = chain
        self._rows = rows
        self._run = run
        sizes = {size for _, x in chain for size in (x.in_features, x.out_features)}
        self._x = {n: torch.randn(rows, n, dtype=torch.bfloat16, device="cuda") for n in sizes}
        self._out = {n: torch.zeros_like(x) for n, x in self._x.items()}

    def choose(self) -> str:
        """Kind after kind, the largest first, beside what is chosen already; says what and why."""
        first = {_kind(use, linear): (use, linear) for use, linear in reversed(self._chain)}
        plain = best = self._us()
        chosen = []
        for kind in sorted(first, key=lambda kind: kind.outputs * kind.inner, reverse=True):
            use, linear = first[kind]
            expected = self._outputs(use, linear)
            for way in linear.candidates(self._rows):
                if not way.takes(kind.inner):
                    continue
                before = linear.choices.get(self._rows)
                linear.choices[self._rows] = way
                us = self._us_if_right(kind, use, linear, expected)
                if us < best * (1 - _GAIN):
                    best = us
                elif before is None:
                    del linear.choices[self._rows]
                else:
                    linear.choices[self._rows] = before
            way_chosen = linear.choices.get(self._rows) or "cuBLAS"
            chosen.append(f"{kind.name} {kind.outputs}x{kind.inner} by {way_chosen}")
        return f"{best:.0f} us, all by cuBLAS {plain:.0f}: {'; '.join(chosen)}"

    def _us_if_right(self, kind: _Kind, use: Use, linear: FewRowsLinear, expected: Tensor) -> float:
        way = linear.choices[self._rows]
        try:
            error = (self._outputs(use, linear) - expected).abs().max()
            tolerance = _INT8_TOLERANCE if way.int8 else _TOLERANCE
            if error <= tolerance * expected.abs().max():
                return self._us()
            logger.warning("%s of %d rows is wrong by %s", kind, self._rows, way)
        except Exception as reason:  # of a compiler or a device that nobody has tried
            logger.warning("%s of %d rows fails by %s: %s", kind, self._rows, way, reason)
        return float("inf")

    def _outputs(self, use: Use, linear: FewRowsLinear) -> Tensor:
        out = self._out[linear.out_features].zero_()
        return self._run(use, self._x[linear.in_features], out).clone()

    def _us(self) -> float:
        def products() -> None:
            for use, linear in self._chain:
                self._run(use, self._x[linear.in_features], self._out[linear.out_features])

        return graph_us([products], _REPEATS)


def _kind(use: Use, linear: FewRowsLinear) -> _Kind:
    if use.norm is None:
        name = "alone" if use.alone else "added"
    else:
        name = "gated" if use.gated else "normed"
    return _Kind(name, linear.out_features, linear.in_features)
