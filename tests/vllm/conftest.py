"""A vLLM engine in this process, and proposers in processes of their own."""

from __future__ import annotations

import contextlib
import os
import subprocess
import sys
import time
from collections.abc import Iterator
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import pytest

import outrider.models

os.environ |= {
    "VLLM_ENABLE_V1_MULTIPROCESSING": "0",
    "VLLM_CPU_OMP_THREADS_BIND": "nobind",
    "VLLM_LOGGING_LEVEL": "WARNING",
}
TARGET = Path(outrider.models.__file__).parent / "data" / "target"
PLUGIN = {
    "method": "custom_class",
    "model": "outrider.vllm.proposer.RemoteProposer",
    "num_speculative_tokens": 4,
}


class Engine:
    """An `LLM` with the plug-in."""

    started = False

    def __init__(self, **options: Any) -> None:
        from vllm import LLM

        # The first engine of a process replaces kernels wherever they are; the next ones would look
        # for them among Numba's objects, too, and fail.
        if Engine.started and find_spec("vllm.triton_utils.dispatcher"):
            import vllm.triton_utils.dispatcher as kernels

            kernels._rebind_kernels = lambda _: None
        Engine.started = True
        settings = {
            # The adaptive policy drafts little for many rows on a CPU.
            "additional_config": {"outrider": "--port 0 --data-port 0 --speculation-policy fixed"},
            "worker_cls": "outrider.vllm.worker.CPUWorker",
            "max_num_batched_tokens": 128,  # so that prompts are computed in parts
            "kv_cache_memory_bytes": 256 << 20,
            **{"enforce_eager": True, "dtype": "float32", "max_model_len": 512, "max_num_seqs": 16},
            **options,
        }
        self.llm = LLM(str(TARGET), speculative_config=PLUGIN, **settings)
        self.info = self.llm.collective_rpc("outrider_info")[0]

    def texts(self, prompts: list[str], **params: Any) -> list[tuple[int, ...]]:
        """Return the tokens of each prompt's answer; prompt i is sampled with seed i."""
        return self.answers(prompts, [params] * len(prompts))

    def answers(self, prompts: list[str], params: list[dict[str, Any]]) -> list[tuple[int, ...]]:
        """Return the tokens of each prompt's answer by its parameters and, if none, seed i."""
        from vllm import SamplingParams

        given = [SamplingParams(**{"seed": i, **each}) for i, each in enumerate(params)]
        outputs = self.llm.generate(prompts, given, use_tqdm=False)
        assert all(output.finished for output in outputs)
        return [tuple(output.outputs[0].token_ids) for output in outputs]

    def drafted(self) -> tuple[int, int]:
        """Return how many tokens were drafted and accepted for the last requests."""
        core = self.llm.llm_engine.engine_core.engine_core
        host = core.model_executor.driver_worker.worker.model_runner.drafter._host
        ended = list(host._ended.values())
        host._ended.clear()
        return sum(s.drafted for s in ended), sum(s.accepted for s in ended)

    @contextlib.contextmanager
    def proposer(self, *flags: str) -> Iterator[subprocess.Popen[str]]:
        with proposer(self.info["grpc"], *flags) as process:
            self.wait_attached(1)
            yield process
        self.wait_attached(0)

    def wait_attached(self, number: int) -> None:
        import urllib.request

        for _ in range(200):
            page = urllib.request.urlopen(self.info["metrics"]).read().decode()
            lines = [x for x in page.splitlines() if x.startswith("outrider:proposers_attached{")]
            if sum(float(line.split()[-1]) for line in lines) == number:
                return
            time.sleep(0.1)
        raise AssertionError(f"there are not {number} proposers")


@contextlib.contextmanager
def proposer(scorer: str, *flags: str) -> Iterator[subprocess.Popen[str]]:
    """Run a proposer until the block ends."""
    command = [sys.executable, "-m", "proposer_service", "--scorer", scorer, *flags]
    process = subprocess.Popen(command, stdout=subprocess.PIPE, text=True)
    try:
        assert process.stdout is not None
        assert process.stdout.readline().startswith("ready ")
        yield process
    finally:
        process.kill()
        process.communicate()


@pytest.fixture(scope="session")
def engine() -> Engine:
    return Engine()
