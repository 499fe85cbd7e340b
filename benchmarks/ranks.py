"""How long a step takes that several ranks share. For one and for two GPUs:

    torchrun --standalone --nproc-per-node=1 -m benchmarks.ranks MODEL --device cuda
    torchrun --standalone --nproc-per-node=2 -m benchmarks.ranks MODEL --device cuda

MODEL is a folder, for instance of benchmarks/inflate.py. Steps run eagerly, so a single rank is
slower than the scorer, which records them: `benchmarks/gpu_step.py` measures that.
"""

from __future__ import annotations

import argparse
import os
import statistics
import sys
import time
from pathlib import Path

import torch

from outrider.engine.batch import RowSlice, pack
from outrider.engine.model.loader import ModelOptions, load_model
from outrider.engine.model.paged_model import PagedModel
from outrider.engine.model.parallel.ranks import RankGroup, Ranks

PAGE_SIZE = 64
START_TIMEOUT_S = 600.0


def step_ms(model: PagedModel, rows: int, query_len: int, context: int, repeats: int) -> float:
    """Median of a step's wall time; all rows share their pages, so the numbers mean nothing."""
    pages = list(range(-(-context // model.page_size)))
    slices = [RowSlice([0] * query_len, context - query_len, pages, query_len)] * rows
    seconds = []
    for _ in range(repeats + 3):
        began = time.perf_counter()
        model.forward(pack(slices, model.page_size, model.device))
        if model.device.type == "cuda":
            torch.cuda.synchronize(model.device)
        seconds.append(time.perf_counter() - began)
    return 1e3 * statistics.median(seconds[3:])


def main() -> None:
    p = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawTextHelpFormatter)
    p.add_argument("model", type=Path)
    p.add_argument("--device", default="cpu")
    p.add_argument("--dtype", default=None, help="default: bfloat16 on CUDA, float32 on a CPU")
    p.add_argument("--context", type=int, default=1024)
    p.add_argument("--repeats", type=int, default=20)
    args = p.parse_args()
    dtype = args.dtype or ("bfloat16" if args.device == "cuda" else "float32")
    ranks = Ranks.of(os.environ)
    group = None
    if ranks is not None:
        device = ranks.device(args.device)
        group = RankGroup(ranks, device, start_timeout_s=START_TIMEOUT_S)
    model = load_model(
        args.model,
        ModelOptions(page_size=PAGE_SIZE, num_pages=-(-args.context // PAGE_SIZE)),
        dtype=getattr(torch, dtype),
        device=torch.device(args.device) if group is None else group.device,
        group=group,
    )
    if group is not None and not group.ranks.leads:
        group.follow(model)
        return
    size = 1 if group is None else group.ranks.size
    print(f"{args.model}, {dtype}, {size} of {args.device}, context {args.context}: ms per step")
    for rows in (1, 8, 32):
        for query_len in (1, 5):
            took = step_ms(model, rows, query_len, args.context, args.repeats)
            print(f"{rows:3} rows of {query_len} tokens: {took:8.2f}", flush=True)
    if group is not None:
        group.stop()


if __name__ == "__main__":
    main()
    sys.stdout.flush()
    os._exit(0)  # nobody waits for the others' end of the collectives' connections
