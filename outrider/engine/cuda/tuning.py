"""Chooses how products of few rows are computed, by measuring on the device at start-up.

Every candidate runs as in a step: recorded in a graph, over the weights of one layer after another,
so that they come from memory and not from a cache.
"""

from __future__ import annotations

import logging
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial

import torch
from torch import Tensor

from outrider.engine.cuda.launch import graph_us
from outrider.engine.cuda.products import CANDIDATES, FewRowsLinear, Strips
from outrider.engine.linear import Linear

logger = logging.getLogger(__name__)

_COLD_BYTES = 2**28  # weights in a row: several times the L2 cache
_TOLERANCE = 0.02  # of the largest output: roundings of bfloat16 in another order


@dataclass(frozen=True, slots=True)
class Use:
    """One layer, and what a step does with it."""

    name: str
    layer: Linear
    run: Callable[[Tensor, Tensor], Tensor]  # outputs of x [rows, in]; may write to its [rows, out]


@torch.inference_mode()
def tune(uses: Sequence[Use]) -> None:
    """Sets the choices of every `FewRowsLinear`, equal ones for equal shapes of equal use.

    Whatever fails or is not faster is left to cuBLAS.
    """
    groups: dict[tuple[str, int, int], list[Use]] = {}
    choices: dict[tuple[str, int, int], dict[int, Strips]] = {}
    for use in uses:
        if isinstance(use.layer, FewRowsLinear):
            key = (use.name, use.layer.out_features, use.layer.in_features)
            groups.setdefault(key, []).append(use)
            use.layer.choices = choices.setdefault(key, {})
    began = time.perf_counter()
    for key, group in groups.items():
        said = []
        for rows in CANDIDATES:
            try:
                said.append(f"{rows} rows {_choose(key, group, choices[key], rows)}")
            except Exception as error:  # of a compiler or a device that nobody has tried
                choices[key].pop(rows, None)
                logger.warning("%s %dx%d of %d rows is left to cuBLAS: %s", *key, rows, error)
        logger.info("%s %dx%d: %s", *key, "; ".join(said))
    if groups:
        torch.cuda.empty_cache()
        logger.info("measured products of few rows in %.1f s", time.perf_counter() - began)


def _choose(
    key: tuple[str, int, int], group: Sequence[Use], choices: dict[int, Strips], rows: int
) -> str:
    _, outputs, inner = key
    x = torch.randn(rows, inner, dtype=torch.bfloat16, device="cuda")
    out = torch.zeros(rows, outputs, dtype=torch.bfloat16, device="cuda")
    count = -(-_COLD_BYTES // (inner * outputs * x.element_size()))
    calls = [partial(use.run, x, out) for use in group[:count]]

    def outputs_of_first() -> Tensor:
        out.zero_()
        return group[0].run(x, out).clone()

    expected = outputs_of_first()
    plain = fastest = graph_us(calls)
    best = None
    for way in CANDIDATES[rows]:
        choices[rows] = way
        error = (outputs_of_first() - expected).abs().max()
        if not error <= _TOLERANCE * expected.abs().max():
            logger.warning("%s %dx%d of %d rows is wrong with %s", *key, rows, way)
            continue
        us = graph_us(calls)
        if us < fastest:
            best, fastest = way, us
    if best is None:
        choices.pop(rows, None)
        return f"{plain:.1f} us by cuBLAS"
    choices[rows] = best
    return f"{fastest:.1f} us by {best}, cuBLAS {plain:.1f}"
