"""Drafting ahead against drafting on demand and none, over a network of a given delay.

    python -m benchmarks.draft_ahead --simulated            # on a CPU, with slowed clocks
    python -m benchmarks.draft_ahead --model TARGET --draft-model DRAFT --device cuda \
        --dtype bfloat16 --draft-dtype bfloat16 --scorer-gpu 0 --proposer-gpu 1 --vllm FOLDER|PYTHON

A scorer and, one mode after the other, a proposer as processes; between them the delay proxy, but
for a round trip of 0, where its own two hops would be all that it adds. Modes: `colocated` and
`remote` draft on demand, colocated on the GPU of the scorer; `ahead` drafts ahead on the proposer's
GPU. Bytes are counted by the proxy, so only where it is. A sample is `--waves` times as many
requests as are in flight. Each repetition runs the same prompts without speculation right before,
and a speed-up is the median of the repetitions' ratios; before the first of them one sample is not
measured. Beside it stands what the formulas of ahead_model.py say for the measured step and draft
times, acceptance and hit rates. `gpu-normalised` divides by the GPUs that take part. With `--vllm`
the same prompts go to vLLM's two modes on one GPU, after Outrider's processes ended; their
speed-ups, too, are over Outrider without speculation.
"""

from __future__ import annotations

import argparse
import asyncio
import shlex
import sys
import tempfile
from collections.abc import Sequence
from dataclasses import asdict
from itertools import product
from pathlib import Path

from benchmarks.lib import prompts, report
from benchmarks.ahead_pair import Load, Pair, PairConfig
from benchmarks.ahead_rows import Cell, Row, against_vllm, line, markdown, row_of, vllm_row
from benchmarks.lib.processes import ProcessError, stopping
from benchmarks.lib.program import guarded, say
from benchmarks.lib.prompts import Prompts
from benchmarks.vllm_modes import METHODS, VllmModes, VllmPlace
from outrider.models.resolve import resolve_model

MODES = ("colocated", "remote", "ahead")


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
    p.add_argument(
        "--waves",
        type=int,
        default=3,
        help="requests of a sample by how many are in flight: their starts and ends overlap then; "
        "1: all begin together",
    )
    p.add_argument("--prompts", type=Path, help="JSON lines; default: the held-out prompts")
    p.add_argument("--scorer-flags", default="", help="more of them, quoted")
    p.add_argument("--proposer-flags", default="", help="more of them, quoted")
    p.add_argument("--vllm", help="a folder of vLLM's wheels for this Python, or another Python")
    p.add_argument("--vllm-memory", type=float, default=0.4, help="part of the GPU")
    p.add_argument("--timeout", type=float, default=300.0, help="seconds, per process or request")
    p.add_argument(
        "--out", type=Path, default=Path("benchmarks/results/draft_ahead"), help="without suffix"
    )
    return p


def main(argv: Sequence[str] | None = None) -> int:
    """0: measured, and texts equal where they must be; 1: a text differs; 2: it could not run."""
    p = parser()
    args = p.parse_args(argv)
    if min(args.waves, args.rounds, *args.batch) < 1:
        p.error("--waves, --rounds and --batch are at least 1")
    if args.vllm is not None and args.simulated:
        p.error("nothing slows vLLM down: give --vllm or --simulated")
    if args.vllm is not None and 0.0 not in args.temperature:
        p.error("vLLM is measured at temperature 0: add it to --temperature")
    return guarded(lambda: _run(args))


def _run(args: argparse.Namespace) -> int:
    place = VllmPlace.find(args.vllm)
    target = resolve_model(args.model, "target")
    count = (args.rounds + 1) * args.waves * max(args.batch)
    loaded = prompts.load(
        args.prompts, target, count=count, max_prompt_tokens=args.max_prompt_tokens
    )
    found = _Found(args, loaded)
    with tempfile.TemporaryDirectory(prefix="ahead-") as name:
        with stopping([]) as children:
            pair = Pair(PairConfig.from_args(args), children, Path(name))
            asyncio.run(_measure(args, pair, loaded, found))
        if place is not None:
            _vllm(args, place, loaded, Path(name), found)
    print(found.write())
    # In bfloat16 a text may part at a near tie.
    return int(
        args.dtype == "float32" and any(row.texts_equal not in (None, 1.0) for row in found.rows)
    )


class _Found:
    """What was measured so far, written with each row: the machine may be one by the hour."""

    def __init__(self, args: argparse.Namespace, loaded: Prompts) -> None:
        self.rows: list[Row] = []
        self.notes: list[str] = []
        self._out: Path = args.out
        self._setup = {
            **report.machine(),
            "command": shlex.join(["python", "-m", "benchmarks.draft_ahead", *sys.argv[1:]]),
            "prompts": f"{len(loaded.token_ids)} of {loaded.file} (sha256 {loaded.sha256[:12]})",
            "waves": args.waves,
            "step_ms": args.step_ms,
        }

    def add(self, row: Row) -> None:
        self.rows.append(row)
        say(line(row))
        self.write()

    def write(self) -> str:
        """`--out`.json and .md; returns the latter."""
        text = markdown(self.rows, self.notes)
        rows = [asdict(row) for row in self.rows]
        found = {"setup": {**self._setup, "notes": self.notes}, "results": rows}
        report.write(found, text, self._out)
        return text


async def _measure(args: argparse.Namespace, pair: Pair, loaded: Prompts, found: _Found) -> None:
    draft_step_ms = 0.0

    def load(repetition: int, batch: int, temperature: float) -> Load:
        group = loaded.group(repetition, args.waves * batch)
        return Load(group, batch, temperature, args.max_tokens)

    async with pair:
        for mode, proxied in product(args.modes, (False, True)):
            asked = [0.0] if mode == "colocated" else args.round_trip_ms
            delays = [delay for delay in asked if (delay > 0.0) == proxied]
            if not delays:
                continue
            async with pair.proposer(mode, proxied=proxied):
                for delay, temperature, batch in product(delays, args.temperature, args.batch):
                    pair.set_round_trip(delay)
                    await pair.rehearse(load(args.rounds, batch, temperature))
                    samples = [
                        await pair.sample(load(r, batch, temperature)) for r in range(args.rounds)
                    ]
                    cell = Cell(mode, delay, batch, temperature, samples)
                    if mode != "ahead" and batch == 1:
                        draft_step_ms = cell.draft_step_ms(args.num_speculative_tokens)
                    found.add(row_of(cell, draft_step_ms, args))


def _vllm(
    args: argparse.Namespace, place: VllmPlace, loaded: Prompts, log_dir: Path, found: _Found
) -> None:
    """vLLM's modes, one after the other; where one fails, a note says so."""
    modes = VllmModes.from_args(args, place, args.batch, args.timeout)
    gpu = args.proposer_gpu or args.scorer_gpu
    env = {} if gpu is None else {"CUDA_VISIBLE_DEVICES": gpu}
    ours = [*found.rows]
    for method in METHODS:
        try:
            with stopping([]) as children:
                system = modes.start(method, log_dir, children, env)
                for batch in args.batch:
                    groups = [loaded.group(r, args.waves * batch) for r in range(args.rounds + 1)]
                    system.run(groups.pop(), args.max_tokens, batch)  # as Outrider's: unmeasured
                    runs = [system.run(group, args.max_tokens, batch) for group in groups]
                    found.add(vllm_row(system.name, batch, runs, ours))
        except ProcessError as error:
            say(f"*** vLLM {method} failed: {error} ***")
            found.notes.append(f"vLLM {method} failed: {error}")
    found.notes += against_vllm(ours, found.rows[len(ours) :])


if __name__ == "__main__":
    sys.exit(main())
