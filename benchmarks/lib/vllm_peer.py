"""vLLM as a peer: with its `draft_model` method, and without speculation."""

from __future__ import annotations

import argparse
import json
import os
import shutil
import sys
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from benchmarks.lib.processes import REPO, Child, ProcessError, Worker
from benchmarks.lib.program import say
from benchmarks.lib.records import Run, TokenIds, completions_of
from outrider.models.resolve import resolve_model

_ROOM = 64  # tokens beside a request's own, for its last draft
_THREADS = "2"
# vLLM's own processes, no compiler at start, no network.
_GPU_ENV = {
    "VLLM_ENABLE_V1_MULTIPROCESSING": "1",
    "VLLM_USE_FLASHINFER_SAMPLER": "0",
    "VLLM_USE_DEEP_GEMM": "0",
    "VLLM_WORKER_MULTIPROC_METHOD": "spawn",
}


@dataclass(frozen=True)
class VllmSystem:
    """An engine of vLLM in its worker."""

    name: str
    worker: Worker
    concurrencies: frozenset[int]
    timeout_s: float

    def run(self, prompts: Sequence[TokenIds], max_tokens: int, concurrency: int) -> Run:
        answer = self.worker.ask(
            {"prompts": prompts, "max_tokens": max_tokens, "concurrency": concurrency},
            self.timeout_s * -(-len(prompts) // concurrency),
        )
        counts = (answer.get(name) for name in ("rounds", "drafted", "accepted"))
        return Run(completions_of(answer), answer["wall_s"], *counts)


@dataclass(frozen=True)
class VllmEngine:
    """Settings of an engine in bfloat16."""

    place: VllmPlace
    target: Path
    max_model_len: int
    max_num_seqs: int = 16
    options: Mapping[str, Any] = field(default_factory=dict)  # further arguments of `LLM`
    start_timeout_s: float = 600.0
    name: str = ""  # of its log; else its method's

    def start(self, log_dir: Path, children: list[Child]) -> Worker:
        """Start the engine, which compiles for minutes. Raises `ProcessError`."""
        method = (self.options.get("speculative_config") or {}).get("method", "none")
        name = self.name or f"vllm-{method}"
        say(f"starting {name}: it compiles first, which takes minutes")
        settings = {
            "model": str(self.target),
            "dtype": "bfloat16",
            "max_model_len": self.max_model_len,
            "max_num_seqs": self.max_num_seqs,
            **self.options,
        }
        command = [self.place.python, "-m", "benchmarks.lib.vllm_worker", json.dumps(settings)]
        env = {"OMP_NUM_THREADS": _THREADS, "PYTHONPATH": str(REPO), "PYTHONUNBUFFERED": "1"}
        child = Child(name, command, log_dir, env={**env, **self.place.env})
        children.append(child)
        return Worker(child, self.start_timeout_s)


def speculative_config(method: str, model: object, k: int) -> dict[str, object]:
    """Return vLLM's `speculative_config` of a method with `k` draft tokens."""
    return {"method": method, "model": str(model), "num_speculative_tokens": k}


@dataclass(frozen=True)
class VllmPlace:
    """A Python that has vLLM, and its environment on a GPU."""

    python: str
    env: dict[str, str]

    @classmethod
    def find(cls, path: str | None) -> VllmPlace | None:
        """Take a folder of vLLM's wheels for this Python, or another Python.

        Raises `ProcessError` if `path` is neither.
        """
        if not path:
            return None
        if os.path.isdir(path):
            ours = os.environ.get("PYTHONPATH", "").split(os.pathsep)
            # With the attention bundle's newer libraries vLLM does not start.
            paths = [path, str(REPO), *(p for p in ours if "attention" not in Path(p).parts)]
            return cls(sys.executable, {**_GPU_ENV, "PYTHONPATH": os.pathsep.join(paths)})
        if shutil.which(path) is None:
            raise ProcessError(f"--vllm {path} is neither a folder of wheels nor a Python.")
        return cls(path, dict(_GPU_ENV))


@dataclass(frozen=True)
class GpuPeers:
    """Starts engines by the flags that GPU programs share."""

    place: VllmPlace
    args: argparse.Namespace
    log_dir: Path
    children: list[Child]
    gpu: str | None = None  # CUDA_VISIBLE_DEVICES

    def start(self, name: str, **options: object) -> VllmSystem:
        """Start an engine with these arguments of `LLM`. Raises `ProcessError`."""
        args = self.args
        gpu = {} if self.gpu is None else {"CUDA_VISIBLE_DEVICES": self.gpu}
        engine = VllmEngine(
            VllmPlace(self.place.python, self.place.env | gpu),
            resolve_model(args.model, "target"),
            args.max_prompt_tokens + args.max_tokens + _ROOM,
            max(args.concurrency),
            {"gpu_memory_utilization": args.vllm_memory, "skip_tokenizer_init": True, **options},
            start_timeout_s=args.start_timeout,
            name=name.replace(" ", "-"),
        )
        worker = engine.start(self.log_dir, self.children)
        return VllmSystem(name, worker, frozenset(args.concurrency), args.request_timeout)
