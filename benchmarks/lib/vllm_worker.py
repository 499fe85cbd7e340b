"""vLLM as a worker process in an environment of its own, without server and detokenisation.

python -m benchmarks.lib.vllm_worker SETTINGS    # arguments of `LLM` as JSON
"""

from __future__ import annotations

import json
import os
import sys
import time
from collections import deque
from importlib import import_module
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


def build(settings: dict[str, Any]) -> Handler:
    for name, value in _ENV.items():
        os.environ.setdefault(name, value)
    from vllm import LLM, SamplingParams  # type: ignore[import-not-found, unused-ignore]

    if settings.get("async_scheduling"):
        import_module("outrider.vllm.ahead_config").allow()
    # The same prompts come again, and `disable_log_stats` would take the counters away.
    llm: Any = LLM(enable_prefix_caching=False, disable_log_stats=False, **settings)

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


if __name__ == "__main__":
    serve(lambda: build(json.loads(sys.argv[1])))
