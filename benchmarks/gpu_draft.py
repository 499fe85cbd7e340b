"""Time the captured draft loop on a GPU: chains, and the branches of drafting ahead.

    python -m benchmarks.gpu_draft [--shape llama-3.2-1b] [--rows 1 8 32] [--num-tokens 4]

The weights are random. Columns, all in ms:
  floor     (forwards) x (weights read once, at the bandwidth of a large copy in this run)
  kv        the same for the keys and values of the rows' context
  wall      the whole call, from rows to tokens on the host
`branches` counts the branches of each session.
"""

from __future__ import annotations

import argparse
import logging
import sys
import time
from array import array
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path

import torch

from benchmarks.inflate import SHAPES
from benchmarks.lib import report
from benchmarks.lib.gpu import copy_bandwidth, gpu_name, random_llama, wall_ms
from benchmarks.lib.program import arguments
from outrider.drafting.ahead.branches import Branch, Trunk, draft_branches, drop
from outrider.drafting.draft_model.loops import DraftModelLoops
from outrider.drafting.drafters import DraftInput
from outrider.drafting.graphs.loop_inputs import LoopShape, make_shapes
from outrider.drafting.graphs.loops import TORCH_SAMPLER, LoopCapture
from outrider.engine.batch import RowSlice
from outrider.engine.kv_cache.block_pool import BlockPool
from outrider.engine.model.loader import ModelOptions, build_paged_model
from outrider.params import SamplingParams

_PAGE_SIZE = 16


@dataclass(frozen=True)
class Row:
    """One line of the table. `branches` 0: chains."""

    sessions: int
    branches: int
    temperature: float
    floor_ms: float
    kv_ms: float
    wall_ms: float


class Bench:
    """A model of random weights, its captured loops, and sessions of `context` tokens."""

    def __init__(self, args: argparse.Namespace) -> None:
        self._args = args
        self.device = torch.device(args.device)
        model = random_llama(SHAPES[args.shape], args.dtype, self.device)
        self.weights = sum(p.numel() * p.element_size() for p in model.parameters())
        sessions, branches = max(args.rows), max(args.branches, default=0)
        tokens = args.context + 2 * (args.num_tokens + 1)
        own = -(-(2 * args.num_tokens + 2) // _PAGE_SIZE) + 1  # pages of a branch at most
        self.model = build_paged_model(
            model,
            ModelOptions(
                page_size=_PAGE_SIZE,
                num_pages=sessions * (-(-tokens // _PAGE_SIZE) + branches * own),
                max_model_len=args.max_model_len,
                self_test=False,
                attention_backend=args.attention_backend,
                int8_weights=args.int8_weights,
            ),
        )
        self.kv_bytes = self.model.kv_bytes_per_page / _PAGE_SIZE
        shapes = make_shapes(rows=args.rows, query_lens=(2,), num_tokens=(args.num_tokens,))
        if branches:
            shapes += make_shapes(
                rows=[n * m for n in args.rows for m in args.branches],
                query_lens=(1,),
                num_tokens=(args.num_tokens,),
                fanout=args.fanout,
            )
        began = time.perf_counter()
        self.graphs = self._record(shapes)
        seconds = time.perf_counter() - began
        print(f"{len(shapes)} loops captured in {seconds:.1f} s", file=sys.stderr)
        self.pool = BlockPool(self.model.num_pages)
        self.tables = [
            array("i", [self.pool.allocate() for _ in range(-(-tokens // _PAGE_SIZE))])
            for _ in range(sessions)
        ]

    def _record(self, shapes: Sequence[LoopShape]) -> DraftModelLoops:
        if self.device.type != "cuda":  # to try this program out
            return DraftModelLoops(
                self.model, LoopCapture(shapes, lambda work: work, TORCH_SAMPLER)
            )
        from outrider.drafting.graphs.loops import triton_sampler
        from outrider.engine.graphs.capture import CudaGraphs

        return DraftModelLoops(self.model, LoopCapture(shapes, CudaGraphs(), triton_sampler()))

    def chains(self, sessions: int, temperature: float, bandwidth: float) -> Row:
        """Time chains, of which half catch up one token and half catch up two."""
        args = self._args
        sampling = [SamplingParams(temperature=temperature, seed=i) for i in range(sessions)]
        slices = [
            RowSlice([7] * (1 + i % 2), args.context - 1 - i % 2, self.tables[i], 1)
            for i in range(sessions)
        ]
        rows = [
            DraftInput(row, args.num_tokens, params)
            for row, params in zip(slices, sampling, strict=True)
        ]

        def draft() -> None:
            self.graphs.draft(rows)

        return self._row((sessions, 0, temperature), args.num_tokens, bandwidth, draft)

    def branches(self, sessions: int, each: int, temperature: float, bandwidth: float) -> Row:
        """Time branches that leave the chain at all of its places."""
        args = self._args
        trunks = [
            Trunk(args.context, self.tables[i], SamplingParams(temperature=temperature, seed=i))
            for i in range(sessions)
        ]
        wanted = [
            Branch(i, j % (args.num_tokens + 1), 100 + j)
            for j in range(each)
            for i in range(sessions)
        ]

        def draft() -> None:
            sizes = {"num_tokens": args.num_tokens, "fanout": args.fanout}
            drafted, _ = draft_branches(self.graphs, self.pool, trunks, wanted, **sizes)
            assert len(drafted) == len(wanted)
            drop(self.pool, drafted)

        return self._row((sessions, each, temperature), args.num_tokens + 1, bandwidth, draft)

    def _row(
        self,
        what: tuple[int, int, float],
        forwards: int,
        bandwidth: float,
        draft: Callable[[], object],
    ) -> Row:
        rows = what[0] * max(1, what[1])
        found = Row(
            *what,
            floor_ms=forwards * self.weights / bandwidth * 1e3,
            kv_ms=forwards * rows * self._args.context * self.kv_bytes / bandwidth * 1e3,
            wall_ms=wall_ms(draft, self.device, self._args.repeats),
        )
        print(found, file=sys.stderr, flush=True)
        return found


def main() -> int:
    """Measure, print and write the table."""
    args = _parser().parse_args()
    logging.basicConfig(level=logging.INFO, format="%(message)s")  # what is chosen at start-up
    bench = Bench(args)
    bandwidth = copy_bandwidth(bench.device)
    table: list[Row] = []
    for temperature in args.temperatures:
        table += [bench.chains(n, temperature, bandwidth) for n in args.rows]
        table += [
            bench.branches(n, m, temperature, bandwidth) for n in args.rows for m in args.branches
        ]
    command = report.command("benchmarks.gpu_draft")
    gpu = {"gpu": gpu_name(), "copy_bandwidth": bandwidth, "weight_bytes": bench.weights}
    head = ["sessions", "branches", "T", "floor", "kv", "wall", "/ floor"]
    lines = []
    for row in table:
        floor = row.floor_ms + row.kv_ms
        times = [row.floor_ms, row.kv_ms, row.wall_ms, row.wall_ms / floor]
        size = [str(row.sessions), str(row.branches), f"{row.temperature:g}"]
        lines.append([*size, *map(report.number, times)])
    title = f"Drafting {args.num_tokens} tokens, context {args.context}"
    parts = [*report.head(title, command, gpu), *report.table(head, lines), ""]
    print(text := "\n".join(parts))
    setup = report.machine() | {"command": command} | gpu
    report.write({"setup": setup, "results": [asdict(row) for row in table]}, text, args.out)
    return 0


def _parser() -> argparse.ArgumentParser:
    p = arguments("benchmarks.gpu_draft", __doc__)
    p.add_argument("--shape", choices=SHAPES, default="llama-3.2-1b")
    p.add_argument("--rows", type=int, nargs="+", default=[1, 8, 32], help="sessions")
    p.add_argument("--branches", type=int, nargs="*", default=[8], help="per session")
    p.add_argument("--num-tokens", type=int, default=4)
    p.add_argument("--fanout", type=int, default=4)
    p.add_argument("--context", type=int, default=512)
    p.add_argument("--max-model-len", type=int, default=8192)
    p.add_argument("--temperatures", type=float, nargs="+", default=[0.0, 1.0])
    p.add_argument("--repeats", type=int, default=50)
    p.add_argument("--attention-backend", help="default: the engine's choice")
    p.add_argument("--int8-weights", action="store_true")
    p.add_argument("--dtype", default="bfloat16")
    p.add_argument("--device", default="cuda")
    p.add_argument("--out", type=Path, default=Path("benchmarks/results/gpu_draft"))
    return p


if __name__ == "__main__":
    sys.exit(main())
