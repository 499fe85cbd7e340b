"""Measure the whole stack over loopback: places of a proposer, no speculation, and vLLM.

    python -m benchmarks.gpu_serve --model TARGET --draft-model DRAFT [--vllm FOLDER|PYTHON]
    python -m benchmarks.gpu_serve ... --places remote ahead --scorer-gpu 0 --proposer-gpu 1
    python -m benchmarks.gpu_serve --model TARGET --method eagle3 --draft-model HEAD
        --places in-scorer colocated
    python -m benchmarks.gpu_serve --device cpu --dtype float32   # the embedded pair on this CPU

A gateway faces the client. The places are the scorer's own process (`in-scorer`), its GPU and Unix
socket (`colocated`), and the proposer's GPU behind TCP on loopback (`remote`). `ahead` is remote,
too, and drafts ahead; the others draft on demand. A round trip above 0 is added by the delay proxy,
which also counts bytes. Each repetition runs the same prompts with and without speculation on one
scorer, and with vLLM's two modes. Methods that read hidden states draft K tokens in every round and
wait for them (`--speculation-policy fixed`), so all places do the same rounds. With
`--cell-seconds` a repetition has as many waves as the fastest system takes about so long for.

TARGET, DRAFT and HEAD are folders, for instance inflated ones (benchmarks/inflate.py and
inflate_head.py: real acceptance at an 8B's cost).
"""

from __future__ import annotations

import argparse
import contextlib
import math
import shlex
import sys
import tempfile
from collections.abc import Iterator, Sequence
from itertools import product
from pathlib import Path
from typing import Any, Final

from benchmarks.lib import prompts, report, stats
from benchmarks.lib.gpu import gpu_name
from benchmarks.lib.measure import Cell, Plan, measure
from benchmarks.lib.processes import Child, ProcessError, stopping
from benchmarks.lib.program import add_vllm_flags, guarded, measuring_arguments, say
from benchmarks.lib.records import System
from benchmarks.lib.stack import OutriderSystem, Route, Stack, StackConfig
from benchmarks.lib.vllm_peer import GpuPeers, VllmPlace, VllmSystem, speculative_config
from outrider.aux_layers import states_read
from outrider.cli.ports import memory_folder
from outrider.errors import ConfigError
from outrider.methods import HIDDEN_STATE_METHODS
from outrider.models.resolve import resolve_model

_IN_SCORER, _COLOCATED, _AHEAD = "in-scorer", "colocated", "ahead"
PLACES: Final = (_IN_SCORER, _COLOCATED, "remote", _AHEAD)


def parser() -> argparse.ArgumentParser:
    p = measuring_arguments("benchmarks.gpu_serve", __doc__)
    add_vllm_flags(p)
    p.set_defaults(max_prompt_tokens=512)
    p.add_argument("--device", default="cuda")
    p.add_argument("--dtype", default="bfloat16", help="of target and draft model")
    p.add_argument("--scorer-memory", type=float, default=0.3, help="part of the GPU")
    p.add_argument("--scorer-flags", type=shlex.split, default=[], help="more of them, quoted")
    p.add_argument("--proposer-flags", type=shlex.split, default=[], help="more of them, quoted")
    p.add_argument("--start-timeout", type=float, default=300.0, help="seconds, per process")
    methods = ("draft_model", *HIDDEN_STATE_METHODS)
    p.add_argument("--method", choices=methods, default="draft_model", help="of --draft-model")
    p.add_argument("--places", nargs="+", choices=PLACES, default=[_COLOCATED])
    p.add_argument("--scorer-gpu", help="CUDA_VISIBLE_DEVICES of the scorer")
    p.add_argument("--proposer-gpu", help="the same of a proposer that is remote")
    p.add_argument("--round-trip-ms", type=float, nargs="+", default=[0.0], help="to it")
    p.add_argument("--max-branches", type=int, default=16, help="of drafts ahead")
    p.add_argument("--concurrency", type=int, nargs="+", default=[1, 8, 32, 64])
    p.add_argument("--cell-seconds", type=float, default=0.0, help="more waves, to last so long")
    p.add_argument("--temperature", type=float, nargs="+", default=[0.0], help="vLLM's is 0")
    return p


def main(argv: Sequence[str] | None = None) -> int:
    """Return 0 if it measured, 1 if a text differs in float32, 2 if it could not run."""
    return guarded(_run, parser(), argv)


def _run(args: argparse.Namespace) -> int:
    if min(args.waves, args.rounds, *args.concurrency) < 1:
        raise ConfigError("--waves, --rounds and --concurrency are at least 1.")
    if args.method in HIDDEN_STATE_METHODS and _AHEAD in args.places:
        raise ConfigError(f"--places {_AHEAD} is for --method draft_model alone.")
    with tempfile.TemporaryDirectory(prefix="bench-") as folder, stopping([]) as children:
        bench = Bench(args)
        bench.start_vllm(Path(folder), children)
        bench.measure()
    print(bench.write())
    # In bfloat16 a text may differ at a near tie.
    return int(args.dtype == "float32" and bench.differing > 0)


class Bench:
    """The cells so far, written with each one, in case that the machine is taken away."""

    def __init__(self, args: argparse.Namespace) -> None:
        self._args = args
        self._prompts = prompts.load(
            args.prompts,
            resolve_model(args.model, "target"),
            count=(args.rounds + 1) * args.waves * max(args.concurrency),
            max_prompt_tokens=args.max_prompt_tokens,
        )
        self._cells: list[Cell] = []
        self._baselines: dict[str, str] = {}  # by system
        self._notes: list[str] = []
        flags = {name: str(value) for name, value in vars(args).items() if name != "prompts"}
        self._setup = report.load_facts("benchmarks.gpu_serve", self._prompts) | flags
        self._setup["gpu"] = gpu_name()
        self._peers: list[VllmSystem] = []
        self._others: list[Child] = []  # their processes
        self.differing = 0

    def start_vllm(self, log_dir: Path, children: list[Child]) -> None:
        """Start vLLM's modes, as far as it can. Raises `ProcessError` for a wrong `--vllm`."""
        self._others = children
        place = VllmPlace.find(self._args.vllm)
        if place is None:
            self._note("vLLM was left out.")
            return
        if any(self._args.temperature):
            self._note("vLLM's requests are greedy.")
        args = self._args
        peers = GpuPeers(place, args, log_dir, children, args.scorer_gpu)
        modes: dict[str, dict[str, object] | None] = {"vllm none": None}
        if args.method == "draft_model":
            draft, k = resolve_model(args.draft_model, "draft"), args.num_speculative_tokens
            modes["vllm draft_model"] = speculative_config("draft_model", draft, k)
        for name, speculation in modes.items():
            try:
                self._peers.append(peers.start(name, speculative_config=speculation))
            except ProcessError as error:
                self._note(f"{name} was left out: {error}")

    def measure(self) -> None:
        """Measure the places, each beside no speculation on the same scorer."""
        args = self._args
        if _IN_SCORER in args.places:
            with self._stack(in_process=True) as (stack, children):
                self._temperatures(stack, children, _IN_SCORER)
        others = [place for place in args.places if place != _IN_SCORER]
        if not others:
            return
        proxy = max(args.round_trip_ms) > 0.0
        with self._stack(unix=_COLOCATED in others, proxy=proxy) as (stack, children):
            for place, proxied in product(others, (False, True)):
                asked = [0.0] if place == _COLOCATED else args.round_trip_ms
                delays = [delay for delay in asked if (delay > 0.0) == proxied]
                if not delays:
                    continue
                with stack.attached(self._route(place, proxied)):
                    for delay in delays:
                        if proxied:
                            stack.set_round_trip(delay)
                        self._temperatures(stack, children, f"{place}, RT {delay:g} ms")

    def write(self) -> str:
        """Write `--out`.json and .md, and return the latter."""
        known, title = self._baselines, f"The whole stack with {self._args.method}"
        setup = {**self._setup, "notes": self._notes}
        return report.write_cells(
            self._cells, lambda name: known.get(name, name), setup, title, self._args.out
        )

    @contextlib.contextmanager
    def _stack(self, **which: Any) -> Iterator[tuple[Stack, list[Child]]]:
        config = _config(self._args, **which)
        with (
            tempfile.TemporaryDirectory(prefix="bench-", dir=memory_folder()) as folder,
            stopping([]) as children,
            contextlib.closing(Stack(config, children, Path(folder))) as stack,
        ):
            stack.require_proposers()
            yield stack, children

    def _route(self, place: str, proxied: bool) -> Route:
        args = self._args
        near = place == _COLOCATED
        flags: tuple[str, ...] = ()
        if args.method == "draft_model":
            flags = ("--max-branches", str(args.max_branches if place == _AHEAD else 0))
        gpu = args.scorer_gpu if near else args.proposer_gpu
        return Route(place, unix=near, proxied=proxied, flags=flags, gpu=gpu)

    def _temperatures(self, stack: Stack, children: Sequence[Child], place: str) -> None:
        args = self._args
        for temperature in args.temperature:
            name = f"{place}, T = {temperature:g}"
            asked = frozenset(args.concurrency), args.request_timeout
            plain, drafting = (
                OutriderSystem(system, stack, method, *asked, temperature)
                for system, method in ((f"none beside {name}", "none"), (name, args.method))
            )
            self._baselines |= dict.fromkeys([name, *(p.name for p in self._peers)], plain.name)
            for concurrency in args.concurrency:
                systems: list[System] = [plain, drafting, *self._peers]
                # An unmeasured round compiles kernels and lets the policy learn.
                size = args.waves * concurrency
                unmeasured = self._prompts.group(args.rounds, size)
                took = [s.run(unmeasured, args.max_tokens, concurrency).wall_s for s in systems]
                size *= max(1, math.ceil(args.cell_seconds / min(took)))
                plan = Plan(concurrency, args.rounds, size)
                before = stack.sent_bytes()
                everyone = [*children, *self._others]
                cells = measure(systems, plan, self._prompts, args.max_tokens, everyone)
                spent = {key: n - before[key] for key, n in stack.sent_bytes().items()}
                self._cells += cells
                self._compare(spent, *cells[:2])
                self.write()

    def _compare(self, spent: dict[str, float], plain: Cell, drafting: Cell) -> None:
        differences = stats.divergences(drafting, plain)
        self.differing += sum(at is not None for at in differences)
        note = f"{drafting.system}, {plain.concurrency} at once: "
        note += f"{differences.count(None)} of {len(differences)} texts equal"
        rounds = sum(run.rounds or 0 for run in drafting.runs)
        states, to, back = (spent[key] / max(1, rounds) for key in ("states", "to", "from"))
        if states:
            note += f", {states:.0f} bytes of hidden states per round, prompts included"
        if to:
            note += f", {to:.0f} bytes to the scorer and {back:.0f} from it per round"
        self._note(f"{note}.")

    def _note(self, text: str) -> None:
        say(text)
        self._notes.append(text)


def _config(args: argparse.Namespace, **which: Any) -> StackConfig:
    scorer: tuple[str, ...] = ()
    proposer: tuple[str, ...] = ()
    if args.method in HIDDEN_STATE_METHODS:
        # Steps and drafts of the largest size that is asked for are captured, and no larger ones.
        scorer = ("--hidden-features", states_read(args.method, args.draft_model))
        scorer += ("--speculation-policy", "fixed", "--max-num-seqs", str(max(args.concurrency)))
        proposer = ("--max-draft-tokens", str(args.num_speculative_tokens))
    return StackConfig(
        model=args.model,
        draft_model=args.draft_model,
        dtype=args.dtype,
        num_speculative_tokens=args.num_speculative_tokens,
        start_timeout_s=args.start_timeout,
        draft_dtype=args.dtype,
        methods=(args.method,),
        device=args.device,
        scorer_gpu=args.scorer_gpu,
        scorer_memory=args.scorer_memory,
        scorer_flags=(*scorer, *args.scorer_flags),
        proposer_flags=(*proposer, *args.proposer_flags),
        **which,
    )


if __name__ == "__main__":
    sys.exit(main())
