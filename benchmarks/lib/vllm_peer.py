"""vLLM's two modes as they stand beside Outrider's on a GPU, and where vLLM is."""

from __future__ import annotations

import argparse
import os
import shutil
import sys
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path

from benchmarks.peers import VllmSystem, start_vllm
from benchmarks.lib.processes import REPO, Child, ProcessError
from benchmarks.lib.program import say
from outrider.models.resolve import resolve_model

METHODS = ("none", "draft_model")
_ROOM = 64  # tokens beside a request's own: a last draft
# Each is for vLLM's sake: its own processes, no compiler at start, no network.
_VLLM_ENV = {
    "VLLM_ENABLE_V1_MULTIPROCESSING": "1",
    "VLLM_USE_FLASHINFER_SAMPLER": "0",
    "VLLM_USE_DEEP_GEMM": "0",
    "VLLM_WORKER_MULTIPROC_METHOD": "spawn",
}


@dataclass(frozen=True)
class VllmPlace:
    """A Python that has vLLM, and its environment."""

    python: str
    env: dict[str, str]

    @classmethod
    def find(cls, path: str | None) -> VllmPlace | None:
        """`path`: a folder of vLLM's wheels (for this Python), or another Python; None: none.

        Raises `ProcessError` where it is neither.
        """
        if not path:
            return None
        if os.path.isdir(path):
            return cls(sys.executable, {**_VLLM_ENV, "PYTHONPATH": f"{path}:{REPO}"})
        if shutil.which(path) is None:
            raise ProcessError(f"--vllm {path} is neither a folder of wheels nor a Python.")
        return cls(path, dict(_VLLM_ENV))


@dataclass(frozen=True)
class VllmModes:
    """What an engine of either mode is started with."""

    place: VllmPlace
    target: Path
    draft: Path
    num_speculative_tokens: int
    max_model_len: int
    concurrencies: frozenset[int]
    gpu_memory: float  # part of the GPU, of each engine
    request_timeout_s: float
    speculation: Mapping[str, object] = field(default_factory=dict)  # more of speculative_config

    @staticmethod
    def from_args(
        args: argparse.Namespace,
        place: VllmPlace,
        concurrencies: list[int],
        request_timeout_s: float,
        speculation: Mapping[str, object] | None = None,
    ) -> VllmModes:
        """From the flags that gpu_serve.py and draft_ahead.py share."""
        return VllmModes(
            place=place,
            target=resolve_model(args.model, "target"),
            draft=resolve_model(args.draft_model, "draft"),
            num_speculative_tokens=args.num_speculative_tokens,
            max_model_len=args.max_prompt_tokens + args.max_tokens + _ROOM,
            concurrencies=frozenset(concurrencies),
            gpu_memory=args.vllm_memory,
            request_timeout_s=request_timeout_s,
            speculation=speculation or {},
        )

    def start(
        self,
        method: str,
        log_dir: Path,
        children: list[Child],
        env: Mapping[str, str] | None = None,
    ) -> VllmSystem:
        """One of `METHODS`, loaded. Raises `ProcessError`."""
        say(f"starting vLLM {method}: it compiles first, which takes minutes")
        drafts = method == "draft_model"
        worker = start_vllm(
            self.place.python,
            self.target,
            self.draft if drafts else None,
            num_speculative_tokens=self.num_speculative_tokens,
            max_model_len=self.max_model_len,
            log_dir=log_dir,
            children=children,
            max_num_seqs=max(self.concurrencies),
            engine={"gpu_memory_utilization": self.gpu_memory, "skip_tokenizer_init": True},
            speculation=self.speculation if drafts else {},
            env={**self.place.env, **(env or {})},
        )
        return VllmSystem(f"vllm {method}", worker, self.concurrencies, self.request_timeout_s)
