"""Drafting ahead against drafting on demand and none, over a network of a given delay.

    python -m benchmarks.draft_ahead --simulated            # on a CPU, with slowed clocks
    python -m benchmarks.draft_ahead --model TARGET --draft-model DRAFT --device cuda \
        --dtype bfloat16 --draft-dtype bfloat16 --scorer-gpu 0 --proposer-gpu 1

A scorer and, one mode after the other, a proposer as processes; between them the delay proxy.
Modes: `colocated` and `remote` draft on demand, colocated on the GPU of the scorer, no proxy;
`ahead` drafts ahead on the proposer's GPU. Each repetition runs the same prompts without
speculation right before, and a speed-up is the median of the repetitions' ratios. Beside it stands
what the formulas of ahead_model.py say for the measured step and draft times, acceptance and hit
rates. `gpu-normalised` divides by the GPUs that take part.
"""

from __future__ import annotations

import argparse
import asyncio
import contextlib
import json
import shlex
import statistics
import sys
import tempfile
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from pathlib import Path

from benchmarks import prompts, report
from benchmarks.ahead_model import Times, drafted_ahead, on_demand
from benchmarks.ahead_pair import Pair, PairConfig, Sample
from benchmarks.processes import stopping
from benchmarks.program import guarded
from outrider.models.resolve import resolve_model

MODES = ("colocated", "remote", "ahead")
_HOST_MS = 0.5  # c of the formulas: two event loops and the engine's own time


@dataclass(frozen=True)
class Row:
    """One mode, delay, batch and temperature."""

    mode: str
    round_trip_ms: float  # added
    batch: int
    temperature: float
    tokens_per_s: float
    speed_up: float  # over no speculation
    predicted: float | None  # batch 1 only: the formulas know no batch
    gpu_normalised: float  # tokens per second and GPU
    acceptance_length: float  # tokens per round that had a draft
    acceptance: float
    hit_rate: float
    hits_after_hit: float
    hits_after_miss: float
    late: float  # share of rounds
    wrong: float
    bytes_to: float  # per request and round, from the proposer
    bytes_from: float
    texts_equal: float  # share


def parser() -> argparse.ArgumentParser:
    p = argparse.ArgumentParser(
        prog="python -m benchmarks.draft_ahead",
        description=__doc__,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    p.add_argument("--model", default="embedded")
    p.add_argument("--draft-model", default="embedded")
    p.add_argument("--simulated", action="store_true", help="slow both models down, on a CPU")
    p.add_argument("--step-ms", type=float, default=40.0, help="simulated: a target's forward")
    p.add_argument("--draft-step-ms", type=float, default=6.0, help="simulated: a draft's forward")
    p.add_argument("--device", default="cpu")
    p.add_argument("--dtype", default="float32")
    p.add_argument("--draft-dtype", default="float32")
    p.add_argument("--scorer-gpu", help="CUDA_VISIBLE_DEVICES of the scorer")
    p.add_argument("--proposer-gpu", help="the same of a proposer that is not colocated")
    p.add_argument("--modes", nargs="+", choices=MODES, default=list(MODES))
    p.add_argument("--round-trip-ms", type=float, nargs="+", default=[0.0, 0.2, 1.0, 5.0])
    p.add_argument("--batch", type=int, nargs="+", default=[1, 8, 32, 64])
    p.add_argument("--temperature", type=float, nargs="+", default=[0.0, 1.0])
    p.add_argument("--num-speculative-tokens", type=int, default=4)
    p.add_argument("--max-branches", type=int, default=16)
    p.add_argument("--max-tokens", type=int, default=96)
    p.add_argument("--max-prompt-tokens", type=int, default=256)
    p.add_argument("--rounds", type=int, default=3, help="repetitions")
    p.add_argument("--prompts", type=Path, help="JSON lines; default: the held-out prompts")
    p.add_argument("--scorer-flags", default="", help="more of them, quoted")
    p.add_argument("--proposer-flags", default="", help="more of them, quoted")
    p.add_argument("--timeout", type=float, default=300.0, help="seconds, per process or request")
    p.add_argument(
        "--out", type=Path, default=Path("benchmarks/results/draft_ahead"), help="without suffix"
    )
    return p


def main(argv: Sequence[str] | None = None) -> int:
    """0: measured, and texts equal where they must be; 1: a text differs; 2: it could not run."""
    args = parser().parse_args(argv)
    return guarded(lambda: _run(args))


def _run(args: argparse.Namespace) -> int:
    with contextlib.ExitStack() as cleanup:
        log_dir = Path(cleanup.enter_context(tempfile.TemporaryDirectory(prefix="ahead-")))
        children = cleanup.enter_context(stopping([]))
        config = PairConfig.from_args(args)
        rows = asyncio.run(_measure(args, Pair(config, children, log_dir)))
    text = _table(rows)
    print(text)
    args.out.parent.mkdir(parents=True, exist_ok=True)
    command = shlex.join(["python", "-m", "benchmarks.draft_ahead", *sys.argv[1:]])
    setup = {**report.machine(), "command": command, "step_ms": args.step_ms}
    found = {"setup": setup, "results": [asdict(row) for row in rows]}
    args.out.with_suffix(".json").write_text(json.dumps(found, indent=1) + "\n")
    args.out.with_suffix(".md").write_text(text)
    # In bfloat16 a text may part at a near tie.
    return int(args.dtype == "float32" and any(row.texts_equal < 1.0 for row in rows))


async def _measure(args: argparse.Namespace, pair: Pair) -> list[Row]:
    target = resolve_model(args.model, "target")
    loaded = prompts.load(args.prompts, target, count=64, max_prompt_tokens=args.max_prompt_tokens)
    rows: list[Row] = []
    draft_step_ms = 0.0
    async with pair:
        for mode in args.modes:
            delays = [0.0] if mode == "colocated" else args.round_trip_ms
            async with pair.proposer(mode):
                await pair.warm_up(loaded.group(0, 2))
                for round_trip_ms in delays:
                    pair.set_round_trip(round_trip_ms)
                    for temperature in args.temperature:
                        for batch in args.batch:
                            cell = [
                                await pair.sample(loaded.group(r, batch), temperature, args)
                                for r in range(args.rounds)
                            ]
                            if mode != "ahead" and batch == 1:
                                draft_step_ms = _draft_step(cell, args.num_speculative_tokens)
                            row = _row(mode, round_trip_ms, batch, temperature, cell, args)
                            rows.append(_predict(row, cell, draft_step_ms, args))
                            print(_line(rows[-1]), file=sys.stderr, flush=True)
    return rows


def _row(
    mode: str,
    round_trip_ms: float,
    batch: int,
    temperature: float,
    cell: Sequence[Sample],
    args: argparse.Namespace,
) -> Row:
    def total(name: str) -> float:
        return sum(sample.aux[name] for sample in cell)

    drafted_rounds = max(1.0, total("rounds") - total("undrafted_rounds"))
    after_hit, after_miss = total("rounds_after_hit"), total("rounds_after_miss")
    rounds = max(1.0, total("rounds"))
    gpus = 2 if args.proposer_gpu not in (None, args.scorer_gpu) and mode != "colocated" else 1
    speed = statistics.median(sample.tokens_per_s for sample in cell)
    return Row(
        mode=mode,
        round_trip_ms=round_trip_ms,
        batch=batch,
        temperature=temperature,
        tokens_per_s=speed,
        speed_up=statistics.median(s.tokens_per_s / s.plain_tokens_per_s for s in cell),
        predicted=None,
        gpu_normalised=speed / gpus,
        acceptance_length=1 + total("accepted") / drafted_rounds,
        acceptance=total("accepted") / max(1.0, total("drafted")),
        hit_rate=total("hits") / rounds,
        hits_after_hit=total("hits_after_hit") / max(1.0, after_hit),
        hits_after_miss=total("hits_after_miss") / max(1.0, after_miss),
        late=total("misses_late") / rounds,
        wrong=total("misses_wrong") / rounds,
        bytes_to=sum(s.bytes_to for s in cell) / rounds,
        bytes_from=sum(s.bytes_from for s in cell) / rounds,
        texts_equal=sum(s.num_equal for s in cell) / sum(s.num_texts for s in cell),
    )


def _draft_step(cell: Sequence[Sample], k: int) -> float:
    """Milliseconds per drafted token where drafts are made on demand."""
    spent = sum(sample.aux["propose_ms"] for sample in cell)
    rounds = sum(sample.aux["rounds"] - sample.aux["undrafted_rounds"] for sample in cell)
    return spent / max(1.0, rounds) / k


def _predict(
    row: Row, cell: Sequence[Sample], draft_step_ms: float, args: argparse.Namespace
) -> Row:
    if row.batch != 1 or not draft_step_ms:
        return row
    step_ms = 1e3 / statistics.median(sample.plain_tokens_per_s for sample in cell)
    times = Times(step_ms, draft_step_ms, row.round_trip_ms, _HOST_MS)
    k, tokens = args.num_speculative_tokens, row.acceptance_length
    if row.mode == "ahead":
        predicted = drafted_ahead(times, k, tokens, row.hits_after_hit, row.hits_after_miss)
    else:
        predicted = on_demand(times, k, tokens)
    return Row(**{**asdict(row), "predicted": predicted})


_HEAD = (
    *("mode", "RT ms", "batch", "T", "tok/s", "speed-up", "predicted", "tok/s/GPU", "acc. len"),
    *("accept.", "hits", "h1", "h0", "late", "wrong", "B to", "B from", "equal"),
)


def _cells(row: Row) -> list[str]:
    predicted = "" if row.predicted is None else f"{row.predicted:.2f}"
    return [
        *(row.mode, f"{row.round_trip_ms:g}", str(row.batch), f"{row.temperature:g}"),
        *(f"{row.tokens_per_s:.1f}", f"{row.speed_up:.2f}", predicted),
        *(f"{row.gpu_normalised:.1f}", f"{row.acceptance_length:.2f}", f"{row.acceptance:.2f}"),
        *(f"{row.hit_rate:.2f}", f"{row.hits_after_hit:.2f}", f"{row.hits_after_miss:.2f}"),
        *(f"{row.late:.2f}", f"{row.wrong:.2f}", f"{row.bytes_to:.0f}", f"{row.bytes_from:.0f}"),
        f"{row.texts_equal:.0%}",
    ]


def _line(row: Row) -> str:
    return "  ".join(f"{name} {cell}" for name, cell in zip(_HEAD, _cells(row), strict=True))


def _table(rows: Sequence[Row]) -> str:
    lines = [_HEAD, ["---"] * len(_HEAD), *(_cells(row) for row in rows)]
    return "\n".join(f"| {' | '.join(line)} |" for line in lines) + "\n"


if __name__ == "__main__":
    sys.exit(main())
