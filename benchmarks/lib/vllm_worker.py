"""vLLM as a worker process in an environment of its own, without server and detokenisation."""

from __future__ import annotations

import argparse
import json
import os
import time
from collections import deque
from typing import Any

from benchmarks.lib.worker_loop import Handler, serve

_ENV = {
    "VLLM_ENABLE_V1_MULTIPROCESSING": "0",
    "VLLM_CPU_KVCACHE_SPACE": "1",  # GiB
    "VLLM_CPU_OMP_THREADS_BIND": "nobind",
    "VLLM_LOGGING_LEVEL": "WARNING",
    "VLLM_NO_USAGE_STATS": "1",
    "HF_HUB_OFFLINE": "1",
}
_COUNTERS = {
    "vllm:spec_decode_num_drafts": "rounds",
    "vllm:spec_decode_num_draft_tokens": "drafted",
    "vllm:spec_decode_num_accepted_tokens": "accepted",
}


def build(args: argparse.Namespace) -> Handler:
    """Load the engine, with the `draft_model` method if there is a draft model."""
    for name, value in _ENV.items():
        os.environ.setdefault(name, value)
    os.environ["OMP_NUM_THREADS"] = str(args.threads)
    from vllm import LLM, SamplingParams  # type: ignore[import-not-found, unused-ignore]

    speculation = {
        "method": "draft_model",
        "model": args.draft_model,
        "num_speculative_tokens": args.num_speculative_tokens,
    }
    llm: Any = LLM(
        args.model,
        dtype=args.dtype,
        max_model_len=args.max_model_len,
        max_num_seqs=args.max_num_seqs,
        enable_prefix_caching=False,  # the same prompts come again
        disable_log_stats=False,  # its counters
        **args.engine,
        **({"speculative_config": speculation} if args.draft_model else {}),
    )

    def counters() -> dict[str, int]:
        return {_COUNTERS[m.name]: int(m.value) for m in llm.get_metrics() if m.name in _COUNTERS}

    def handle(request: dict[str, Any]) -> dict[str, Any]:
        sampling = SamplingParams(
            temperature=0, max_tokens=request["max_tokens"], ignore_eos=True, detokenize=False
        )
        before = counters()
        waiting = deque({"prompt_token_ids": ids} for ids in request["prompts"])
        began: list[float] = []
        ended: dict[int, tuple[Any, float]] = {}  # by vLLM's number of the request
        start = time.perf_counter()
        while waiting or len(ended) < len(began):
            # The next request begins when one ends.
            while waiting and len(began) - len(ended) < request["concurrency"]:
                began.append(time.perf_counter())
                llm.enqueue(waiting.popleft(), sampling, use_tqdm=False)
            for output in llm.llm_engine.step():
                if output.finished:
                    ended[int(output.request_id)] = output, time.perf_counter()
        wall_s = time.perf_counter() - start
        completions = [
            {
                "token_ids": list(output.outputs[0].token_ids),
                "total_s": end - begin,
                "ttft_s": output.metrics.first_token_latency,
            }
            for begin, (_, (output, end)) in zip(began, sorted(ended.items()), strict=True)
        ]
        spent = {name: value - before.get(name, 0) for name, value in counters().items()}
        return {"completions": completions, "wall_s": wall_s, **spent}

    return handle


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--model", required=True)
    parser.add_argument("--draft-model", default="", help="none: no speculation")
    parser.add_argument("--num-speculative-tokens", type=int, required=True)
    parser.add_argument("--dtype", required=True)
    parser.add_argument("--threads", type=int, required=True)
    parser.add_argument("--max-model-len", type=int, required=True)
    parser.add_argument("--max-num-seqs", type=int, required=True)
    parser.add_argument("--engine", type=json.loads, default={}, help="JSON: more of LLM()")
    args = parser.parse_args()
    serve(lambda: build(args))


if __name__ == "__main__":
    main()
