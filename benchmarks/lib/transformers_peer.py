"""`transformers` as a worker process: plain, assisted, prompt-lookup and batched `generate`."""

from __future__ import annotations

import argparse
import os
import time
from typing import Any

from benchmarks.lib.worker_loop import Handler, serve


def build(target: str, draft: str, threads: int) -> Handler:
    """Load the models on demand, once per dtype, and answers `run` requests."""
    os.environ["OMP_NUM_THREADS"] = str(threads)
    import torch
    from transformers import AutoModelForCausalLM
    from transformers.generation.streamers import BaseStreamer

    torch.set_num_threads(threads)
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
        """When the first token came. `generate` puts the prompt first."""

        def __init__(self) -> None:
            self.puts = 0
            self.first = 0.0

        def put(self, _: object) -> None:
            self.puts += 1
            if self.puts == 2:
                self.first = time.perf_counter()

        def end(self) -> None: ...

    def options(mode: str, dtype: str, num_assistant_tokens: int) -> dict[str, Any]:
        if mode == "assisted":
            assistant = model(draft, dtype)
            config = assistant.generation_config
            # 0: the library's own heuristics.
            if num_assistant_tokens:
                config.num_assistant_tokens = num_assistant_tokens
                config.num_assistant_tokens_schedule = "constant"
                config.assistant_confidence_threshold = 0.0
            else:
                config.num_assistant_tokens = 20
                config.num_assistant_tokens_schedule = "constant"
                config.assistant_confidence_threshold = 0.4
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
        start = time.perf_counter()
        out = model(target, dtype).generate(
            ids,
            attention_mask=mask,
            do_sample=False,
            max_new_tokens=max_tokens,
            streamer=clock,
            **extra,
        )
        return out[:, width:].tolist(), time.perf_counter() - start, clock.first - start

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


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--model", required=True)
    parser.add_argument("--draft-model", required=True)
    parser.add_argument("--threads", type=int, required=True)
    args = parser.parse_args()
    serve(lambda: build(args.model, args.draft_model, args.threads))


if __name__ == "__main__":
    main()
