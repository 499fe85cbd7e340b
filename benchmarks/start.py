"""Measure how long `outrider serve` takes to its first token: with cold caches, and then again.

    python -m benchmarks.start --model TARGET [--starts 2] [--vllm FOLDER] [-- FLAGS OF serve]

The first start is cold if this user has never started that model on this machine: compiled kernels
and chosen tilings lie in the user's cache folders. Time runs from the command to the first token
that streams from the HTTP API. With `--vllm`, vLLM's server is started as often, after ours, with
that Python or the wheels in that folder. Both keep the bytecode of what they import, as installed
packages have it.
"""

from __future__ import annotations

import argparse
import contextlib
import json
import sys
import tempfile
import time
import urllib.request
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from benchmarks.lib import report
from benchmarks.lib.gpu import gpu_name
from benchmarks.lib.processes import Child, ProcessError, python_path, stopping
from benchmarks.lib.program import arguments, guarded, say
from benchmarks.lib.vllm_peer import VllmPlace
from outrider.models.resolve import resolve_model

_POLL_S = 0.1
_BYTECODE = {"PYTHONDONTWRITEBYTECODE": ""}  # off
_BODY: dict[str, Any] = {
    **{"model": "default", "prompt": "def fibonacci(n):", "max_tokens": 128, "temperature": 0},
    **{"ignore_eos": True, "stream": True},
}


def parser() -> argparse.ArgumentParser:
    p = arguments("benchmarks.start", __doc__)
    p.add_argument("--model", default="embedded", help="a folder or a Hugging Face id")
    p.add_argument("--starts", type=int, default=2)
    p.add_argument("--port", type=int, default=8123)
    p.add_argument("--timeout", type=float, default=300.0, help="seconds, of each start")
    p.add_argument("--vllm", help="a folder of vLLM's wheels, or another Python")
    p.add_argument("--out", type=Path, default=Path("benchmarks/results/start"))
    p.add_argument("flags", nargs="*", help="of `outrider serve`, after --")
    return p


def main(argv: Sequence[str] | None = None) -> int:
    """Return 0 if it measured, 2 if a start did not answer."""
    return guarded(_run, parser(), argv)


def _run(args: argparse.Namespace) -> int:
    flags = ["--port", str(args.port)]
    ours = [sys.executable, "-m", "outrider.cli", "serve", args.model, *flags]
    ours += ["--grpc-port", str(args.port + 1), *args.flags]
    servers = {"outrider": (ours, python_path())}
    if place := VllmPlace.find(args.vllm):
        target = str(resolve_model(args.model, "target"))
        command = [place.python, "-m", "vllm.entrypoints.openai.api_server", "--model", target]
        command += [*flags, "--host", "127.0.0.1", "--served-model-name", _BODY["model"]]
        servers["vllm"] = (command, place.env)
    starts = [
        _start(args, name, number, command, env | _BYTECODE)
        for name, (command, env) in servers.items()
        for number in range(1, args.starts + 1)
    ]
    rows = [
        [s["server"], s["start"], f"{s['first_token_s']:.1f}", f"{s['text_s']:.2f}", s["phases"]]
        for s in starts
    ]
    columns = ["server", "start", "first token s", "the other 127 tokens s", "phases of the scorer"]
    table = report.table(columns, rows)
    title, module = "Start to first token", "benchmarks.start"
    report.publish(title, module, table, starts, args.out, gpu=gpu_name())
    return 0


def _start(
    args: argparse.Namespace, name: str, number: int, command: list[str], env: dict[str, str]
) -> dict[str, Any]:
    """Start the server, take a text, and stop it. Raises `ProcessError`."""
    with tempfile.TemporaryDirectory(prefix="bench-") as folder, stopping([]) as children:
        began = time.perf_counter()
        children.append(Child(name, command, Path(folder), env=env))
        first_token_s, text_s = _first_text(args, children[0], began)
        found = [line.partition("started in ")[2].strip() for line in children[0].log_lines()]
    say(f"{name}, start {number}: first token after {first_token_s:.1f} s")
    times = {"first_token_s": first_token_s, "text_s": text_s}
    phases = next(filter(None, found), "")
    return {"server": name, "start": str(number), **times, "phases": phases}


def _first_text(args: argparse.Namespace, child: Child, began: float) -> tuple[float, float]:
    """Return the seconds to the first token, and from it to the last."""
    url = f"http://127.0.0.1:{args.port}/v1/completions"
    headers = {"Content-Type": "application/json"}
    request = urllib.request.Request(url, json.dumps(_BODY).encode(), headers)
    while time.perf_counter() - began < args.timeout and child.running:
        with (
            contextlib.suppress(OSError),  # nothing listens yet, or it does not serve yet
            urllib.request.urlopen(request, timeout=args.timeout) as response,
        ):
            response.readline()
            first = time.perf_counter()
            response.read()
            return first - began, time.perf_counter() - first
        time.sleep(_POLL_S)
    raise ProcessError(f"the server gave no token in {args.timeout:.0f} s{child.tail()}")


if __name__ == "__main__":
    sys.exit(main())
