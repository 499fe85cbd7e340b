"""Compare `LLM.generate` with the engine's own loop, which it runs on.

    python -m benchmarks.offline [--model FOLDER] [--prompts 256] [--vllm FOLDER|PYTHON]

Both run the same loaded engine in turns: the loop takes requests and counts tokens on the engine's
thread, and nothing else runs; `LLM.generate` also admits requests, detokenises and makes outputs.
Prompts are random tokens, anew for each run, so that nothing is cached. With `--vllm`, vLLM's `LLM`
takes as many prompts after them, without detokenisation.
"""

from __future__ import annotations

import argparse
import random
import statistics
import sys
import tempfile
import threading
import time
from collections.abc import Callable, Sequence
from functools import partial
from pathlib import Path

from benchmarks.lib.processes import Child, stopping
from benchmarks.lib.program import arguments, guarded, say
from benchmarks.lib.vllm_peer import VllmEngine, VllmPlace, VllmSystem
from outrider import LLM, SamplingParams
from outrider.engine.engine_thread import EngineThread
from outrider.models.resolve import resolve_model
from outrider.params import SamplingParams as EngineSampling
from outrider.params import SpeculationParams, StopParams
from outrider.types import Request, StepEvents

_OURS, _CONTEXT, _TIMEOUT_S = "LLM.generate", 2048, 10.0
_INTERVAL = 48  # tokens at a time, as those of whole answers on average
_FIRST_SESSION = 2**40  # the hub's own count from 1


def main(argv: Sequence[str] | None = None) -> int:
    """Print the tokens a second of both, and their ratio."""
    return guarded(_run, _parser(), argv)


def _run(args: argparse.Namespace) -> int:
    rng = random.Random(0)
    with tempfile.TemporaryDirectory(prefix="bench-") as scratch:
        memory = {} if args.kv_cache_memory is None else {"kv_cache_memory": args.kv_cache_memory}
        with LLM(str(args.model), max_model_len=_CONTEXT, max_num_seqs=args.rows, **memory) as llm:
            runs: dict[str, _Run] = {"loop": partial(_loop, llm), _OURS: partial(_generate, llm)}
            rates = _rates(args, rng, runs)
        with stopping([]) as children:
            if place := VllmPlace.find(args.vllm):
                peer = _vllm(args, place, Path(scratch), children)
                rates |= _rates(args, rng, {"vllm": peer})
    for name, rate in rates.items():
        print(f"{name}: {rate:.0f} tokens/s, {rate / rates['loop']:.3f} of the loop")
    return 0


_Run = Callable[[Sequence[list[int]], int], int]


def _rates(args: argparse.Namespace, rng: random.Random, runs: dict[str, _Run]) -> dict[str, float]:
    """Return the median tokens/s of each, measured in turns after a warm-up."""
    rates: dict[str, list[float]] = {name: [] for name in runs}
    for number in range(args.rounds + 1):
        for name, run in runs.items():
            ids = range(8, 256)
            prompts = [rng.choices(ids, k=args.prompt_tokens) for _ in range(args.prompts)]
            began = time.perf_counter()
            tokens = run(prompts, args.max_tokens)
            rate = tokens / (time.perf_counter() - began)
            say(f"{name}: {rate:.0f} tokens/s" + ("" if number else " (warm-up)"))
            if number:
                rates[name].append(rate)
    return {name: statistics.median(found) for name, found in rates.items()}


def _vllm(args: argparse.Namespace, place: VllmPlace, log_dir: Path, children: list[Child]) -> _Run:
    """Start vLLM's `LLM` with its defaults. Raises `ProcessError`."""
    options = {"skip_tokenizer_init": True}
    engine = VllmEngine(place, args.model, _CONTEXT, args.rows, options=options)
    system = VllmSystem("vllm", engine.start(log_dir, children), frozenset(), _TIMEOUT_S)

    def run(prompts: Sequence[list[int]], max_tokens: int) -> int:
        return system.run([tuple(ids) for ids in prompts], max_tokens, len(prompts)).num_tokens

    return run


def _generate(llm: LLM, prompts: Sequence[list[int]], max_tokens: int) -> int:
    params = SamplingParams(temperature=0.0, max_tokens=max_tokens, ignore_eos=True)
    outputs = llm.generate(prompts, params, use_tqdm=False)
    return sum(len(output.outputs[0].token_ids) for output in outputs)


def _loop(llm: LLM, prompts: Sequence[list[int]], max_tokens: int) -> int:
    """Run the same requests on the engine's thread alone."""
    thread = llm._model.engine._core._engine
    assert isinstance(thread, EngineThread)
    tokens = ended = 0
    done = threading.Event()

    def count(events: StepEvents) -> None:
        nonlocal tokens, ended
        for commit in events.commits:
            tokens += len(commit.token_ids)
            ended += commit.finish_reason is not None
        if ended == len(prompts):
            done.set()

    to_hub, thread._on_events = thread._on_events, count
    try:
        with thread.between_same_steps():
            for number, prompt in enumerate(prompts):
                thread.submit(
                    Request(
                        session_id=_FIRST_SESSION + number,
                        prompt_token_ids=tuple(prompt),
                        sampling=EngineSampling(temperature=0.0),
                        stop=StopParams(max_tokens=max_tokens, ignore_eos=True),
                        speculation=SpeculationParams(enabled=False),
                        stream_interval=_INTERVAL,
                    )
                )
        done.wait()
    finally:
        thread._on_events = to_hub
    return tokens


def _parser() -> argparse.ArgumentParser:
    parser = arguments("benchmarks.offline", __doc__)
    parser.add_argument("--model", type=Path, default=resolve_model("embedded", "target"))
    parser.add_argument("--prompts", type=int, default=256)
    parser.add_argument("--prompt-tokens", type=int, default=128)
    parser.add_argument("--max-tokens", type=int, default=256)
    parser.add_argument("--rows", type=int, default=256, help="max_num_seqs")
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--kv-cache-memory", type=int, metavar="MiB")
    parser.add_argument("--vllm", help="a folder of vLLM's wheels, or another Python")
    return parser


if __name__ == "__main__":
    sys.exit(main())
