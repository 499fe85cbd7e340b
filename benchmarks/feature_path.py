"""What hidden features cost a round, and where: in one process, over a Unix socket, over TCP.

    python -m benchmarks.feature_path [--method eagle3] [--head FOLDER --model TARGET]
        [--device cuda --dtype bfloat16 --scorer-flags "..." --proposer-flags "..."]
        [--inflate FOLDER]

The same engine and the same drafting method, put together in several ways: taking turns in one
process, with features handed over as arguments (`in process`); as a scorer that drafts itself, in
its own process (`in the scorer`); as a scorer and a proposer that dials its Unix socket
(`colocated`), its port on loopback (`remote`), or the same with a round trip added by the delay
proxy. Every round drafts K tokens and waits for them (fixed_k.py), so that all ways do the same
rounds; beside them stands no speculation. Every repetition runs the same prompts in all ways, in
turning order. Clients ask the scorer itself, greedily, without a gateway. Texts must be those of
no speculation: exits with 1 if one is not, in float32.

With `--inflate` target and module are the embedded ones in the shape of an 8B (inflate.py,
inflate_head.py: their drafts at its cost), written to FOLDER first unless they are there.
"""

from __future__ import annotations

import argparse
import contextlib
import itertools
import json
import os
import shlex
import subprocess
import sys
import tempfile
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Final, Protocol

from benchmarks.lib import prompts, report
from benchmarks.lib.feature_rows import IN_PROCESS, NONE, Row, Sample, Sent, document, row
from benchmarks.lib.gpu import gpu_name
from benchmarks.lib.stack import (
    OutriderSystem,
    Route,
    Stack,
    StackConfig,
    method_flags,
    model_flags,
    scorer_flags,
)
from benchmarks.lib.processes import Child, ProcessError, Worker, python_path, stopping
from benchmarks.lib.program import guarded, say
from benchmarks.lib.records import Completion, Run, TokenIds
from outrider.aux_layers import aux_layers
from outrider.cli.stack import memory_folder
from outrider.errors import ConfigError
from outrider.methods import HIDDEN_STATE_METHODS
from outrider.models.resolve import resolve_model
from scorer_service.drafting.in_process import POOL

_SENT: Final = ("bytes", "rows", "seconds")
_SHAPE: Final = "llama-3.1-8b"
_INFLATING_S: Final = 600.0
_IN_SCORER: Final = "in the scorer"
_SPARE_TOKENS: Final = 128  # behind a text: steps with trees near the end are not recorded


class Way(Protocol):
    """One way of putting engine and method together."""

    def run(self, group: Sequence[TokenIds], max_tokens: int, at_once: int, k: int) -> Sample:
        """All of `group`, `at_once` in flight, K draft tokens a round. Raises `ProcessError`."""
        ...


@dataclass(frozen=True)
class Turns:
    """Engine and method in one process (in_process.py)."""

    worker: Worker
    timeout_s: float

    def run(self, group: Sequence[TokenIds], max_tokens: int, at_once: int, k: int) -> Sample:
        request = {"prompts": group, "max_tokens": max_tokens, "concurrency": at_once, "k": k}
        answer = self.worker.ask(request, self.timeout_s * len(group))
        done = tuple(
            Completion(**{**each, "token_ids": tuple(each["token_ids"])})
            for each in answer["completions"]
        )
        sent = answer["features"]
        counts = Sent(sent["bytes"], sent["rows"], sent["seconds"], sent["steps"])
        return Sample(Run(done, answer["wall_s"]), counts, sum(map(len, group)))


@dataclass(frozen=True)
class Services:
    """Scorer and proposer as processes."""

    system: OutriderSystem

    def run(self, group: Sequence[TokenIds], max_tokens: int, at_once: int, k: int) -> Sample:
        system = replace(self.system, num_speculative_tokens=k)
        before = self._counters()
        run = system.run(group, max_tokens, at_once)
        spent = [b - a for a, b in zip(before, self._counters(), strict=True)]
        return Sample(run, Sent(*spent), sum(map(len, group)))

    def _counters(self) -> list[float]:
        stack = self.system.stack
        values = {sample.name: sample.value for sample in stack.metrics()}
        steps = stack.step_seconds().get("steps", 0.0)
        return [*(values.get(f"outrider:feature_{name}_total", 0.0) for name in _SENT), steps]


def hidden_features(method: str, head: str) -> str:
    """What the scorer is to keep for the module. Raises `ConfigError`."""
    if method != "eagle3":
        return "final"
    try:
        layers = aux_layers(json.loads((resolve_model(head, method) / "config.json").read_text()))
    except (OSError, ValueError) as error:
        raise ConfigError(f"--head {head}: no config.json that can be read ({error}).") from error
    return "eagle3" if layers is None else ",".join(map(str, layers))


@contextlib.contextmanager
def ways(args: argparse.Namespace) -> Iterator[dict[str, Way]]:
    """All of them, started and warm: two engines, one of them of both services.

    Raises `ProcessError`.
    """
    with contextlib.ExitStack() as cleanup:
        folder = Path(
            cleanup.enter_context(tempfile.TemporaryDirectory(prefix="path-", dir=memory_folder()))
        )
        children = cleanup.enter_context(stopping([]))
        config = _config(args)
        say(f"starting {IN_PROCESS} and the services")
        child = _in_process(config, folder)
        children.append(child)
        stack = Stack(config, children, folder)
        cleanup.callback(stack.close)
        stack.require_proposers()
        turns = Turns(Worker(child, config.start_timeout_s), args.request_timeout)
        services = OutriderSystem(
            NONE, stack, "none", frozenset(args.at_once), args.request_timeout, False
        )
        drafting = {
            route.pool: Services(replace(services, method=args.method, pool=route.pool))
            for route in config.routes
        }
        drafting[_IN_SCORER] = Services(replace(services, method=args.method, pool=POOL))
        yield {IN_PROCESS: turns, **drafting, NONE: Services(services)}


def _config(args: argparse.Namespace) -> StackConfig:
    """Of the services; on a GPU they record what this run needs, and no more."""
    routes = [Route("colocated", unix=True), Route("remote")]
    if args.round_trip_ms:
        name = f"remote +{args.round_trip_ms:g} ms"
        routes.append(Route(name, round_trip_ms=args.round_trip_ms))
    rows, k = max(args.at_once), max(args.k)
    on_gpu = args.device != "cpu"
    length = args.max_prompt_tokens + args.max_tokens + _SPARE_TOKENS
    scorer: list[object] = ["--hidden-features", hidden_features(args.method, args.head)]
    proposer: list[object] = []
    if on_gpu:
        scorer += ["--kv-cache-memory", args.kv_cache_memory, "--max-num-seqs", rows]
        scorer += ["--max-model-len", length]
        proposer += ["--max-draft-tokens", k]
    config = StackConfig(
        model=args.model,
        draft_model=args.head,
        dtype=args.dtype,
        num_speculative_tokens=k,
        scorer_threads=args.threads,
        proposer_threads=args.threads,
        start_timeout_s=args.start_timeout,
        methods=(args.method,),
        device=args.device,
        scorer_flags=(*map(str, scorer), *args.scorer_flags),
        proposer_flags=(*map(str, proposer), *args.proposer_flags),
        wrapper=("benchmarks.by_pool",),
        routes=tuple(routes),
        max_sessions=rows if on_gpu else 256,
        start_together=True,
    )
    turns = ("--in-process-proposer", method_flags(config))
    return replace(config, scorer_flags=(*config.scorer_flags, *turns))


def _in_process(config: StackConfig, log_dir: Path) -> Child:
    (method,) = config.methods
    proposer = ["--method", method, "--threads", str(config.proposer_threads)]
    proposer += model_flags(config, method)
    flags = [shlex.join(scorer_flags(config)), shlex.join(proposer)]
    command = [sys.executable, "-P", "-m", "benchmarks.in_process", *flags]
    return Child(IN_PROCESS, command, log_dir, env=config.process_env)


def inflated(folder: Path, device: str) -> tuple[str, str]:
    """The folders of target and module; in processes of their own, which leave no memory taken.

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


def measure(
    args: argparse.Namespace,
    found: Mapping[str, Way],
    loaded: prompts.Prompts,
    k: int,
    at_once: int,
) -> list[Row]:
    """All ways. Raises `ProcessError` if one drafts nothing."""
    names = list(found)
    size = max(args.min_prompts, at_once)
    for way in found.values():  # every kind of step, before any is measured
        way.run(loaded.group(0, size), args.max_tokens // 2, at_once, k)
    samples: dict[str, list[Sample]] = {name: [] for name in names}
    for r in range(args.rounds):
        group = loaded.group(r, size)
        for turn in range(len(names)):
            name = names[(r + turn) % len(names)]
            sample = found[name].run(group, args.max_tokens, at_once, k)
            drafted = [each.stats["drafted"] > 0 for each in sample.run.completions]
            if name != NONE and not all(drafted):
                raise ProcessError(f"{name}: a request without drafts; see the proposer")
            samples[name].append(sample)
            say(f"K = {k}, {at_once} at once, {r + 1}/{args.rounds}: {name}: {sample.line()}")
    return [row(k, at_once, name, samples) for name in names]


def parser() -> argparse.ArgumentParser:
    p = argparse.ArgumentParser(
        prog="python -m benchmarks.feature_path",
        description=__doc__,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    p.add_argument("--method", choices=HIDDEN_STATE_METHODS, default="eagle3")
    p.add_argument("--head", default="embedded", help="its module: a folder")
    p.add_argument("--model", default="embedded", help="the target: a folder")
    p.add_argument(
        "--inflate", type=Path, metavar="FOLDER", help="eagle3 alone: an 8B's shape, made there"
    )
    p.add_argument("--dtype", default="float32", help="of the target")
    p.add_argument("--device", default="cpu")
    p.add_argument("--threads", type=int, default=1, help="of each process, on a CPU")
    p.add_argument("--k", type=int, nargs="+", default=[3, 5], help="draft tokens per round")
    p.add_argument("--at-once", type=int, nargs="+", default=[1, 8], help="requests")
    p.add_argument("--rounds", type=int, default=5, help="repetitions")
    p.add_argument("--min-prompts", type=int, default=2, help="of a repetition")
    p.add_argument("--max-tokens", type=int, default=128, help="output tokens of each request")
    p.add_argument("--max-prompt-tokens", type=int, default=256)
    p.add_argument("--prompts", type=Path, help="JSON lines; default: the held-out prompts")
    p.add_argument("--round-trip-ms", type=float, default=1.0, help="added to the last way, if any")
    p.add_argument("--scorer-flags", type=shlex.split, default=[], help="more of them, quoted")
    p.add_argument("--proposer-flags", type=shlex.split, default=[], help="more of them, quoted")
    p.add_argument("--kv-cache-memory", type=int, default=4096, help="MiB per engine, on a GPU")
    p.add_argument("--start-timeout", type=float, default=300.0, help="seconds, per process")
    p.add_argument("--request-timeout", type=float, default=120.0, help="seconds, per request")
    p.add_argument(
        "--out", type=Path, default=Path("benchmarks/results/feature_path"), help="without suffix"
    )
    return p


def main(argv: Sequence[str] | None = None) -> int:
    """0: measured; 1: a text differs in float32; 2: it could not run."""
    args = parser().parse_args(argv)
    given = sys.argv[1:] if argv is None else argv
    command = shlex.join(["python", "-m", "benchmarks.feature_path", *given])
    return guarded(lambda: _run(args, command))


def _run(args: argparse.Namespace, command: str) -> int:
    if args.inflate is not None:
        if args.method != "eagle3":
            raise ConfigError("--inflate is for --method eagle3 alone.")
        args.model, args.head = inflated(args.inflate, args.device)
    names = ("method", "head", "model", "dtype", "device", "threads", "rounds", "max_tokens")
    settings = {name: getattr(args, name) for name in names}
    rows: list[Row] = []
    target = resolve_model(args.model, "target")
    loaded = prompts.load(args.prompts, target, count=64, max_prompt_tokens=args.max_prompt_tokens)
    machine = report.machine() | ({} if args.device == "cpu" else {"gpu": gpu_name()})
    with ways(args) as found:
        for k, at_once in itertools.product(args.k, args.at_once):
            rows += measure(args, found, loaded, k, at_once)
            text = "\n".join(document(rows, command, machine, settings))
            setup = {**machine, **settings, "command": command, "prompts": loaded.sha256}
            results = [asdict(each) for each in rows]
            report.write({"setup": setup, "results": results}, text, args.out)  # so far
    print(text)
    return int(args.dtype == "float32" and any(each.equal < 1.0 for each in rows))


if __name__ == "__main__":
    sys.exit(main())
