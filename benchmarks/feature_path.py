"""Measure a round of a hidden-state method in the scorer's process and in one of its own.

    python -m benchmarks.feature_path [--method eagle3] [--head FOLDER --model TARGET]
        [--device cuda --dtype bfloat16 --scorer-flags "..." --proposer-flags "..."]
        [--inflate FOLDER]

The scorer drafts by itself (`in the scorer`), or a proposer drafts that dials the scorer's Unix
socket (`colocated`), its port on loopback (`remote`), or the same through the delay proxy. Every
round drafts K tokens and waits for them (`--speculation-policy fixed`), so all ways do the same
rounds. Each repetition runs the same prompts with a way and without speculation on one scorer.
Clients ask the scorer itself, greedily. In float32 the exit code is 1 if a text differs from that
of no speculation.

With `--inflate`, target and module are the embedded ones in the shape of an 8B (inflate.py,
inflate_head.py), written to FOLDER unless they are there.
"""

from __future__ import annotations

import argparse
import contextlib
import os
import subprocess
import sys
import tempfile
from collections.abc import Generator, Iterator, Sequence
from dataclasses import asdict, replace
from itertools import product
from pathlib import Path
from typing import Final

from benchmarks.lib import prompts, report
from benchmarks.lib.feature_rows import IN_SCORER, NONE, Sample, Samples, Sent, document, rows_of
from benchmarks.lib.gpu import gpu_name
from benchmarks.lib.processes import ProcessError, python_path, stopping
from benchmarks.lib.program import add_service_flags, guarded, measuring_arguments, say
from benchmarks.lib.records import TokenIds
from benchmarks.lib.stack import OutriderSystem, Route, Stack, StackConfig
from outrider.aux_layers import states_read
from outrider.cli.ports import memory_folder
from outrider.errors import ConfigError
from outrider.methods import HIDDEN_STATE_METHODS
from outrider.models.resolve import resolve_model

WAYS: Final = ("in-scorer", "colocated", "remote")
_SENT: Final = ("bytes", "rows", "seconds")
_SHAPE: Final = "llama-3.1-8b"
_INFLATING_S: Final = 600.0
_SPARE_TOKENS: Final = 128  # behind a text: steps with trees near the end are not captured
_SETTINGS: Final = ("method", "head", "model", "dtype", "device", "threads", "rounds", "max_tokens")


def config_of(args: argparse.Namespace) -> StackConfig:
    """Return the settings of the services. On a GPU, steps of the largest K and batch are captured.

    A smaller K is verified in steps of the largest, whichever process drafts.
    """
    rows, k = max(args.at_once), max(args.k)
    on_gpu = args.device != "cpu"
    scorer: list[object] = ["--hidden-features", states_read(args.method, args.head)]
    scorer += ["--speculation-policy", "fixed"]
    proposer: list[object] = []
    if on_gpu:
        length = args.max_prompt_tokens + args.max_tokens + _SPARE_TOKENS
        scorer += ["--kv-cache-memory", args.kv_cache_memory, "--max-num-seqs", rows]
        scorer += ["--max-model-len", length]
        proposer += ["--max-draft-tokens", k]
    return StackConfig(
        model=args.model,
        draft_model=args.head,
        dtype=args.dtype,
        num_speculative_tokens=k,
        start_timeout_s=args.start_timeout,
        scorer_threads=args.threads,
        proposer_threads=args.threads,
        methods=(args.method,),
        device=args.device,
        scorer_flags=(*map(str, scorer), *args.scorer_flags),
        proposer_flags=(*map(str, proposer), *args.proposer_flags),
        max_sessions=rows if on_gpu else 256,
        gateway=False,
    )


def ways(args: argparse.Namespace) -> Generator[tuple[str, Stack], None, None]:
    """Yield each way while it is up: its name, and a scorer that is drafted for."""
    config = config_of(args)
    routes = [Route(name, unix=name == "colocated") for name in WAYS[1:] if name in args.ways]
    if "remote" in args.ways and args.round_trip_ms:
        routes.append(Route(f"remote +{args.round_trip_ms:g} ms", proxied=True))
    if "in-scorer" in args.ways:
        with _stack(replace(config, in_process=True)) as stack:
            yield IN_SCORER, stack
    if not routes:
        return
    proxy = any(route.proxied for route in routes)
    with _stack(replace(config, unix="colocated" in args.ways, proxy=proxy)) as stack:
        if proxy:
            stack.set_round_trip(args.round_trip_ms)
        for route in routes:
            with stack.attached(route):
                yield route.name, stack


@contextlib.contextmanager
def _stack(config: StackConfig) -> Iterator[Stack]:
    with contextlib.ExitStack() as cleanup:
        folder = cleanup.enter_context(
            tempfile.TemporaryDirectory(prefix="path-", dir=memory_folder())
        )
        children = cleanup.enter_context(stopping([]))
        say("starting a scorer" + (" that drafts" if config.in_process else ""))
        stack = cleanup.enter_context(contextlib.closing(Stack(config, children, Path(folder))))
        stack.require_proposers()
        yield stack


def measure(
    args: argparse.Namespace, name: str, stack: Stack, loaded: prompts.Prompts, k: int, at_once: int
) -> Samples:
    """Measure one way beside no speculation. Raises `ProcessError` if a request has no draft."""
    plain = OutriderSystem(
        NONE, stack, "none", frozenset({at_once}), args.request_timeout, through_gateway=False
    )
    drafting = replace(plain, name=name, method=args.method, num_speculative_tokens=k)
    size = max(args.min_prompts, at_once)
    for system in (drafting, plain):  # every kind of step, before any is measured
        system.run(loaded.group(0, size), args.max_tokens // 2, at_once)
    found = Samples([], [])
    for r in range(args.rounds):
        group = loaded.group(r, size)
        pair = ((drafting, found.drafting), (plain, found.plain))
        for system, samples in pair if r % 2 else reversed(pair):
            sample = _sample(system, group, args.max_tokens, at_once)
            samples.append(sample)
            rate = f"{system.name}: {sample.run.tokens_per_s:.1f} tok/s"
            say(f"K = {k}, {at_once} at once, {r + 1}/{args.rounds}: {rate}")
        if not all(each.stats["drafted"] > 0 for each in found.drafting[-1].run.completions):
            raise ProcessError(f"{name}: a request without drafts; see the proposer")
    return found


def _sample(
    system: OutriderSystem, group: Sequence[TokenIds], max_tokens: int, at_once: int
) -> Sample:
    before = _counters(system.stack)
    run = system.run(group, max_tokens, at_once)
    spent = [b - a for a, b in zip(before, _counters(system.stack), strict=True)]
    return Sample(run, Sent(*spent), sum(map(len, group)))


def _counters(stack: Stack) -> list[float]:
    values = {sample.name: sample.value for sample in stack.metrics()}
    steps = stack.step_seconds().get("steps", 0.0)
    return [*(values.get(f"outrider:feature_{name}_total", 0.0) for name in _SENT), steps]


def inflated(folder: Path, device: str) -> tuple[str, str]:
    """Return the folders of target and module, made by processes that leave no memory taken.

    Raises `ProcessError`.
    """
    parts = {
        "target": ("benchmarks.inflate", "--role", "target"),
        "head": ("benchmarks.inflate_head",),
    }
    for name, (module, *flags) in parts.items():
        part = folder / name
        if (part / "config.json").is_file():
            continue
        say(f"inflating: {part}")
        command = [sys.executable, "-P", "-m", module, *flags, "--shape", _SHAPE]
        command += ["--out", str(part), "--device", device]
        env = os.environ | python_path()
        try:
            subprocess.run(command, env=env, stdout=sys.stderr, check=True, timeout=_INFLATING_S)
        except subprocess.SubprocessError as error:
            raise ProcessError(f"{part} could not be made: {error}") from error
    return str(folder / "target"), str(folder / "head")


def parser() -> argparse.ArgumentParser:
    p = measuring_arguments("benchmarks.feature_path", __doc__)
    add_service_flags(p)
    p.add_argument("--method", choices=HIDDEN_STATE_METHODS, default="eagle3")
    p.add_argument("--head", default="embedded", help="its module: a folder")
    p.add_argument(
        "--inflate", type=Path, metavar="FOLDER", help="eagle3 alone: an 8B's shape, made there"
    )
    p.add_argument("--ways", nargs="+", choices=WAYS, default=list(WAYS))
    p.add_argument("--threads", type=int, default=1, help="of each process, on a CPU")
    p.add_argument("--k", type=int, nargs="+", default=[3, 5], help="draft tokens per round")
    p.add_argument("--at-once", type=int, nargs="+", default=[1, 8], help="requests")
    p.add_argument("--min-prompts", type=int, default=2, help="of a repetition")
    p.add_argument("--round-trip-ms", type=float, default=1.0, help="0: no way through the proxy")
    p.add_argument("--kv-cache-memory", type=int, default=4096, help="MiB per engine, on a GPU")
    return p


def main(argv: Sequence[str] | None = None) -> int:
    """Return 0 if it measured, 1 if a text differs in float32, 2 if it could not run."""
    args = parser().parse_args(argv)
    return guarded(lambda: _run(args))


def _run(args: argparse.Namespace) -> int:
    command = report.command("benchmarks.feature_path")
    if args.inflate is not None:
        if args.method != "eagle3":
            raise ConfigError("--inflate is for --method eagle3 alone.")
        args.model, args.head = inflated(args.inflate, args.device)
    target = resolve_model(args.model, "target")
    loaded = prompts.load(args.prompts, target, count=64, max_prompt_tokens=args.max_prompt_tokens)
    setup = report.machine() | ({} if args.device == "cpu" else {"gpu": gpu_name()})
    setup |= {name: getattr(args, name) for name in _SETTINGS}
    found: dict[tuple[int, int], dict[str, Samples]] = {}
    with contextlib.closing(ways(args)) as each_way:
        for name, stack in each_way:
            for size in product(args.k, args.at_once):
                found.setdefault(size, {})[name] = measure(args, name, stack, loaded, *size)
            rows = [row for size, samples in found.items() for row in rows_of(*size, samples)]
            text = "\n".join(document(rows, command, setup))
            about = {**setup, "command": command, "prompts": loaded.sha256}
            results = [asdict(row) for row in rows]
            report.write({"setup": about, "results": results}, text, args.out)  # so far
    print(text)
    return int(args.dtype == "float32" and any(row.equal < 1.0 for row in rows))


if __name__ == "__main__":
    sys.exit(main())
