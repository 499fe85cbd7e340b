"""Measure the whole stack on one GPU over loopback gRPC, beside vLLM's two modes.

    python -m benchmarks.gpu_serve --model TARGET --draft-model DRAFT [--vllm FOLDER|PYTHON]

A scorer and a proposer with a draft model share the GPU, as two processes or (`--in-process`) as
one. A gateway faces the client. TARGET and DRAFT are model folders, for instance inflated ones
(benchmarks/inflate.py: real acceptance at an 8B's cost). `--soak SECONDS` keeps requests of mixed
lengths in flight instead of measuring, and fails on any error and on pages or memory that are not
given back.
"""

from __future__ import annotations

import argparse
import contextlib
import sys
import tempfile
from collections.abc import Sequence
from pathlib import Path

from benchmarks.lib import prompts, report
from benchmarks.lib.gpu import gpu_name
from benchmarks.lib.measure import Cell, Plan, measure
from benchmarks.lib.processes import Child, ProcessError, stopping
from benchmarks.lib.program import (
    add_service_flags,
    add_vllm_flags,
    guarded,
    measuring_arguments,
    say,
)
from benchmarks.lib.records import System
from benchmarks.lib.soak import soak
from benchmarks.lib.stack import OutriderSystem, Stack, StackConfig
from benchmarks.lib.vllm_peer import METHODS, GpuPeers, VllmPlace, VllmSystem
from outrider.models.resolve import resolve_model


def parser() -> argparse.ArgumentParser:
    p = measuring_arguments("benchmarks.gpu_serve", __doc__)
    add_service_flags(p)
    add_vllm_flags(p)
    p.set_defaults(device="cuda", dtype="bfloat16", max_prompt_tokens=512, out=None)
    p.add_argument("--temperature", type=float, default=0.0, help="not of vLLM's requests")
    p.add_argument("--top-p", type=float, default=1.0, help="likewise")
    p.add_argument("--concurrency", type=int, nargs="+", default=[1, 8, 32, 64])
    p.add_argument(
        "--in-process", action="store_true", help="the scorer drafts, without a proposer beside it"
    )
    p.add_argument("--scorer-memory", type=float, default=0.3, help="part of the GPU")
    p.add_argument("--soak", type=float, default=0.0, metavar="SECONDS")
    p.add_argument("--soak-requests", type=int, default=128, help="in flight at once")
    return p


def main(argv: Sequence[str] | None = None) -> int:
    """Return 0 if it measured or soaked without a fault, 1 for a fault, 2 if it could not run."""
    args = parser().parse_args(argv)
    name = "gpu_serve_in_process" if args.in_process else "gpu_serve"
    args.out = args.out or Path("benchmarks/results", name)
    return guarded(lambda: _run(args))


def _run(args: argparse.Namespace) -> int:
    with contextlib.ExitStack() as cleanup:
        log_dir = Path(cleanup.enter_context(tempfile.TemporaryDirectory(prefix="bench-")))
        children = cleanup.enter_context(stopping([]))
        return _measure(args, log_dir, children, cleanup)


def _measure(
    args: argparse.Namespace, log_dir: Path, children: list[Child], cleanup: contextlib.ExitStack
) -> int:
    target = resolve_model(args.model, "target")
    loaded = prompts.load(args.prompts, target, count=64, max_prompt_tokens=args.max_prompt_tokens)
    say("starting Outrider")
    stack = Stack(_stack_config(args), children, log_dir)
    cleanup.callback(stack.close)
    if not args.in_process:
        stack.attach()
    stack.require_proposers()
    if args.soak:
        faults = soak(stack, loaded, args.soak, args.soak_requests, args.request_timeout, say)
        print("\n".join(faults) or "soak: no fault")
        return int(bool(faults))
    systems: list[System] = [
        OutriderSystem(
            f"outrider {method}",
            stack,
            method,
            frozenset(args.concurrency),
            args.request_timeout,
            temperature=args.temperature,
            top_p=args.top_p,
        )
        for method in ("none", "draft_model")
    ]
    notes = _notes(args)
    systems += _vllm(args, log_dir, children, notes)
    cells: list[Cell] = []
    for concurrency in args.concurrency:
        plan = Plan(concurrency, args.rounds, max(2, args.waves * concurrency))
        try:
            # One unmeasured round compiles kernels and lets the policy learn.
            for system in systems:
                system.run(loaded.group(0, plan.prompts_per_round), args.max_tokens, concurrency)
            cells += measure(systems, plan, loaded, args.max_tokens, children, say)
            stack.require_proposers()
        except ProcessError as error:  # the other concurrencies are kept
            say(f"*** {concurrency} concurrent failed: {error} ***")
            notes.append(f"{concurrency} concurrent failed: {error}")
    flags = {name: str(value) for name, value in vars(args).items() if name != "prompts"}
    setup = report.load_facts("benchmarks.gpu_serve", loaded) | flags
    setup |= {"gpu": gpu_name(), "notes": notes}
    title = "The whole stack on a GPU"
    print(report.write_cells(cells, lambda _: "outrider none", setup, title, args.out))
    return 0 if cells else 2


def _stack_config(args: argparse.Namespace) -> StackConfig:
    flags = [*args.scorer_flags]
    if args.device != "cpu":
        flags += ["--gpu-memory-utilization", str(args.scorer_memory)]
    return StackConfig(
        model=str(resolve_model(args.model, "target")),
        draft_model=str(resolve_model(args.draft_model, "draft")),
        dtype=args.dtype,
        num_speculative_tokens=args.num_speculative_tokens,
        start_timeout_s=args.start_timeout,
        draft_dtype=args.dtype,
        device=args.device,
        scorer_flags=tuple(flags),
        proposer_flags=tuple(args.proposer_flags),
        in_process=args.in_process,
    )


def _vllm(
    args: argparse.Namespace, log_dir: Path, children: list[Child], notes: list[str]
) -> list[VllmSystem]:
    place = VllmPlace.find(args.vllm)
    if place is None:
        say("*** vLLM is left out: --vllm was not given ***")
        return []
    peers = GpuPeers(place, args, args.concurrency, log_dir, children)
    systems = []
    for method in METHODS:
        try:
            systems.append(peers.start_method(method))
        except ProcessError as error:
            say(f"*** vLLM {method} is left out: {error} ***")
            notes.append(f"vLLM {method} was left out: {error}")
    return systems


def _notes(args: argparse.Namespace) -> list[str]:
    notes = []
    if args.vllm is None:
        notes.append("vLLM was left out.")
    elif args.temperature:
        notes.append("vLLM's requests are greedy, Outrider's are not.")
    return notes


if __name__ == "__main__":
    sys.exit(main())
