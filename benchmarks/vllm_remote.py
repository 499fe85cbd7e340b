"""Measure vLLM with Outrider's proposers, beside vLLM's own draft model and no speculation.

    python -m benchmarks.vllm_remote --model TARGET --draft-model DRAFT --vllm FOLDER|PYTHON
        [--gpus 0 1] [--eagle3 HEAD]

TARGET and DRAFT are model folders, for instance inflated ones (benchmarks/inflate.py). The engines
lie on the first GPU, and Outrider's proposer on the last: with two GPUs it drafts ahead. With
`--eagle3`, vLLM also speculates with that module, on the last GPU. All engines are loaded at once,
with KV caches of a fixed size, and measured in turns.
"""

from __future__ import annotations

import argparse
import shlex
import sys
import tempfile
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

from benchmarks.lib import prompts, report
from benchmarks.lib.gpu import gpu_name
from benchmarks.lib.measure import Cell, Plan, measure
from benchmarks.lib.processes import Child, ProcessError, module_child, stopping
from benchmarks.lib.program import add_vllm_flags, guarded, measuring_arguments
from benchmarks.lib.vllm_peer import GpuPeers, VllmPlace, VllmSystem, speculative_config
from outrider.models.resolve import resolve_model

_BASE, _OURS, _EAGLE3 = "vllm none", "vllm + outrider", "vllm eagle3"
_PORT, _DATA_PORT = 7001, 7002
_KV_CACHE_BYTES = 6 << 30


def parser() -> argparse.ArgumentParser:
    p = measuring_arguments("benchmarks.vllm_remote", __doc__)
    add_vllm_flags(p)
    p.set_defaults(max_tokens=256, max_prompt_tokens=512, rounds=3, waves=2, vllm_memory=0.3)
    p.add_argument("--eagle3", help="EAGLE-3 module of the target: a folder")
    p.add_argument("--device", choices=("cuda", "cpu"), default="cuda")
    p.add_argument("--proposer-flags", type=shlex.split, default=[], help="more of them, quoted")
    p.add_argument("--gpus", nargs="+", default=["0"], help="of the engines, of the proposer")
    p.add_argument("--concurrency", type=int, nargs="+", default=[1, 8, 32])
    return p


def main(argv: Sequence[str] | None = None) -> int:
    """Return 0 if it measured, 2 if it could not run."""
    return guarded(_run, parser(), argv)


def _run(args: argparse.Namespace) -> int:
    target = resolve_model(args.model, "target")
    loaded = prompts.load(args.prompts, target, count=64, max_prompt_tokens=args.max_prompt_tokens)
    children: list[Child] = []
    with tempfile.TemporaryDirectory(prefix="bench-") as folder, stopping(children):
        systems = _start(args, Path(folder), children)
        cells: list[Cell] = []
        for concurrency in args.concurrency:
            plan = Plan(concurrency, args.rounds, max(2, args.waves * concurrency))
            for system in systems:  # compiles, and lets the policy learn
                system.run(loaded.group(0, plan.prompts_per_round), args.max_tokens, concurrency)
            cells += measure(systems, plan, loaded, args.max_tokens, children)
    setup = report.load_facts("benchmarks.vllm_remote", loaded)
    setup |= {"gpu": gpu_name(), "max_tokens": args.max_tokens, "notes": []}
    title = "vLLM with Outrider's proposers"
    print(report.write_cells(cells, lambda _: _BASE, setup, title, args.out))
    return 0


def _start(args: argparse.Namespace, log_dir: Path, children: list[Child]) -> list[VllmSystem]:
    """Start the engines side by side, then the proposer. Raises `ProcessError`."""
    place = VllmPlace.find(args.vllm)
    if place is None:
        raise ProcessError("--vllm is needed: a folder of vLLM's wheels, or another Python.")
    draft, k = resolve_model(args.draft_model, "draft"), args.num_speculative_tokens
    speculations = {
        _BASE: None,
        "vllm draft_model": speculative_config("draft_model", draft, k),
        _OURS: speculative_config("custom_class", "outrider.vllm.proposer.RemoteProposer", k),
    }
    if args.eagle3:
        speculations[_EAGLE3] = speculative_config("eagle3", args.eagle3, k)
    fitting: dict[str, object] = {"kv_cache_memory_bytes": _KV_CACHE_BYTES}
    if args.device == "cpu":
        fitting = {"enforce_eager": True}
    ports = {"outrider": f"--port {_PORT} --data-port {_DATA_PORT}"}

    def start(name: str) -> VllmSystem:
        hosted = name == _OURS
        more = fitting | ({"additional_config": ports} if hosted else {})
        gpu = args.gpus[-1 if name == _EAGLE3 else 0]
        peers = GpuPeers(place, args, log_dir, children, gpu)
        system = peers.start(name, speculations[name], **more)
        if hosted:
            _start_proposer(args, draft, log_dir, children)
        return system

    with ThreadPoolExecutor() as pool:
        return list(pool.map(start, speculations))


def _start_proposer(
    args: argparse.Namespace, draft: Path, log_dir: Path, children: list[Child]
) -> None:
    """Start a proposer and wait until it drafts for the engine. Raises `ProcessError`."""
    command = ["proposer_service", "--exit-with-parent", "--scorer", f"127.0.0.1:{_PORT}"]
    command += ["--port", "0", "--method", "draft_model", "--model", str(draft)]
    command += ["--dtype", "bfloat16", "--device", args.device, *args.proposer_flags]
    env = {"CUDA_VISIBLE_DEVICES": args.gpus[-1]}
    module_child("proposer", command, log_dir, children, env).ready(args.request_timeout)


if __name__ == "__main__":
    sys.exit(main())
