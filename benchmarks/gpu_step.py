"""Time one step of an 8B-shaped model on a GPU, beside the memory bandwidth and vLLM.

    python -m benchmarks.gpu_step [--model FOLDER] [--quantization none int8 fp8] [--vllm ...]
        [--kv-cache-dtype auto fp8]

Without a folder the weights are random. The rows with q = 1 are steps without speculation, those
without a context a prompt of q tokens. Columns, all in ms:
  floor         time to read the weights once at the bandwidth of a large copy in this run
  kv            the same for the keys and values of the rows' context
  device        the engine's captured step (forward, sampling, verification), replayed
  runner        the same from its inputs to its result on the host, wall time
  engine, gap   a loop of the whole engine (schedule, run, commit), wall time, and the host's time
                in it between a result and the next launch
  vllm          vLLM's time per token, from two lengths of output, so that prompts do not count
"""

from __future__ import annotations

import argparse
import gc
import logging
import statistics
import sys
import tempfile
import time
from dataclasses import asdict, dataclass, replace
from itertools import product
from pathlib import Path
from typing import Any

import torch
from transformers import AutoModelForCausalLM, LlamaConfig

from benchmarks.inflate import SHAPES
from benchmarks.lib import report
from benchmarks.lib.engine_step import EngineSteps, StepTimes
from benchmarks.lib.gpu import copy_bandwidth, gpu_name, random_llama
from benchmarks.lib.processes import ProcessError, Worker, stopping
from benchmarks.lib.program import arguments, say
from benchmarks.lib.vllm_peer import VllmEngine, VllmPlace
from outrider.config import KV_CACHE_DTYPES
from outrider.engine.layers.quantized import QuantizedModule
from outrider.engine.model.loader import ModelOptions, build_paged_model, kv_bytes_per_token
from outrider.engine.model.quantization import DTYPES, round_linears

_LOOP_ROOM = 1024  # tokens that a row of the engine's loop may grow by
_VLLM_NAMES = {"int8": "int8_per_channel_weight_only", "fp8": "fp8"}
_NEW_TOKENS = (16, 144)  # of two runs of vLLM, whose difference is measured


@dataclass(frozen=True)
class Row:
    """One line of the table. None: not measured."""

    rows: int
    query_len: int
    context: int
    quantization: str
    kv_cache_dtype: str
    floor_ms: float
    kv_ms: float
    engine: StepTimes | None = None
    vllm_ms: float | None = None


def main() -> int:
    """Measure, print and write the table."""
    args = _parser().parse_args()
    logging.basicConfig(level=logging.INFO, format="%(message)s")  # what is chosen at start-up
    device = torch.device(args.device)
    bandwidth = copy_bandwidth(device)
    table: list[Row] = []
    weights: dict[str, int] = {}
    kv_bytes: dict[str, int] = {}  # per token
    for quantization, cache in product(args.quantization, args.kv_cache_dtype):
        model = _model(args, quantization, device)
        config = model.config
        weights[quantization], kv_bytes[cache] = _bytes_read(model, cache)
        floor = weights[quantization] / bandwidth * 1e3
        say(
            f"{quantization}: {weights[quantization] / 1e9:.2f} GB of weights a step; "
            f"cache {cache}: {kv_bytes[cache]} bytes a token; {bandwidth / 1e12:.2f} TB/s"
        )
        sizes = [(n, q, c) for c in args.context for q in args.query_lens for n in args.rows]
        sizes += [(1, n, 0) for n in args.prompts]
        rows = [
            Row(n, q, c, quantization, cache, floor, n * c * kv_bytes[cache] / bandwidth * 1e3)
            for n, q, c in sizes
        ]
        measured = _engine(args, model, rows, cache)
        del model
        gc.collect()
        if device.type == "cuda":
            torch.cuda.empty_cache()
        table += _vllm(args, config, measured, quantization) if cache == "auto" else measured
    report.publish(
        "One step on a GPU",
        "benchmarks.gpu_step",
        _lines(table, args.dtype),
        [asdict(row) for row in table],
        args.out,
        gpu=gpu_name(),
        copy_bandwidth=bandwidth,
        weight_bytes=weights,
        kv_bytes_per_token=kv_bytes,
    )
    return 0


def _parser() -> argparse.ArgumentParser:
    p = arguments("benchmarks.gpu_step", __doc__)
    p.add_argument("--model", type=Path, help="a checkpoint folder")
    p.add_argument("--shape", choices=SHAPES, default="llama-3.1-8b", help="of random weights")
    p.add_argument("--rows", type=int, nargs="+", default=[1, 8, 32, 64])
    p.add_argument("--quantization", choices=("none", *DTYPES), nargs="+", default=["none"])
    p.add_argument("--kv-cache-dtype", choices=KV_CACHE_DTYPES, nargs="+", default=["auto"])
    p.add_argument("--prompts", type=int, nargs="*", default=[], help="tokens of prompts to time")
    p.add_argument("--query-lens", type=int, nargs="+", default=[1, 5])
    p.add_argument("--context", type=int, nargs="+", default=[512, 4096])
    p.add_argument("--repeats", type=int, default=50)
    p.add_argument("--loop-steps", type=int, default=100, help="0: no loop of the whole engine")
    p.add_argument("--loop-context", type=int, nargs="+", default=[512])
    p.add_argument("--page-size", type=int, default=64)
    p.add_argument("--attention-backend", help="default: the engine's choice")
    p.add_argument("--vllm", help="a folder of vLLM's wheels for this Python, or another Python")
    p.add_argument("--vllm-context", type=int, nargs="+", default=[512])
    p.add_argument("--dtype", default="bfloat16")
    p.add_argument("--device", default="cuda")
    p.add_argument("--out", type=Path, default=Path("benchmarks/results/gpu_step"))
    return p


def _model(args: argparse.Namespace, quantization: str, device: torch.device) -> Any:
    if args.model is None:
        model = random_llama(SHAPES[args.shape], args.dtype, device)
    else:
        dtype = getattr(torch, args.dtype)
        model = AutoModelForCausalLM.from_pretrained(args.model, dtype=dtype).to(device)
    if quantization != "none":
        round_linears(model, quantization)
        if device.type == "cuda":
            torch.cuda.empty_cache()
    return model


def _bytes_read(model: Any, kv_cache_dtype: str) -> tuple[int, int]:
    """Return the bytes of weights that a step reads, and the KV cache's bytes per token."""
    config = model.config
    weights = sum(p.numel() * p.element_size() for p in model.parameters())
    weights += sum(
        each.weight.nbytes
        for each in model.modules()
        if isinstance(each, QuantizedModule) and each.weight is not None
    )
    if not config.tie_word_embeddings:  # a step looks up a few rows of it
        table = model.model.embed_tokens.weight
        weights -= table.numel() * table.element_size()
    return weights, kv_bytes_per_token(config, model.dtype, kv_cache_dtype)


def _engine(
    args: argparse.Namespace, model: Any, table: list[Row], kv_cache_dtype: str
) -> list[Row]:
    loop = max(args.loop_context) + _LOOP_ROOM
    longest = max(max(args.context) + max(args.query_lens), loop, *args.prompts)
    pages = max(args.rows) * -(-longest // args.page_size)
    began = time.perf_counter()
    options = ModelOptions(
        page_size=args.page_size,
        num_pages=pages,
        max_model_len=longest,
        self_test=False,
        attention_backend=args.attention_backend,
        kv_cache_dtype=kv_cache_dtype,
    )
    paged = build_paged_model(model, options)
    steps = EngineSteps(paged, [(n, q) for n in args.rows for q in args.query_lens])
    say(f"engine ready after {time.perf_counter() - began:.1f} s")
    measured = []
    for row in table:
        n, q, context = row.rows, row.query_len, row.context
        if context:
            loop_steps = args.loop_steps if context in args.loop_context else 0
            times = steps.measure(n, q, context, repeats=args.repeats, loop_steps=loop_steps)
        else:
            times = steps.measure_prompt(q, repeats=args.repeats)
        say(f"{n} rows, {q} tokens, context {context}: {times}")
        measured.append(replace(row, engine=times))
    return measured


def _vllm(
    args: argparse.Namespace, config: LlamaConfig, table: list[Row], quantization: str
) -> list[Row]:
    place = VllmPlace.find(args.vllm)
    if place is None:
        say("*** vLLM is left out: --vllm was not given ***")
        return table
    wanted = [r for r in table if r.query_len == 1 and r.context in args.vllm_context]
    found: dict[tuple[int, int], float] = {}
    with tempfile.TemporaryDirectory(prefix="bench-") as work, stopping([]) as children:
        config.architectures = ["LlamaForCausalLM"]
        config.save_pretrained(work)
        options = {"load_format": "dummy", "skip_tokenizer_init": True}
        if quantization != "none":
            options["quantization"] = _VLLM_NAMES[quantization]
        longest = max(args.vllm_context) + sum(_NEW_TOKENS)
        engine = VllmEngine(place, Path(work), longest, max(args.rows), options=options)
        try:
            worker = engine.start(Path(work), children)
            for row in wanted:
                found[row.rows, row.context] = _vllm_ms(worker, row.rows, row.context)
                say(f"vLLM, {row.rows} rows: {found[row.rows, row.context]:.2f} ms")
        except ProcessError as error:
            say(f"*** vLLM: {error} ***")
    return [
        replace(row, vllm_ms=found.get((row.rows, row.context))) if row in wanted else row
        for row in table
    ]


def _vllm_ms(worker: Worker, rows: int, context: int) -> float:
    """Return the milliseconds per token of rows that are `context` long on average."""
    length = max(1, context - _NEW_TOKENS[1] // 2)
    prompts = [[(7 * j + i) % 1000 for j in range(length)] for i in range(rows)]

    def run(tokens: int) -> float:
        request = {"prompts": prompts, "max_tokens": tokens, "concurrency": rows}
        seconds: float = worker.ask(request, timeout_s=120)["wall_s"]
        return seconds

    short, long = _NEW_TOKENS
    run(short)
    run(long)
    costs = [(run(long) - run(short)) / (long - short) * 1e3 for _ in range(3)]
    return statistics.median(costs)


def _lines(table: list[Row], dtype: str) -> list[str]:
    head = ["weights", "cache", "rows", "q", "context", "floor", "kv", "device", "/ floor"]
    head += ["runner", "engine", "gap", "vllm", "vllm / engine"]
    lines = []
    for row in table:
        e = row.engine
        assert e is not None
        ours = e.engine_ms if e.engine_ms is not None else e.runner_ms
        ratio = None if row.vllm_ms is None else row.vllm_ms / ours
        numbers = [row.floor_ms, row.kv_ms, e.device_ms, e.device_ms / (row.floor_ms + row.kv_ms)]
        rest = [e.runner_ms, e.engine_ms, e.gap_ms, row.vllm_ms, ratio]
        cells = [report.number(x) for x in [*numbers, *rest]]
        name = dtype if row.quantization == "none" else row.quantization
        lines.append(
            [name, row.kv_cache_dtype, str(row.rows), str(row.query_len), str(row.context), *cells]
        )
    return report.table(head, lines)


if __name__ == "__main__":
    sys.exit(main())
