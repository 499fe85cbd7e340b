"""python -m benchmarks.gpu_ways: how products of few rows are best divided among programs.

Every division of every kind of product is timed as the engine times its candidates at start-up: in
a chain of a model's products, over more weights than a cache holds, beside the best that was found
for larger products. The weights are random. Needs a CUDA device.
"""

from __future__ import annotations

import argparse
import json
import multiprocessing
import os
import shlex
import sys
from collections.abc import Sequence
from concurrent.futures import ProcessPoolExecutor
from pathlib import Path
from typing import Any

import torch

from benchmarks import report
from benchmarks.gpu import gpu_name
from benchmarks.inflate import SHAPES
from benchmarks.program import say
from outrider.engine.cuda.gemm import hopper
from outrider.engine.cuda.gemm.autotune import Chain, timed
from outrider.engine.cuda.gemm.linear import FewRowsLinear
from outrider.engine.cuda.gemm.tilings import (
    Gemv,
    HopperTiles,
    Int8HiLo,
    Int8HiLoBlocks,
    Tiles,
    Tiling,
)
from outrider.engine.cuda.launch import launch_options
from outrider.engine.cuda.llama_ops import TritonOps
from outrider.engine.layers.ops import Use

_COMPILERS = 16  # processes at most, each with half a gigabyte of the device

# What a program takes: numbers a thread; else rows of the weight, of its inner dimension, stages,
# warps, and programs among which a product is divided at most.
_STRIPS = ((32, 4), (32, 8), (32, 16), (64, 2), (64, 4), (64, 8), (128, 2), (128, 4), (128, 8))
_INT8_STRIPS = (
    *((64, 4), (64, 8), (128, 4), (128, 8), (256, 2), (256, 4), (256, 8)),
    *((512, 2), (512, 4), (512, 8)),
)
_TILES = (
    *((32, 256, 5, 4, 512), (32, 256, 6, 4, 256), (32, 512, 3, 4, 128), (64, 128, 5, 4, 256)),
    *((64, 128, 6, 4, 256), (64, 256, 2, 4, 512), (64, 256, 3, 4, 256), (64, 512, 2, 4, 128)),
    *((128, 64, 8, 4, 256), (128, 128, 4, 4, 256), (128, 128, 4, 8, 256), (128, 256, 2, 4, 128)),
)
_WEIGHT_LEFT = (
    *((64, 64, 6, 4, 256), (64, 64, 7, 4, 256), (64, 128, 3, 4, 256), (64, 128, 4, 4, 256)),
    *((64, 128, 6, 4, 256), (64, 256, 3, 4, 256), (128, 64, 4, 4, 256), (128, 64, 6, 4, 256)),
    *((128, 64, 8, 4, 128), (128, 128, 4, 4, 256), (128, 128, 4, 8, 256), (128, 256, 2, 4, 256)),
    *((256, 64, 4, 8, 128), (256, 64, 5, 8, 128), (256, 128, 3, 8, 128)),
)
_PLANES = (
    *((64, 128, 6, 4, 256), (64, 128, 8, 4, 128), (64, 256, 3, 4, 256), (64, 256, 4, 4, 128)),
    *((64, 512, 3, 4, 128), (128, 128, 4, 4, 256), (128, 128, 5, 4, 128), (128, 256, 3, 4, 128)),
    (128, 256, 3, 8, 128),
)
_BLOCK_PLANES = (
    *((64, 128, 6, 4, 256), (64, 256, 3, 4, 256), (64, 256, 4, 4, 256), (64, 256, 6, 4, 128)),
    *((64, 512, 3, 4, 128), (64, 512, 4, 4, 128), (128, 128, 4, 4, 256), (128, 128, 6, 4, 128)),
    *((128, 256, 3, 4, 128), (128, 256, 4, 4, 128), (128, 512, 2, 4, 128), (256, 128, 4, 8, 128)),
)

# A program's rows of the weight, programs that divide it at most, and programs on a multiprocessor.
_BULK_TILES = (
    *((128, 1, 1), (128, 66, 1), (128, 100, 1), (128, 132, 1), (128, 1, 2), (128, 132, 2)),
    *((128, 264, 2), (256, 1, 1), (256, 66, 1), (256, 100, 1)),
)


def _ways(rows: int, *, int8: bool) -> list[Tiling]:
    ways: list[Tiling] = []
    if rows <= 2:
        ways += [Gemv(*how) for how in _STRIPS]
        ways += [Gemv(*how, int8=True) for how in _INT8_STRIPS if int8]
    if 1 < rows <= 32:
        ways += [Tiles(*how) for how in _TILES]
    if rows > 1:
        ways += [Tiles(*how, weight_left=True) for how in _WEIGHT_LEFT]
    if int8 and rows > 1:
        ways += [Int8HiLoBlocks(*how) for how in _BLOCK_PLANES if rows <= 16]
        ways += [Int8HiLo(*how) for how in _PLANES if rows > 8]
    if rows > 2 and hopper.available():
        ways += [HopperTiles(*how) for how in _BULK_TILES]
        ways += [HopperTiles(*how, int8=True) for how in _BULK_TILES if int8]
    return ways


def _uses(shape: str, layers: int) -> list[Use]:
    """The products of some layers and the head, of random weights."""
    config = SHAPES[shape]
    hidden, inner = config["hidden_size"], config["intermediate_size"]
    heads = config["num_attention_heads"] + 2 * config["num_key_value_heads"]
    qkv = heads * config["head_dim"]
    norm = torch.ones(hidden, dtype=torch.bfloat16, device="cuda")
    uses: list[Use] = []
    for _ in range(layers):
        uses += [Use(_linear(qkv, hidden), norm), Use(_linear(hidden, hidden))]
        uses += [Use(_linear(2 * inner, hidden), norm, gated=True), Use(_linear(hidden, inner))]
    return [*uses, Use(_linear(config["vocab_size"], hidden), norm)]


def _linear(outputs: int, inner: int) -> FewRowsLinear:
    weight = torch.randn(outputs, inner, dtype=torch.bfloat16, device="cuda")
    return FewRowsLinear(weight.mul_(inner**-0.5))


@torch.inference_mode()
def _compile(shape: str, rows: Sequence[int], part: int, parts: int, *, int8: bool) -> None:
    """Leaves one part of the kernels in Triton's cache."""
    chain = timed(_uses(shape, 1), int8=int8)
    jobs = [(n, way) for n in rows for way in _ways(n, int8=int8)]
    for n, way in jobs[part::parts]:
        short = Chain(chain, n, TritonOps().product)
        for kind in short.kinds:
            short.compare(kind, [way])


@torch.inference_mode()
def _sweep(args: argparse.Namespace) -> list[dict[str, Any]]:
    uses = _uses(args.shape, SHAPES[args.shape]["num_hidden_layers"])
    chain = timed(uses, int8=args.int8)
    found: list[dict[str, Any]] = []
    for rows in args.rows:
        timing = Chain(chain, rows, TritonOps().product)
        for kind in timing.kinds:
            times = timing.compare(kind, _ways(rows, int8=args.int8))
            best = sorted(times, key=times.__getitem__)
            timing.take(kind, best[0])
            shown = [*best[: args.top], *([None] if None in best[args.top :] else [])]
            for way in shown:
                name = str(way or "cuBLAS")
                found.append({"rows": rows, "product": str(kind), "us": times[way], "way": name})
                say(f"{rows} rows, {kind}: {times[way]:.0f} us by {name}")
    return found


def main(argv: Sequence[str] | None = None) -> int:
    args = _parser().parse_args(argv)
    launch_options()  # is measured: not beside those that compile
    parts = min(_COMPILERS, os.cpu_count() or 1)
    with ProcessPoolExecutor(parts, multiprocessing.get_context("spawn")) as pool:
        jobs = [
            pool.submit(_compile, args.shape, args.rows, part, parts, int8=args.int8)
            for part in range(parts)
        ]
        for job in jobs:
            job.result()
    say("all kernels are compiled")
    found = _sweep(args)
    command = shlex.join(["python", "-m", "benchmarks.gpu_ways", *(argv or sys.argv[1:])])
    setup = {**report.machine(), "gpu": gpu_name(), "command": command}
    lines = [[str(r["rows"]), r["product"], f"{r['us']:.0f}", r["way"]] for r in found]
    table = report.table(["rows", "product", "chain us", "way"], lines)
    print("\n".join([f"`{command}`", "", f"{setup['gpu']}, {args.shape}", "", *table]))
    if args.json is not None:
        args.json.write_text(json.dumps({"setup": setup, "results": found}, indent=1) + "\n")
    return 0


def _parser() -> argparse.ArgumentParser:
    p = argparse.ArgumentParser(
        prog="python -m benchmarks.gpu_ways",
        description=__doc__,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    p.add_argument("--shape", choices=SHAPES, default="llama-3.1-8b")
    p.add_argument("--rows", type=int, nargs="+", default=[1, 2, 5, 8, 16, 32, 40])
    p.add_argument("--int8", action="store_true", help="weights may be read as int8")
    p.add_argument("--top", type=int, default=5, help="ways of each product to show")
    p.add_argument("--json", type=Path, help="where the numbers go")
    return p


if __name__ == "__main__":
    sys.exit(main())
