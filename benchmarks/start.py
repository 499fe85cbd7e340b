"""Measure how long `outrider serve` takes to its first token: with cold caches, and then again.

    python -m benchmarks.start --model TARGET [--starts 2] [--vllm FOLDER] [-- FLAGS OF serve]

The first start is cold if this user has never started that model on this machine: compiled kernels
and chosen tilings lie in the user's cache folders. Time runs from the command to the first token
that streams from the HTTP API. With `--vllm`, vLLM's server is started as often, after ours, with
that Python or the wheels in that folder.
"""

from __future__ import annotations

import argparse
import http.client
import json
import sys
import tempfile
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from benchmarks.lib import report
from benchmarks.lib.gpu import gpu_name
from benchmarks.lib.processes import Child, ProcessError, python_path, stopping
from benchmarks.lib.program import arguments, guarded, say
from benchmarks.lib.vllm_peer import VllmPlace
from outrider.models.resolve import resolve_model

_POLL_S = 0.1
_BODY: dict[str, Any] = {
    "model": "default",
    "prompt": "def fibonacci(n):",
    "max_tokens": 128,
    "temperature": 0,
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
    args = parser().parse_args(argv)
    return guarded(lambda: _run(args))


@dataclass(frozen=True)
class _Server:
    name: str
    command: Sequence[str]
    env: Mapping[str, str]


def _run(args: argparse.Namespace) -> int:
    servers = [_outrider(args)]
    if place := VllmPlace.find(args.vllm):
        servers.append(_vllm(args, place))
    starts = [_start(args, server, i) for server in servers for i in range(args.starts)]
    facts = {**report.machine(), "gpu": gpu_name() or "none"}
    rows = [
        [s["server"], s["start"], f"{s['first_token_s']:.1f}", f"{s['text_s']:.2f}", s["phases"]]
        for s in starts
    ]
    columns = ["server", "start", "first token s", "the other 127 tokens s", "phases of the scorer"]
    command = report.command("benchmarks.start")
    text = "\n".join(
        [*report.head("Start to first token", command, facts), *report.table(columns, rows)]
    )
    print(text)
    report.write({"setup": {**facts, "command": command}, "starts": starts}, text, args.out)
    return 0


def _outrider(args: argparse.Namespace) -> _Server:
    command = [sys.executable, "-m", "outrider.cli", "serve", args.model]
    command += ["--port", str(args.port), "--grpc-port", str(args.port + 1), *args.flags]
    return _Server("outrider", command, python_path())


def _vllm(args: argparse.Namespace, place: VllmPlace) -> _Server:
    command = [place.python, "-m", "vllm.entrypoints.openai.api_server"]
    command += ["--model", str(resolve_model(args.model, "target")), "--port", str(args.port)]
    command += ["--host", "127.0.0.1", "--served-model-name", _BODY["model"]]
    return _Server("vllm", command, place.env)


def _start(args: argparse.Namespace, server: _Server, number: int) -> dict[str, Any]:
    """Start the server, take a text, and stop it. Raises `ProcessError`."""
    with tempfile.TemporaryDirectory(prefix="bench-") as folder, stopping([]) as children:
        began = time.perf_counter()
        children.append(Child(server.name, server.command, Path(folder), env=server.env))
        first_token_s, text_s = _first_text(args, children[0], began)
        found = [line.partition("started in ")[2].strip() for line in children[0].log_lines()]
    say(f"{server.name}, start {number + 1}: first token after {first_token_s:.1f} s")
    return {
        "server": server.name,
        "start": str(number + 1),
        "first_token_s": first_token_s,
        "text_s": text_s,
        "phases": next(filter(None, found), ""),
    }


def _first_text(args: argparse.Namespace, child: Child, began: float) -> tuple[float, float]:
    """Return the seconds to the first token, and from it to the last."""
    body = json.dumps(_BODY | {"stream": True, "ignore_eos": True})
    while time.perf_counter() - began < args.timeout and child.running:
        connection = http.client.HTTPConnection("127.0.0.1", args.port, timeout=args.timeout)
        try:
            connection.request(
                "POST", "/v1/completions", body, {"Content-Type": "application/json"}
            )
            response = connection.getresponse()
            if response.status == http.HTTPStatus.OK:
                response.readline()
                first = time.perf_counter()
                response.read()
                return first - began, time.perf_counter() - first
        except OSError:
            pass  # nothing listens yet
        finally:
            connection.close()
        time.sleep(_POLL_S)
    raise ProcessError(f"the server gave no token in {args.timeout:.0f} s{child.tail()}")


if __name__ == "__main__":
    sys.exit(main())
