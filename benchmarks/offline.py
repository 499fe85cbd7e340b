"""Compare `LLM.generate` with the engine's own loop, which it runs on.

    python -m benchmarks.offline [--model FOLDER] [--prompts 256] [--max-tokens 256]

Both run the same loaded engine in turns: the loop takes requests and counts tokens on the engine's
thread, and nothing else runs; `LLM.generate` also admits requests, detokenises and makes outputs.
Prompts are random tokens, anew for each run, so that nothing is cached. Without a folder the
weights are random, in the shape of `--shape`.
"""

from __future__ import annotations

import argparse
import random
import statistics
import sys
import tempfile
import threading
import time
from collections.abc import Sequence
from pathlib import Path

import torch

from benchmarks.inflate import SHAPES
from benchmarks.lib.gpu import random_llama
from benchmarks.lib.program import arguments, guarded, say
from outrider import LLM, SamplingParams
from outrider.engine.worker import EngineWorker
from outrider.models.resolve import resolve_model
from outrider.params import SamplingParams as EngineSampling
from outrider.params import SpeculationParams, StopParams
from outrider.types import Request, StepEvents

_FIRST_SESSION = 2**40  # the hub's own count from 1


def main(argv: Sequence[str] | None = None) -> int:
    """Print the tokens a second of both, and their ratio."""
    args = _parser().parse_args(argv)
    return guarded(lambda: _run(args))


def _run(args: argparse.Namespace) -> int:
    with tempfile.TemporaryDirectory(prefix="bench-") as scratch:
        model = args.model or _random_model(args.shape, Path(scratch))
        memory = {} if args.kv_cache_memory is None else {"kv_cache_memory": args.kv_cache_memory}
        with LLM(str(model), max_model_len=2048, max_num_seqs=args.rows, **memory) as llm:
            return _compare(llm, args)


def _compare(llm: LLM, args: argparse.Namespace) -> int:
    rng = random.Random(args.seed)
    rates: dict[str, list[float]] = {"loop": [], "LLM.generate": []}
    for number in range(args.rounds + 1):
        for name, run in (("loop", _loop), ("LLM.generate", _generate)):
            prompts = [
                rng.choices(range(8, 256), k=args.prompt_tokens) for _ in range(args.prompts)
            ]
            began = time.perf_counter()
            tokens = run(llm, prompts, args.max_tokens)
            rate = tokens / (time.perf_counter() - began)
            say(f"{name}: {rate:.0f} tokens/s" + ("" if number else " (warm-up)"))
            if number:
                rates[name].append(rate)
    loop, generate = (statistics.median(rates[name]) for name in rates)
    print(f"loop {loop:.0f} tokens/s, LLM.generate {generate:.0f} tokens/s: {generate / loop:.3f}")
    return 0


def _generate(llm: LLM, prompts: Sequence[list[int]], max_tokens: int) -> int:
    params = SamplingParams(temperature=0.0, max_tokens=max_tokens, ignore_eos=True)
    outputs = llm.generate(prompts, params, use_tqdm=False)
    return sum(len(output.outputs[0].token_ids) for output in outputs)


def _loop(llm: LLM, prompts: Sequence[list[int]], max_tokens: int) -> int:
    """Run the same requests on the engine's thread alone."""
    worker = llm._model.engine._core._engine
    assert isinstance(worker, EngineWorker)
    tokens = ended = 0
    done = threading.Event()

    def count(events: StepEvents) -> None:
        nonlocal tokens, ended
        for commit in events.commits:
            tokens += len(commit.token_ids)
            ended += commit.finish_reason is not None
        if ended == len(prompts):
            done.set()

    to_hub, worker._on_events = worker._on_events, count
    try:
        with worker.between_same_steps():
            for number, prompt in enumerate(prompts):
                worker.submit(
                    Request(
                        session_id=_FIRST_SESSION + number,
                        prompt_token_ids=tuple(prompt),
                        sampling=EngineSampling(temperature=0.0),
                        stop=StopParams(max_tokens=max_tokens, ignore_eos=True),
                        speculation=SpeculationParams(enabled=False),
                    )
                )
        done.wait()
    finally:
        worker._on_events = to_hub
    return tokens


def _random_model(shape: str, folder: Path) -> Path:
    say(f"writing a model of shape {shape} with random weights")
    device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
    model = random_llama(SHAPES[shape], "bfloat16", device)
    model.save_pretrained(folder)
    tokenizer = resolve_model(None, "target")
    for name in ("tokenizer.json", "tokenizer_config.json"):
        (folder / name).write_text((tokenizer / name).read_text())
    del model
    torch.cuda.empty_cache()
    return folder


def _parser() -> argparse.ArgumentParser:
    parser = arguments("benchmarks.offline", __doc__)
    parser.add_argument("--model", type=Path)
    parser.add_argument("--shape", choices=SHAPES, default="llama-3.1-8b")
    parser.add_argument("--prompts", type=int, default=256)
    parser.add_argument("--prompt-tokens", type=int, default=128)
    parser.add_argument("--max-tokens", type=int, default=256)
    parser.add_argument("--rows", type=int, default=256, help="max_num_seqs")
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--kv-cache-memory", type=int, metavar="MiB")
    parser.add_argument("--seed", type=int, default=0)
    return parser


if __name__ == "__main__":
    sys.exit(main())
