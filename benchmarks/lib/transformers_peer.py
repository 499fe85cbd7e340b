"""`transformers` as a peer: plain, assisted, prompt-lookup and batched `generate`.

The module is also the worker process that runs `generate`.
"""

from __future__ import annotations

import statistics
import sys
import time
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from benchmarks.lib.processes import Child, Worker, module_child
from benchmarks.lib.records import Run, TokenIds, completions_of
from benchmarks.lib.worker_loop import Handler, serve

DTYPES = {"bf16": "bfloat16", "fp32": "float32"}
_START_TIMEOUT_S = 120
_TRIALS = 3
_TRIAL_TOKENS = 32


@dataclass(frozen=True)
class TransformersSystem:
    """One mode of `generate`: plain, batched, assisted or lookup."""

    name: str
    worker: Worker
    mode: str
    dtype: str
    concurrencies: frozenset[int]
    timeout_s: float
    num_assistant_tokens: int = 0

    def run(
        self,
        prompts: Sequence[TokenIds],
        max_tokens: int,
        concurrency: int,  # noqa: ARG002
    ) -> Run:
        """See `System.run`. All modes but "batched" take one prompt after the other."""
        request: dict[str, object] = {"mode": self.mode, "dtype": self.dtype, "prompts": prompts}
        request |= {"max_tokens": max_tokens, "num_assistant_tokens": self.num_assistant_tokens}
        answer = self.worker.ask(request, self.timeout_s * len(prompts))
        rounds = answer["forwards"] if self.mode in ("assisted", "lookup") else None
        return Run(completions_of(answer), answer["wall_s"], rounds)


def start_transformers(target: Path, draft: Path, log_dir: Path, children: list[Child]) -> Worker:
    """Start a worker in this environment, with a thread on every core."""
    command = ["benchmarks.lib.transformers_peer", target, draft]
    return Worker(module_child("transformers", command, log_dir, children), _START_TIMEOUT_S)


@dataclass(frozen=True)
class Choice:
    """The fastest setting of a mode, and the tokens per second of all settings."""

    dtype: str  # a key of DTYPES
    num_assistant_tokens: int
    tried: dict[str, float]


def choose(
    worker: Worker,
    mode: str,
    assistant_tokens: Sequence[int],
    prompts: Sequence[TokenIds],
    timeout_s: float,
) -> Choice:
    """Try `mode` with every dtype and number of assistant tokens."""
    systems = {
        (dtype, k): TransformersSystem("", worker, mode, DTYPES[dtype], frozenset(), timeout_s, k)
        for dtype in DTYPES
        for k in assistant_tokens
    }
    rates: dict[tuple[str, int], list[float]] = {key: [] for key in systems}
    for system in systems.values():
        system.run(prompts[:1], 4, 1)  # loads, and warms up
    for i in range(_TRIALS):
        prompt = prompts[i % len(prompts)]
        for key, system in systems.items():
            rates[key].append(system.run([prompt], _TRIAL_TOKENS, 1).tokens_per_s)
    medians = {key: statistics.median(values) for key, values in rates.items()}
    best = max(medians, key=lambda key: medians[key])
    tried = {
        f"{mode} {dtype}" + (f" k={k}" if mode != "plain" else ""): rate
        for (dtype, k), rate in medians.items()
    }
    return Choice(*best, tried)


def build(target: str, draft: str) -> Handler:
    """Return a handler that loads the models on demand, once per dtype."""
    import torch
    from transformers import AutoModelForCausalLM
    from transformers.generation.streamers import BaseStreamer

    models: dict[tuple[str, str], Any] = {}
    forwards = 0

    def count(*_: object) -> None:
        nonlocal forwards
        forwards += 1

    def model(folder: str, dtype: str) -> Any:
        if (folder, dtype) not in models:
            loaded = AutoModelForCausalLM.from_pretrained(
                folder, dtype=getattr(torch, dtype)
            ).eval()
            loaded.generation_config.eos_token_id = None  # exactly max_tokens, like all systems
            loaded.generation_config.pad_token_id = 0
            if folder == target:
                loaded.register_forward_hook(count)
            models[folder, dtype] = loaded
        return models[folder, dtype]

    class Clock(BaseStreamer):  # type: ignore[misc]
        """Times of the prompt, which `generate` puts first, and of tokens."""

        def __init__(self) -> None:
            self.times: list[float] = []

        def put(self, _: object) -> None:
            self.times.append(time.perf_counter())

        def end(self) -> None: ...

    def options(mode: str, dtype: str, num_assistant_tokens: int) -> dict[str, Any]:
        if mode == "assisted":
            assistant = model(draft, dtype)
            config = assistant.generation_config
            config.num_assistant_tokens = num_assistant_tokens or 20  # 0: the library's choice
            config.num_assistant_tokens_schedule = "constant"
            config.assistant_confidence_threshold = 0.0 if num_assistant_tokens else 0.4
            return {"assistant_model": assistant}
        if mode == "lookup":
            return {"prompt_lookup_num_tokens": num_assistant_tokens or 10}
        return {}

    def generate(
        mode: str, dtype: str, prompts: list[list[int]], max_tokens: int, assistant_tokens: int
    ) -> tuple[list[list[int]], float, float]:
        width = max(len(p) for p in prompts)
        ids = torch.tensor([[0] * (width - len(p)) + p for p in prompts])
        mask = torch.tensor([[0] * (width - len(p)) + [1] * len(p) for p in prompts])
        clock = Clock()
        extra = options(mode, dtype, assistant_tokens)
        extra |= {"attention_mask": mask, "do_sample": False, "max_new_tokens": max_tokens}
        start = time.perf_counter()
        out = model(target, dtype).generate(ids, streamer=clock, **extra)
        return out[:, width:].tolist(), time.perf_counter() - start, clock.times[1] - start

    def handle(request: dict[str, Any]) -> dict[str, Any]:
        nonlocal forwards
        mode, dtype, prompts = request["mode"], request["dtype"], request["prompts"]
        rest = (request["max_tokens"], request["num_assistant_tokens"])
        model(target, dtype)
        options(mode, dtype, request["num_assistant_tokens"])
        forwards = 0
        completions = []
        start = time.perf_counter()
        with torch.inference_mode():
            for group in [prompts] if mode == "batched" else [[p] for p in prompts]:
                outputs, total_s, ttft_s = generate(mode, dtype, group, *rest)
                completions += [
                    {"token_ids": ids, "total_s": total_s, "ttft_s": ttft_s} for ids in outputs
                ]
        wall_s = time.perf_counter() - start
        return {"completions": completions, "wall_s": wall_s, "forwards": forwards}

    return handle


if __name__ == "__main__":
    serve(lambda: build(*sys.argv[1:]))
