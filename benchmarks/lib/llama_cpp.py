"""llama.cpp as a peer: its server, asked over HTTP with token ids."""

from __future__ import annotations

import contextlib
import http.client
import json
import subprocess
import time
import urllib.request
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path

from benchmarks.lib.processes import REPO, Child, ProcessError
from benchmarks.lib.records import Completion, Run, TokenIds
from outrider.cli.ports import HOST, free_port

_START_TIMEOUT_S = 120.0
_SLOTS = 16


@dataclass(frozen=True)
class LlamaCppSystem:
    """A server of llama.cpp."""

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

    def wait_ready(self) -> None:
        """Return once /health says ok. Raises `ProcessError`."""
        deadline = time.monotonic() + _START_TIMEOUT_S
        while time.monotonic() < deadline:
            with contextlib.suppress(OSError), self._open("/health"):
                return
            time.sleep(0.2)
        raise ProcessError(f"{self.name} did not come up; see {self.child.log}")

    def _open(self, path: str, body: object = None) -> http.client.HTTPResponse:
        data = None if body is None else json.dumps(body).encode()
        headers = {"Content-Type": "application/json"}
        request = urllib.request.Request(f"http://{HOST}:{self.port}{path}", data, headers)
        response: http.client.HTTPResponse = urllib.request.urlopen(request, timeout=self.timeout_s)
        return response

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
        token_ids: list[int] = []
        ttft_s = None
        timings: dict[str, float] = {}
        start = time.perf_counter()
        try:
            with self._open("/completion", body) as response:
                for line in response:
                    if not line.startswith(b"data: "):
                        continue
                    event = json.loads(line.removeprefix(b"data: "))
                    token_ids += event["tokens"]
                    if ttft_s is None and token_ids:
                        ttft_s = time.perf_counter() - start
                    timings = event.get("timings", timings)
        except (OSError, http.client.HTTPException) as error:
            raise ProcessError(f"{self.name}: {error!r}") from error
        names = {"drafted": "draft_n", "accepted": "draft_n_accepted"}
        counts = {name: float(timings.get(theirs, 0)) for name, theirs in names.items()}
        return Completion(tuple(token_ids), time.perf_counter() - start, ttft_s, counts)


def to_gguf(python: str, source: Path, destination: Path) -> None:
    """Convert a checkpoint with `python`, which must have `gguf`. Raises `ProcessError`."""
    command = [python, "-m", "benchmarks.lib.to_gguf", str(source), str(destination)]
    done = subprocess.run(command, capture_output=True, text=True, cwd=REPO, check=False)
    if done.returncode:
        raise ProcessError(f"cannot convert {source.name} to GGUF: {done.stderr[-300:]}")


def start_llama(
    server: str,
    target: Path,
    draft: Path | None,
    num_speculative_tokens: int,
    max_model_len: int,
    timeout_s: float,
    log_dir: Path,
    children: list[Child],
) -> LlamaCppSystem:
    """Start llama.cpp's server on GGUF files, with 2 threads. Raises `ProcessError`."""
    port = free_port()
    command = [server, "--model", str(target), "--host", HOST, "--port", str(port), "--offline"]
    command += ["--threads", "2", "--parallel", str(_SLOTS)]
    command += ["--ctx-size", str(_SLOTS * max_model_len)]
    name = "llama.cpp bf16"
    if draft is not None:
        command += ["--spec-draft-model", str(draft), "--spec-type", "draft-simple"]
        command += ["--spec-draft-n-max", str(num_speculative_tokens)]
        name += " draft"
    child = Child(name.replace(" ", "-"), command, log_dir)
    children.append(child)
    system = LlamaCppSystem(name, child, port, frozenset(range(1, _SLOTS + 1)), timeout_s)
    system.wait_ready()
    return system
