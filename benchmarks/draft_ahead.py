"""Compare drafting ahead with drafting on demand and with no speculation.

    python -m benchmarks.draft_ahead                     # the embedded pair on this CPU
    python -m benchmarks.draft_ahead --model TARGET --draft-model DRAFT --device cuda \
        --dtype bfloat16 --draft-dtype bfloat16 --scorer-gpu 0 --proposer-gpu 1

A scorer and, one mode after the other, a proposer run as processes. The modes `colocated` and
`remote` draft on demand, `colocated` on the scorer's GPU; `ahead` drafts ahead on the proposer's
GPU. A round trip above 0 is added by the delay proxy, which also counts bytes. A sample is
`--waves` times as many requests as are in flight, and each repetition runs the same prompts with
and without speculation.
"""

from __future__ import annotations

import argparse
import contextlib
import sys
import tempfile
from collections.abc import Sequence
from itertools import product
from pathlib import Path
from typing import Final

from benchmarks.lib import prompts, report, stats
from benchmarks.lib.measure import Cell, Plan, measure
from benchmarks.lib.processes import Child, stopping
from benchmarks.lib.program import (
    add_pair_flags,
    add_service_flags,
    guarded,
    measuring_arguments,
    say,
)
from benchmarks.lib.records import System
from benchmarks.lib.stack import OutriderSystem, Route, Stack, StackConfig
from outrider.models.resolve import resolve_model

MODES: Final = ("colocated", "remote", "ahead")


def parser() -> argparse.ArgumentParser:
    p = measuring_arguments("benchmarks.draft_ahead", __doc__)
    add_service_flags(p)
    add_pair_flags(p)
    p.set_defaults(max_tokens=96, rounds=3, request_timeout=300.0)
    p.add_argument("--waves", type=int, default=3, help="requests of a sample for each in flight")
    p.add_argument("--draft-dtype", default="float32")
    p.add_argument("--scorer-gpu", help="CUDA_VISIBLE_DEVICES of the scorer")
    p.add_argument("--proposer-gpu", help="the same of a proposer that is not colocated")
    p.add_argument("--modes", nargs="+", choices=MODES, default=list(MODES))
    p.add_argument("--round-trip-ms", type=float, nargs="+", default=[0.0, 0.2, 1.0, 5.0])
    p.add_argument("--batch", type=int, nargs="+", default=[1, 8, 32, 64])
    p.add_argument("--temperature", type=float, nargs="+", default=[0.0, 1.0])
    p.add_argument("--max-branches", type=int, default=16)
    return p


def main(argv: Sequence[str] | None = None) -> int:
    """Return 0 if it measured, 1 if a text differs in float32, 2 if it could not run."""
    p = parser()
    args = p.parse_args(argv)
    if min(args.waves, args.rounds, *args.batch) < 1:
        p.error("--waves, --rounds and --batch are at least 1")
    return guarded(lambda: _run(args))


def _run(args: argparse.Namespace) -> int:
    with tempfile.TemporaryDirectory(prefix="ahead-") as name:
        bench = Bench(args, Path(name))
        with stopping([]) as children:
            bench.outrider(children)
    print(bench.write())
    # In bfloat16 a text may differ at a near tie.
    return int(args.dtype == "float32" and bench.differing > 0)


class Bench:
    """The cells so far, written with each one, in case that the machine is taken away."""

    def __init__(self, args: argparse.Namespace, log_dir: Path) -> None:
        self._args = args
        self._log_dir = log_dir
        count = (args.rounds + 1) * args.waves * max(args.batch)
        limits = {"count": count, "max_prompt_tokens": args.max_prompt_tokens}
        self._prompts = prompts.load(args.prompts, resolve_model(args.model, "target"), **limits)
        self._cells: list[Cell] = []
        self._baselines: dict[str, str] = {}  # by system
        self._notes: list[str] = []
        self._setup = report.load_facts("benchmarks.draft_ahead", self._prompts)
        self.differing = 0

    def outrider(self, children: list[Child]) -> None:
        """Measure the modes, each beside no speculation on the same scorer."""
        args = self._args
        with contextlib.closing(Stack(_config(args), children, self._log_dir)) as stack:
            for mode, proxied in product(args.modes, (False, True)):
                asked = [0.0] if mode == "colocated" else args.round_trip_ms
                delays = [delay for delay in asked if (delay > 0.0) == proxied]
                if not delays:
                    continue
                gpu = args.scorer_gpu if mode == "colocated" else args.proposer_gpu
                flags = ("--max-branches", str(args.max_branches if mode == "ahead" else 0))
                with stack.attached(Route(mode, proxied=proxied, flags=flags, gpu=gpu)):
                    for delay, temperature in product(delays, args.temperature):
                        if proxied:
                            stack.set_round_trip(delay)
                        name = f"{mode}, RT {delay:g} ms, T = {temperature:g}"
                        self._measure(stack, name, temperature, children)

    def write(self) -> str:
        """Write `--out`.json and .md, and return the latter."""
        setup = {**self._setup, "max_tokens": self._args.max_tokens, "notes": self._notes}
        known, out = self._baselines, self._args.out
        return report.write_cells(
            self._cells, lambda name: known.get(name, name), setup, "Drafting ahead", out
        )

    def _measure(
        self, stack: Stack, name: str, temperature: float, children: Sequence[Child]
    ) -> None:
        args = self._args
        plain, drafting = (
            OutriderSystem(
                system,
                stack,
                method,
                frozenset(args.batch),
                args.request_timeout,
                through_gateway=False,
                temperature=temperature,
            )
            for system, method in ((f"none beside {name}", "none"), (name, "draft_model"))
        )
        self._baselines[name] = plain.name
        for batch in args.batch:
            self._prepared(drafting, batch)
            before = stack.proxied_bytes()
            cells = self._repeat([plain, drafting], batch, children)
            spent = {key: n - before[key] for key, n in stack.proxied_bytes().items()}
            self._cells += cells
            self._note(batch, spent, *cells)
            self.write()

    def _prepared(self, system: System, batch: int) -> None:
        """Run an unmeasured sample: kernels are compiled, the policy learns."""
        group = self._prompts.group(self._args.rounds, self._args.waves * batch)
        system.run(group, self._args.max_tokens, batch)

    def _repeat(
        self, systems: Sequence[System], batch: int, children: Sequence[Child]
    ) -> list[Cell]:
        plan = Plan(batch, self._args.rounds, self._args.waves * batch)
        return measure(systems, plan, self._prompts, self._args.max_tokens, children, say)

    def _note(self, batch: int, spent: dict[str, int], plain: Cell, drafting: Cell) -> None:
        differences = stats.divergences(drafting, plain)
        self.differing += sum(at is not None for at in differences)
        note = f"{drafting.system}, {batch} at once: "
        note += f"{differences.count(None)} of {len(differences)} texts equal"
        rounds = sum(run.rounds or 0 for run in drafting.runs)
        if spent["to"] and rounds:
            to, back = (spent[key] / rounds for key in ("to", "from"))
            note += f", {to:.0f} bytes to the scorer and {back:.0f} from it per round"
        self._notes.append(f"{note}.")


def _config(args: argparse.Namespace) -> StackConfig:
    k, rows = str(args.num_speculative_tokens), max(args.batch)
    return StackConfig(
        model=args.model,
        draft_model=args.draft_model,
        dtype=args.dtype,
        num_speculative_tokens=args.num_speculative_tokens,
        start_timeout_s=args.start_timeout,
        draft_dtype=args.draft_dtype,
        device=args.device,
        scorer_gpu=args.scorer_gpu,
        scorer_flags=("--max-num-seqs", str(rows), *args.scorer_flags),
        proposer_flags=("--max-draft-tokens", k, *args.proposer_flags),
        max_sessions=rows,
        gateway=False,
        proxy=max(args.round_trip_ms) > 0.0,
    )


if __name__ == "__main__":
    sys.exit(main())
