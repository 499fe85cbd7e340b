"""Measure vLLM with Outrider's proposers, beside vLLM's own draft model and no speculation.

    python -m benchmarks.vllm_remote --model TARGET --draft-model DRAFT --vllm FOLDER|PYTHON
        [--gpus 0 1] [--eagle3 HEAD] [--more-tokens 6] [--methods draft_model eagle3 suffix]

TARGET and DRAFT are folders, of inflated models too (benchmarks/inflate.py). vLLM without drafts
and with Outrider's lies on the first GPU, and Outrider's proposer on the last: with two GPUs it
drafts ahead. For each method and K Outrider has an engine and a proposer. vLLM with its own methods
is on the last GPU too; with `--eagle3`, it also speculates with that module. All are loaded at
once, with KV caches of a fixed size, and measured in turns. What fails is left out, and told of in
the results, which are written after each concurrency. `--gpus 0,1 1 --options
'{"tensor_parallel_size": 2}'` spreads the engines over two GPUs.
"""

from __future__ import annotations

import argparse
import contextlib
import json
import shlex
import sys
import tempfile
import time
from collections import defaultdict
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from operator import eq
from pathlib import Path

from benchmarks.lib import prompts, report
from benchmarks.lib.gpu import gpu_name
from benchmarks.lib.measure import Cell, Plan, measure
from benchmarks.lib.processes import Child, ProcessError, module_child, stopping
from benchmarks.lib.program import add_vllm_flags, guarded, measuring_arguments, say
from benchmarks.lib.records import Run, TokenIds
from benchmarks.lib.stack import samples
from benchmarks.lib.timed_rounds import read_times
from benchmarks.lib.vllm_peer import GpuPeers, VllmPlace, VllmSystem, speculative_config
from outrider.aux_layers import states_read
from outrider.errors import ConfigError
from outrider.models.resolve import resolve_model

_BASE, _OURS, _AHEAD, _WITHIN = "vllm none", "vllm + outrider ", " ahead", " within"
_BARE = "vllm bare K="  # wrong drafts from within: how fast a round with drafts can be
_DRAFT_MODEL, _EAGLE3 = "vllm draft_model", "vllm eagle3"
_METHODS = ("draft_model", "eagle3", "suffix", "ngram")
_CLASSES = "benchmarks.lib.timed_rounds."
_TITLE = "vLLM with Outrider's proposers"
# Metrics of the draft side and of the proposer, and the label that tells their parts.
_COUNTED = {
    **{"proposers_attached": "", "pool_rounds_total": "fate", "round_seconds_total": "part"},
    **{f"proposer_{name}_seconds_sum": "" for name in ("cycle", "forward", "ahead")},
    **{f"proposer_{name}": "" for name in ("cycle_seconds_count", "ahead_seconds_count")},
    "proposer_cycle_sessions_sum": "",
}
_LOOP = "proposer_loop_"  # metrics of batches, labelled by their captured rows and tokens
_SHAPE = ("rows", "tokens", "kind")
_FATES = ("hit", "waited", "late", "wrong", "none")
_PARTS = ("propose", "network", "wait", "score")
_KV_CACHE_BYTES = 6 << 30  # then --vllm-memory is just what must be free at the start


@dataclass(frozen=True)
class _Timed(VllmSystem):
    """vLLM with a class that times its rounds."""

    times: Path

    def counts(self) -> dict[str, float]:
        return read_times(self.times)

    def told(self, concurrency: int, before: dict[str, float]) -> list[str]:
        """Return notes about the rounds since then."""
        spent = defaultdict(float, self.counts())
        for name, value in before.items():
            spent[name] -= value
        return [f"- {concurrency} concurrent, {self.name}, {note}" for note in self.notes(spent)]

    def notes(self, spent: dict[str, float]) -> list[str]:
        if (steps := spent["steps"]) <= 0:
            return []
        propose_ms, waited_ms = (spent[name] * 1e3 / steps for name in ("propose_s", "waited_s"))
        hit_ms = spent["hit_s"] * 1e3 / max(1.0, spent["hits"])
        return [
            f"a step of {spent['rows'] / steps:.1f} rows: propose {propose_ms:.2f} ms, waited "
            f"{waited_ms:.2f} ms; after all rows had drafts at once "
            f"({spent['hits'] / steps:.0%}), {hit_ms:.2f} ms to the next"
        ]


@dataclass(frozen=True)
class _Bare(_Timed):
    """vLLM with wrong drafts, of which some steps are enough."""

    def run(self, prompts: Sequence[TokenIds], max_tokens: int, concurrency: int) -> Run:
        return super().run(prompts[:concurrency], max_tokens // 4, concurrency)


@dataclass(frozen=True)
class _Drafted(_Timed):
    """vLLM with Outrider's proposer."""

    proposer: Child | None  # None: within vLLM's worker
    port: int

    def wait_attached(self, timeout_s: float) -> None:
        """Wait until the proposer drafts for the engine. Raises `ProcessError`."""
        if self.proposer is None:
            return
        self.proposer.ready(timeout_s)
        deadline = time.monotonic() + timeout_s
        while not self.counts().get("proposers_attached"):
            if time.monotonic() > deadline or not self.proposer.running:
                raise ProcessError(f"the proposer was not attached{self.proposer.tail()}")
            time.sleep(0.2)

    def counts(self) -> dict[str, float]:
        """Return what was counted so far.

        That is proposers, rounds by their drafts' fate, seconds by part, and what `propose` and the
        proposer took; nothing of one that does not answer.
        """
        found = defaultdict(float, super().counts())
        with contextlib.suppress(ProcessError):  # its next run tells why
            for port in (self.port + 2, self.port + 3)[: 1 if self.proposer is None else 2]:
                for sample in samples(f"http://127.0.0.1:{port}"):
                    name = sample.name.removeprefix("outrider:")
                    if (label := _COUNTED.get(name)) is not None:
                        found[sample.labels.get(label, name)] += sample.value
                    elif name.startswith(_LOOP):
                        labels = [sample.labels.get(each, "") for each in _SHAPE]
                        found[" ".join([name, *labels]).rstrip()] += sample.value
        return found

    def notes(self, spent: dict[str, float]) -> list[str]:
        notes = super().notes(spent)
        if (rounds := sum(spent[fate] for fate in _FATES)) > 0:
            fates = [f"{fate} {spent[fate] / rounds:.0%}" for fate in _FATES]
            parts = [f"{part} {spent[part] * 1e3 / rounds:.2f} ms" for part in _PARTS]
            notes.append(f"a round: {', '.join([*fates, *parts])}")
        if (cycles := spent["proposer_cycle_seconds_count"]) > 0:
            cycle, ahead, size = (
                spent[f"proposer_{name}_sum"] / cycles
                for name in ("cycle_seconds", "ahead_seconds", "cycle_sessions")
            )
            notes.append(
                f"{cycles:.0f} batches of {size:.1f} sessions: {cycle * 1e3:.2f} ms, "
                f"and {ahead * 1e3:.2f} ms ahead "
                f"({spent['proposer_ahead_seconds_count']:.0f} times)"
            )
        times = f"{_LOOP}seconds_count "
        shapes = [name[len(times) :] for name in spent if name.startswith(times) and spent[name]]
        for shape in sorted(shapes, key=lambda shape: -spent[times + shape]):
            count, rows = spent[times + shape], f"{_LOOP}rows_total {shape}"
            ms = spent[f"{_LOOP}seconds_sum {shape}"] / count * 1e3
            drafts, branches = (spent[f"{rows} {kind}"] / count for kind in ("draft", "branch"))
            notes.append(
                f"{count:.0f} loops of {' x '.join(shape.split())} tokens: {drafts:.1f} drafts, "
                f"{branches:.1f} branches, {ms:.2f} ms"
            )
        return notes

    def run(self, prompts: Sequence[TokenIds], max_tokens: int, concurrency: int) -> Run:
        run = super().run(prompts, max_tokens, concurrency)
        if self.proposer is not None and not self.proposer.running:
            raise ProcessError(f"the proposer ended{self.proposer.tail()}")
        return run


def parser() -> argparse.ArgumentParser:
    p = measuring_arguments("benchmarks.vllm_remote", __doc__)
    add_vllm_flags(p)
    p.set_defaults(max_tokens=256, max_prompt_tokens=512, rounds=3, waves=2, vllm_memory=0.1)
    p.add_argument("--eagle3", help="EAGLE-3 module of the target: a folder")
    p.add_argument("--methods", nargs="+", choices=_METHODS, default=["draft_model"])
    p.add_argument("--more-tokens", type=int, nargs="+", default=[], help="other K of Outrider's")
    p.add_argument("--ahead", action="store_true", help="Outrider's with --async-scheduling, too")
    p.add_argument("--within", action="store_true", help="Outrider's in vLLM's worker, too")
    p.add_argument("--without", nargs="+", default=[], help='systems to leave out, by "vllm NAME"')
    p.add_argument("--options", type=json.loads, default={}, help="JSON: arguments of vLLM's LLM")
    p.add_argument("--their-options", type=json.loads, default={}, help="of vLLM's own")
    p.add_argument("--port", type=int, default=7001, help="the first of four ports of each K")
    p.add_argument("--their-tokens", type=int, default=4, help="K of vLLM's own methods")
    p.add_argument("--start-timeout", type=float, default=300.0, help="seconds, per process")
    p.add_argument("--device", choices=("cuda", "cpu"), default="cuda")
    p.add_argument("--proposer-flags", type=shlex.split, default=[], help="more of them, quoted")
    p.add_argument("--gpus", nargs="+", default=["0"], help="of the engines, of the proposer")
    p.add_argument("--concurrency", type=int, nargs="+", default=[1, 8, 32])
    return p


def main(argv: Sequence[str] | None = None) -> int:
    return guarded(_run, parser(), argv)


def _run(args: argparse.Namespace) -> int:
    target = resolve_model(args.model, "target")
    loaded = prompts.load(args.prompts, target, count=64, max_prompt_tokens=args.max_prompt_tokens)
    setup = report.load_facts("benchmarks.vllm_remote", loaded)
    setup |= {"gpu": gpu_name(), "max_tokens": args.max_tokens}
    cells: list[Cell] = []
    notes: list[str] = []
    failures: dict[str, str] = {}
    with tempfile.TemporaryDirectory(prefix="bench-") as folder, stopping([]) as children:
        systems = _start(args, Path(folder), children, failures)
        for n in args.concurrency:
            for rounds in (1, args.rounds):  # the first compiles, and lets the policy learn
                before = {each.name: each.counts() for each in systems if isinstance(each, _Timed)}
                plan = Plan(n, rounds, max(2, args.waves * n))
                found = measure(systems, plan, loaded, args.max_tokens, children, failures)
                for system in systems:
                    if system.name in failures:
                        system.worker.child.stop()
                systems = [system for system in systems if system.name not in failures]
            cells += found
            texts = {c.system: [x.token_ids for r in c.runs for x in r.completions] for c in found}
            equal = {name: sum(map(eq, each, texts.get(_BASE, []))) for name, each in texts.items()}
            notes.append(f"- {n} concurrent, texts that equal those of {_BASE}: {equal}")
            for system in systems:
                if isinstance(system, _Timed):
                    notes += system.told(n, before[system.name])
            failed = [f"- {name} failed: {why}" for name, why in failures.items()]
            setup["notes"] = [*notes, *failed]
            print(report.write_cells(cells, lambda _: _BASE, setup, _TITLE, args.out), flush=True)
    return 0 if cells else 2


def _start(
    args: argparse.Namespace, log_dir: Path, children: list[Child], failures: dict[str, str]
) -> list[VllmSystem]:
    """Start the engines side by side, and the proposer; what does not start goes to `failures`.

    Raises `ProcessError` without a vLLM.
    """
    place = VllmPlace.find(args.vllm)
    if place is None:
        raise ProcessError("--vllm is needed: a folder of vLLM's wheels, or another Python.")
    draft, k = resolve_model(args.draft_model, "draft"), args.num_speculative_tokens
    ours, bare = _ours(args), f"{_BARE}{k}"
    ours_class = f"{_CLASSES}TimedProposer"
    speculations = {
        _BASE: None,
        bare: speculative_config("custom_class", f"{_CLASSES}BareProposer", k),
        **{
            name: speculative_config("custom_class", ours_class, k) for name, (_, k) in ours.items()
        },
        _DRAFT_MODEL: speculative_config("draft_model", draft, args.their_tokens),
    }
    if args.eagle3:
        speculations[_EAGLE3] = speculative_config("eagle3", args.eagle3, args.their_tokens)
    speculations = {name: each for name, each in speculations.items() if name not in args.without}
    on_cpu = args.device == "cpu"
    fitting = {"enforce_eager": True} if on_cpu else {"kv_cache_memory_bytes": _KV_CACHE_BYTES}
    fitting |= args.options

    def start(name: str) -> VllmSystem | None:
        gpu = args.gpus[0 if name in (_BASE, bare, *ours) else -1]
        peers = GpuPeers(place, args, log_dir, children, gpu)
        options = fitting | {"speculative_config": speculations[name]}
        options |= {"async_scheduling": True} if _AHEAD in name else {}
        options |= {} if name in (bare, *ours) else args.their_options
        try:
            if name not in (bare, *ours):
                return peers.start(name, **options)
            port, proposer = args.port + 4 * [*ours, bare].index(name), None
            times = log_dir / f"times-{port}.json"
            flags = f"--port {port} --data-port {port + 1} --metrics-port {port + 2}"
            method = None if name == bare else ours[name][0]
            if method and name.endswith(_WITHIN):
                drafting = shlex.join(_drafting(args, method))
                flags += f" --in-process-proposer {shlex.quote(drafting)}"
            elif method:
                if method == "eagle3":
                    flags += f" --hidden-features {states_read(method, args.eagle3)}"
                proposer = _proposer(args, method, log_dir, children, port)
            plugin = {"outrider": flags, "times": str(times)}
            engine = peers.start(name, **options, additional_config=plugin)
            if method is None:
                return _Bare(**vars(engine), times=times)
            system = _Drafted(**vars(engine), times=times, proposer=proposer, port=port)
            system.wait_attached(args.start_timeout)
            return system
        except ProcessError as error:
            failures[name] = str(error)
            say(f"{name} did not start: {error}")
            return None

    pool = ThreadPoolExecutor()
    try:
        return [system for system in pool.map(start, speculations) if system is not None]
    finally:
        pool.shutdown(wait=False)  # who ends the program waits for no start


def _ours(args: argparse.Namespace) -> dict[str, tuple[str, int]]:
    """Return the method and K of each of Outrider's systems. Raises `ConfigError`."""
    if "eagle3" in args.methods and args.eagle3 is None:
        raise ConfigError("--methods eagle3 needs --eagle3.")
    found = {
        f"{_OURS}{'' if method == _METHODS[0] else f'{method} '}K={k}": (method, k)
        for method in args.methods
        for k in (args.num_speculative_tokens, *args.more_tokens)
    }
    found |= {f"{name}{_AHEAD}": each for name, each in found.items() if args.ahead}
    return found | {f"{name}{_WITHIN}": each for name, each in found.items() if args.within}


def _drafting(args: argparse.Namespace, method: str) -> list[str]:
    """Return the flags that say how to draft."""
    words = ["--method", method, "--dtype", "bfloat16"]
    if method == "draft_model":
        words += ["--model", str(resolve_model(args.draft_model, "draft"))]
    elif method == "eagle3":  # vLLM verifies chains
        words += ["--model", args.eagle3, "--tree-width", "1"]
    return [*words, *args.proposer_flags]


def _proposer(
    args: argparse.Namespace, method: str, log_dir: Path, children: list[Child], port: int
) -> Child:
    """Start a proposer, which dials until the engine listens."""
    command = ["proposer_service", "--exit-with-parent", "--scorer", f"127.0.0.1:{port}"]
    command += ["--port", "0", "--metrics-port", f"{port + 3}", "--device", args.device]
    target = str(resolve_model(args.model, "target"))
    command += ["--target-model", target, *_drafting(args, method)]
    env = {"CUDA_VISIBLE_DEVICES": args.gpus[-1]}
    return module_child(f"proposer-{port}", command, log_dir, children, env)


if __name__ == "__main__":
    sys.exit(main())
