"""Times one forward of the engine against `transformers` with DynamicCache, on the same weights.

    python -m benchmarks.step_time [--model FOLDER] [--threads N] [--context 256] [--json FILE]

Without a folder, random weights in the shapes of the embedded pair: 57 M parameters (8 layers,
hidden 768, 12 heads over 4) and the draft (2 layers, hidden 256). Rows > 1 are compared with one
`transformers` forward of the whole batch, all rows equally long (what it is best at). Medians; the
two sides take turns, so that noise hits both. "floor" is the time to read the weights once at the
speed this run measures for a plain sum over as many bytes.
"""

from __future__ import annotations

import argparse
import copy
import json
import logging
import statistics
import sys
import time
from collections.abc import Callable
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import torch
from transformers import AutoModelForCausalLM, DynamicCache, LlamaConfig, LlamaForCausalLM

from outrider.engine.batch import RowSlice, pack
from outrider.engine.model.loader import ModelOptions, build_paged_model
from outrider.engine.model.paged_model import PagedModel

PAGE_SIZE = 16
SHAPES = {
    "target": {"hidden_size": 768, "num_hidden_layers": 8, "intermediate_size": 2048, "heads": 12},
    "draft": {"hidden_size": 256, "num_hidden_layers": 2, "intermediate_size": 704, "heads": 4},
}


@dataclass(frozen=True, slots=True)
class Timing:
    """Median milliseconds of one forward."""

    model: str
    dtype: str
    rows: int
    query_len: int
    pack_ms: float
    engine_ms: float  # pack included
    transformers_ms: float
    floor_ms: float

    @property
    def speedup(self) -> float:
        return self.transformers_ms / self.engine_ms


def random_llama(shape: str) -> Any:
    sizes = dict(SHAPES[shape])
    heads = sizes.pop("heads")
    config = LlamaConfig(
        vocab_size=8192,
        num_attention_heads=heads,
        num_key_value_heads=max(heads // 3, 1) if heads > 4 else 2,
        head_dim=64,
        max_position_embeddings=4096,
        tie_word_embeddings=True,
        **sizes,
    )
    torch.manual_seed(0)
    return LlamaForCausalLM(config)


def measure(
    name: str, model: Any, rows: int, query_len: int, context: int, repeats: int, paged: PagedModel
) -> Timing:
    """Time `query_len` new tokens per row after `context` cached ones, in turns."""
    tokens = torch.randint(0, paged.vocab_size, (rows, context + query_len))
    pages = -(-(context + query_len) // PAGE_SIZE)
    tables = [[i * pages + j for j in range(pages)] for i in range(rows)]
    with torch.inference_mode():
        for i in range(rows):
            row = RowSlice(tokens[i, :context].tolist(), 0, tables[i], 1)
            paged.forward(pack([row], PAGE_SIZE, paged.device))
        cache = DynamicCache(config=model.config)
        model(tokens[:, :context], past_key_values=cache)
        news = tokens[:, context:]
        slices = [RowSlice(news[i].tolist(), context, tables[i], query_len) for i in range(rows)]

        def engine() -> None:
            paged.forward(pack(slices, PAGE_SIZE, paged.device))

        def reference() -> None:
            model(news, past_key_values=cache)
            cache.crop(-query_len)

        times = _in_turns(
            [lambda: pack(slices, PAGE_SIZE, paged.device), engine, reference], repeats
        )
    size = sum(p.numel() * p.element_size() for p in model.parameters())
    pack_ms, engine_ms, transformers_ms = times
    return Timing(
        model=name,
        dtype=str(model.dtype).removeprefix("torch."),
        rows=rows,
        query_len=query_len,
        pack_ms=pack_ms,
        engine_ms=engine_ms,
        transformers_ms=transformers_ms,
        floor_ms=_read_ms(size),
    )


def _in_turns(calls: list[Callable[[], Any]], repeats: int) -> list[float]:
    taken: list[list[float]] = [[] for _ in calls]
    for _ in range(repeats):
        for call, times in zip(calls, taken, strict=True):
            start = time.perf_counter()
            call()
            times.append((time.perf_counter() - start) * 1e3)
    return [statistics.median(times[2:]) for times in taken]


def _read_ms(num_bytes: int) -> float:
    data = torch.ones(num_bytes // 4, dtype=torch.float32)
    return _in_turns([data.sum], 12)[0]


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawTextHelpFormatter
    )
    parser.add_argument("--model", type=Path, help="a checkpoint folder")
    parser.add_argument("--threads", type=int, default=2)
    parser.add_argument("--context", type=int, default=256, help="cached tokens per row")
    parser.add_argument("--rows", type=int, nargs="+", default=[1, 4, 16])
    parser.add_argument("--query-lens", type=int, nargs="+", default=[1, 5, 16])
    parser.add_argument("--repeats", type=int, default=22)
    parser.add_argument("--json", type=Path, help="write the figures here too")
    args = parser.parse_args()
    logging.getLogger("transformers").setLevel(logging.ERROR)
    torch.set_num_threads(args.threads)
    print(f"{'model':8} {'dtype':9} rows  q   pack  engine  transf.  ratio  floor   (ms)")
    timings: list[Timing] = []
    for name in [args.model.name] if args.model else list(SHAPES):
        source = (
            AutoModelForCausalLM.from_pretrained(args.model) if args.model else random_llama(name)
        )
        for dtype in (torch.float32, torch.bfloat16):
            model = copy.deepcopy(source).to(dtype).eval()
            pages = max(args.rows) * -(-(args.context + max(args.query_lens)) // PAGE_SIZE)
            paged = build_paged_model(
                copy.deepcopy(model), ModelOptions(page_size=PAGE_SIZE, num_pages=pages), name=name
            )
            for rows in args.rows:
                for query_len in args.query_lens:
                    t = measure(name, model, rows, query_len, args.context, args.repeats, paged)
                    timings.append(t)
                    print(
                        f"{name:8} {t.dtype:9} {rows:4} {query_len:2} {t.pack_ms:6.2f} "
                        f"{t.engine_ms:7.2f} {t.transformers_ms:8.2f} {t.speedup:6.2f} "
                        f"{t.floor_ms:6.2f}"
                    )
                    sys.stdout.flush()
    if args.json:
        rows_out = [{**asdict(t), "speedup": t.speedup} for t in timings]
        args.json.write_text(json.dumps(rows_out, indent=1) + "\n")


if __name__ == "__main__":
    main()
