"""python -m benchmarks.gpu_kernels: one operation at a time at an 8B model's shapes, in bfloat16.

Every operation is replayed from a CUDA graph, many in a row over different weights or pages, so
that neither launches nor the L2 cache flatter it. A section that fails prints its traceback and
the others go on. Needs a CUDA device.
"""

from __future__ import annotations

import argparse
import itertools
import json
import statistics
import sys
import traceback
from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from benchmarks.gpu import gpu_name, wall_ms
from outrider.engine.attention.base import AttentionBackend, AttentionParams, StepAttention
from outrider.engine.batch import PackedBatch, RowSlice, pack
from outrider.engine.kv_cache.pools import KVPools, PageMajorPool
from outrider.engine.sampling.coupled import SamplingBatch
from outrider.engine.shared_prefix import SharedPrefix
from outrider.params import SamplingParams

CUDA = torch.device("cuda")
BF16 = torch.bfloat16
HIDDEN, INTERMEDIATE, VOCAB, HEADS, KV_HEADS, DIM = 4096, 14336, 128256, 32, 8, 128
PRODUCTS = {
    "qkv": (6144, HIDDEN),
    "o": (HIDDEN, HIDDEN),
    "gate_up": (2 * INTERMEDIATE, HIDDEN),
    "down": (HIDDEN, INTERMEDIATE),
    "head": (VOCAB, HIDDEN),
}
DRAFT_LAYERS, DRAFT_HEADS, DRAFT_KV = 16, 32, (8, 64, 64)  # a layer's query heads, and its pool
BRANCHES = ((8, 8, 512), (8, 16, 512), (32, 4, 512), (32, 16, 512), (8, 16, 2048), (16, 16, 1024))
ROWS = (1, 5, 8, 32, 40, 160)
DRAWS = {
    "T=0": SamplingParams(temperature=0.0),
    "T=1": SamplingParams(temperature=1.0),
    "top_p": SamplingParams(temperature=0.7, top_p=0.9),
    "top_k, top_p": SamplingParams(temperature=0.7, top_k=20, top_p=0.8),
    "min_p": SamplingParams(temperature=1.0, min_p=0.05),
}
COLD_BYTES = 192 * 2**20  # what a graph must read before it comes back: well above the L2 cache
Record = dict[str, Any]
AttendNew = Callable[[Tensor, Tensor, StepAttention, PageMajorPool, AttentionParams], Tensor]


def graph_us(calls: Sequence[Callable[[], object]], repeats: int = 7) -> float:
    """Microseconds per call, the median of replays of all calls in a row."""
    stream = torch.cuda.Stream()  # type: ignore[no-untyped-call]
    stream.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(stream):
        for call in calls[:2]:  # compiles; the capture must not
            call()
    torch.cuda.current_stream().wait_stream(stream)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        for call in calls:
            call()
    loops = max(1, 64 // len(calls))
    times: list[float] = []
    for _ in range(repeats + 1):
        start, end = (
            torch.cuda.Event(enable_timing=True)  # type: ignore[no-untyped-call]
            for _ in range(2)
        )
        start.record()
        for _ in range(loops):
            graph.replay()
        end.record()
        end.synchronize()
        times.append(start.elapsed_time(end) * 1e3 / (loops * len(calls)))
    return statistics.median(times[1:])


def linear() -> Iterator[Record]:
    """cuBLAS: `F.linear`, and `addmm_` into the residual; terabytes of weights per second."""
    for name, (n, k) in PRODUCTS.items():
        weights = _weights(n, k)
        for rows in ROWS:
            x, residual = _rand(rows, k), _rand(rows, n)
            size = {"product": name, "rows": rows}
            plain = graph_us([partial(F.linear, x, w) for w in weights])
            yield {"op": "F.linear", **size, **_speed(plain, n, k)}
            if name in ("o", "down"):
                added = graph_us([partial(residual.addmm_, x, w.t()) for w in weights])
                yield {"op": "addmm_", **size, **_speed(added, n, k)}


def pointwise() -> Iterator[Record]:
    """What lies between the products, Triton and torch."""
    from outrider.engine.cuda.llama_ops import TritonOps
    from outrider.engine.layers.ops import TorchOps

    norm = _rand(HIDDEN)
    for rows in ROWS:
        x, qkv = _rand(rows, HIDDEN), _rand(rows, (HEADS + 2 * KV_HEADS) * DIM)
        gate_up, rope = _rand(rows, 2 * INTERMEDIATE), _rand(rows, 2, 2, DIM // 2)
        pool = PageMajorPool(64, 16, (KV_HEADS, DIM, DIM), BF16, CUDA)
        slots = torch.randperm(1024, device=CUDA)[:rows]
        for ops in (TritonOps(), TorchOps()):
            calls: dict[str, Callable[[], object]] = {
                "rms_norm": partial(ops.rms_norm, x, norm, 1e-5),
                "rotate_and_store": partial(ops.rotate_and_store, qkv, rope, slots, pool),
                "silu_mul": partial(ops.silu_mul, gate_up),
            }
            for name, call in calls.items():
                kind = type(ops).__name__
                yield {"op": name, "rows": rows, "by": kind, "us": graph_us([call] * 64)}


def attention() -> Iterator[Record]:
    """Every backend and page size, beside the bandwidth's floor."""
    for rows in (1, 8, 32):
        for query_len in (1, 5):
            for context in (512, 4096):
                for page_size in (16, 64, 128):
                    case = _AttentionCase(rows, query_len, context, page_size)
                    for name, backend in _backends():
                        try:
                            us = case.us(backend)
                        except Exception:
                            traceback.print_exc()
                            continue
                        yield {
                            "op": name,
                            "rows": rows,
                            "query": query_len,
                            "context": context,
                            "page": page_size,
                            "us": us,
                            "floor_us": case.bytes / 4.3e6,
                        }


def new_tokens() -> Iterator[Record]:
    """Turning, storing and attending: in one launch, and one after the other."""
    from outrider.engine.cuda.llama_ops import TritonOps
    from outrider.engine.layers.ops import LlamaOps

    ops, backend = TritonOps(), _triton_backend()
    ways: dict[str, AttendNew] = {
        "one launch": ops.attend_new,
        "one after the other": partial(LlamaOps.attend_new, ops),
    }
    for rows in (1, 8, 16, 32):
        for query_len in (1, 5):
            case = _AttentionCase(rows, query_len, 512, 64)
            for name, attend_new in ways.items():
                us = case.us_new(backend, attend_new)
                yield {"op": name, "rows": rows, "query": query_len, "context": 512, "us": us}


def shared_pages() -> Iterator[Record]:
    """A layer's attention to branches of a 1B model: rows apart, and joined by what they share."""
    from outrider.engine.cuda.llama_ops import TritonOps

    ops, backend = TritonOps(), _triton_backend()
    kv_heads, dim, _ = DRAFT_KV
    params = AttentionParams(dim**-0.5)
    for sessions, branches, context in BRANCHES:
        apart = _branches(sessions, branches, context)
        shared = SharedPrefix.of(apart.block_table, apart.seq_lens, apart.page_size)
        num_pages = int(apart.block_table.max()) + 1
        pools = [PageMajorPool(num_pages, 16, DRAFT_KV, BF16, CUDA) for _ in range(DRAFT_LAYERS)]
        rows = len(apart.query_lens)
        qkv, rope = _rand(rows, (DRAFT_HEADS + 2 * kv_heads) * dim), _rand(rows, 2, 2, dim // 2)
        for name, batch in {"apart": apart, "joined": replace(apart, shared=shared)}.items():
            calls = [
                partial(ops.attend_new, qkv, rope, backend(batch), pool, params) for pool in pools
            ]
            size = {"sessions": sessions, "branches": branches, "context": context}
            yield {"op": name, **size, "us": graph_us(calls)}


def _branches(sessions: int, branches: int, context: int) -> PackedBatch:
    """They leave their sessions at the five places of a chain, and own two pages each."""
    free = itertools.count()
    rows = []
    for _ in range(sessions):
        pages = list(itertools.islice(free, context // 16 + 1))
        for start in itertools.islice(itertools.cycle(range(context, context + 5)), branches):
            own = list(itertools.islice(free, 2))
            rows.append(RowSlice([1], start, pages[: start // 16] + own, 1))
    return replace(pack(rows, 16, CUDA), recorded=True)


def page_copies() -> Iterator[Record]:
    """Pages of a 1B model, all layers' at once: number by number, and as they are copied."""
    pools = KVPools(3000, 16, BF16, CUDA, num_layers=DRAFT_LAYERS)
    for layer in range(DRAFT_LAYERS):
        pools.allocate(layer, *DRAFT_KV)
    numbers = _rand(DRAFT_LAYERS, 3000, pools.layer(0).bytes_per_slot * 16 // BF16.itemsize)
    for count in (16, 128, 512):
        source, target = torch.randperm(3000, device=CUDA)[: 2 * count].view(2, -1)
        calls = {
            "by numbers": partial(_copy, numbers, source, target),
            "copy_pages": partial(pools.copy_pages, source, target),
        }
        for name, call in calls.items():
            yield {"op": name, "pages": count, "us": graph_us([call])}


def _copy(pages: Tensor, source: Tensor, target: Tensor) -> None:
    pages.index_copy_(1, target, pages.index_select(1, source))


class _AttentionCase:
    """Layers that each have pages of their own, all from one pool."""

    def __init__(self, rows: int, query_len: int, context: int, page_size: int) -> None:
        self.bytes = rows * context * 2 * KV_HEADS * DIM * BF16.itemsize
        layers = max(4, min(64, -(-COLD_BYTES // self.bytes)))
        pages = -(-context // page_size)
        total = layers * rows * pages
        self._pool = PageMajorPool(total, page_size, (KV_HEADS, DIM, DIM), BF16, CUDA)
        self._query = _rand(rows * query_len, KV_HEADS, HEADS // KV_HEADS, DIM)
        tables = torch.randperm(total).view(layers, rows, pages).tolist()
        steps = [
            [RowSlice([1] * query_len, context - query_len, row, query_len) for row in table]
            for table in tables
        ]
        self._batches = [replace(pack(rows, page_size, CUDA), recorded=True) for rows in steps]

    def us(self, backend: AttentionBackend) -> float:
        params = AttentionParams(DIM**-0.5)
        steps: list[StepAttention] = [backend(batch) for batch in self._batches]
        for step in steps:  # whatever is planned per step is planned
            step.attend(self._query, self._pool, params)
        torch.cuda.synchronize()
        calls = [partial(step.attend, self._query, self._pool, params) for step in steps]
        return graph_us(calls, repeats=5)

    def us_new(self, backend: AttentionBackend, attend_new: AttendNew) -> float:
        tokens = len(self._query)
        qkv, rope = _rand(tokens, (HEADS + 2 * KV_HEADS) * DIM), _rand(tokens, 2, 2, DIM // 2)
        params = AttentionParams(DIM**-0.5)
        calls = [
            partial(attend_new, qkv, rope, backend(batch), self._pool, params)
            for batch in self._batches
        ]
        return graph_us(calls, repeats=5)


def _backends() -> Iterator[tuple[str, AttentionBackend]]:
    from importlib.util import find_spec

    if find_spec("flash_attn") is not None:
        from outrider.engine.cuda.attention.flash import Flash4Attention

        yield "flash4", Flash4Attention
    yield "triton", _triton_backend()


def _triton_backend() -> AttentionBackend:
    from outrider.engine.cuda.attention.triton import TritonBackend

    return TritonBackend(torch.cuda.get_device_properties(CUDA).multi_processor_count)


def sampling() -> Iterator[Record]:
    """Drawing tokens: torch's argmax, ours and torch's own with and without noise and cuts, and the
    four best.
    """
    from outrider.engine.cuda.sampling import choose_top, sample
    from outrider.engine.sampling.coupled import sample as torch_sample

    for rows in ROWS:
        logits = 3 * _rand(rows, VOCAB)
        yield {"op": "argmax", "rows": rows, "us": graph_us([partial(logits.argmax, -1)] * 16)}
        for name, params in DRAWS.items():
            seeded = [replace(params, seed=seed) for seed in range(rows)]
            batch = SamplingBatch.build(seeded, list(range(rows)), CUDA)
            drawn = (logits, batch.temperature, batch.seed, batch.position)
            # torch's waits for the device where it cuts, and cannot be recorded.
            times = {
                "sample": graph_us([partial(sample, logits, batch)] * 16),
                "torch": 1e3 * wall_ms(partial(torch_sample, logits, batch), CUDA, 10),
                "choose_top": graph_us([partial(choose_top, *drawn, 4)] * 16),
            }
            for op, us in times.items():
                yield {"op": f"{op}, {name}", "rows": rows, "us": us}


def _rand(*shape: int) -> Tensor:
    return torch.randn(*shape, dtype=BF16, device=CUDA)


def _weights(n: int, k: int) -> list[Tensor]:
    copies = max(2, -(-COLD_BYTES // (n * k * BF16.itemsize)))
    return [_rand(n, k).mul_(k**-0.5) for _ in range(copies)]


def _speed(us: float, n: int, k: int) -> Record:
    return {"us": us, "TB/s": n * k * BF16.itemsize / us * 1e-6}


SECTIONS = {
    "linear": linear,
    "pointwise": pointwise,
    "attention": attention,
    "new_tokens": new_tokens,
    "shared_pages": shared_pages,
    "page_copies": page_copies,
    "sampling": sampling,
}


def main(argv: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(prog="benchmarks.gpu_kernels", description=__doc__)
    parser.add_argument("--only", action="append", choices=SECTIONS, help="may be repeated")
    parser.add_argument("--json", type=Path, help="where the numbers go")
    args = parser.parse_args(argv)
    results: dict[str, list[Record]] = {}
    failed = False
    with torch.inference_mode():
        for name in args.only or SECTIONS:
            print(f"## {name}: {SECTIONS[name].__doc__}", flush=True)
            results[name] = []
            try:
                for record in SECTIONS[name]():
                    results[name].append(record)
                    print(*(f"{key}={_show(value)}" for key, value in record.items()), flush=True)
            except Exception:
                failed = True
                traceback.print_exc()
            torch.cuda.empty_cache()
    if args.json is not None:
        document = {"gpu": gpu_name(), "torch": torch.__version__, "results": results}
        args.json.write_text(json.dumps(document, indent=1) + "\n")
    return 1 if failed else 0


def _show(value: object) -> str:
    return f"{value:.2f}" if isinstance(value, float) else str(value)


if __name__ == "__main__":
    sys.exit(main())
