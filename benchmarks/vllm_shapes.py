"""Serve a shape with vLLM's own server, then with `outrider serve --engine vllm`.

    python -m benchmarks.vllm_shapes --shape qwen3-30b-a3b

A shape is a config.json, for which vLLM makes up weights, and the embedded tokenizer with a word
for each further id. Neither server speculates. This Python has vLLM. Memory must hold both servers,
which are loaded in turns. Each cell is the median of some loads: vLLM compiles kernels when a
number of tokens comes first, which stops it for seconds. Results are written after each turn; where
one server fails, the other is measured.
"""

from __future__ import annotations

import argparse
import contextlib
import json
import shlex
import shutil
import socket
import sys
import tempfile
import time
import urllib.request
from collections import defaultdict
from collections.abc import Iterator, Sequence
from itertools import product
from operator import itemgetter
from pathlib import Path
from typing import Any

from benchmarks import load
from benchmarks.lib import report
from benchmarks.lib.gpu import gpu_name
from benchmarks.lib.processes import (
    Child,
    ProcessError,
    cpu_seconds,
    module_child,
    process_tree,
    stopping,
)
from benchmarks.lib.program import arguments, guarded, say
from gateway.ports import bind
from outrider.cli.ports import HOST
from outrider.models.resolve import resolve_model

_SHAPES: dict[str, dict[str, Any]] = json.loads(
    Path(__file__).with_name("shapes.json").read_text()
)["vllm"]
_COMMON = {"max_position_embeddings": 8192, "dtype": "bfloat16", "tie_word_embeddings": False}
_COMMON |= {"bos_token_id": 0, "eos_token_id": 0}
_BODY = json.dumps({"ignore_eos": True, "temperature": 0})
_COLUMNS = {"tok/s": ("tokens_per_s", 0), "least": ("least", 0), "most": ("most", 0)}
_COLUMNS |= {"ratio": ("ratio", 3), "ms per token": ("ms_per_token", 2)}
_COLUMNS |= {"TTFT ms": ("ttft_ms", 1), "us per token": ("us_per_token", 1)}
_MEMORY = f"--gpu-memory-utilization 0.1 --kv-cache-memory-bytes {5 << 30}"  # of each
_NAMES = ("vllm", "outrider")
_Server = tuple[Child, str]  # and its address
_Loads = dict[tuple[int, str], list[dict[str, Any]]]  # by requests in flight and server


def parser() -> argparse.ArgumentParser:
    p = arguments("benchmarks.vllm_shapes", __doc__)
    p.add_argument("--shape", choices=[*_SHAPES], required=True)
    p.add_argument("--set", type=json.loads, default={}, metavar="JSON", help="of config.json")
    p.add_argument("--concurrency", type=int, nargs="+", default=[1, 32, 128])
    p.add_argument("--waves", type=int, default=2, help="requests for each in flight; 8 at least")
    p.add_argument("--rounds", type=int, default=5, help="loads of each size")
    p.add_argument("--prompt-words", type=int, default=128)
    p.add_argument("--max-tokens", type=int, default=256)
    p.add_argument("--start-timeout", type=float, default=300.0, help="seconds")
    p.add_argument("--flags", type=shlex.split, default=[], help="of vLLM in both, quoted")
    p.add_argument("--device", choices=("cuda", "cpu"), default="cuda")
    p.add_argument("--out", type=Path, help="writes this name with .json and .md")
    return p


def main(argv: Sequence[str] | None = None) -> int:
    """Return 0 if it measured, 2 if it could not run."""
    return guarded(_run, parser(), argv)


def _run(args: argparse.Namespace) -> int:
    found: _Loads = defaultdict(list)
    failed: list[str] = []
    deadline = time.monotonic() + args.start_timeout
    with tempfile.TemporaryDirectory(prefix="bench-") as folder, stopping([]) as children:
        _write(Path(folder), {**_COMMON, **_SHAPES[args.shape], **args.set})
        ports = [bind(HOST, 0) for _ in _NAMES]  # reserved while the servers run
        servers = [
            _start(*each, args, Path(folder), children) for each in zip(_NAMES, ports, strict=True)
        ]
        for server in [*servers]:
            with _dropping(server, servers, failed):
                _wait_ready(*server, deadline)
        for n, turn in product(args.concurrency, range(args.rounds + 1)):
            for server in servers[:: -1 if turn % 2 else 1]:
                with _dropping(server, servers, failed):
                    load = _load(args, *server, n, args.waves if turn else 1)
                    if turn:  # the first warms up
                        found[n, server[0].name].append(load)
            if turn or not servers:
                _report(args, found, failed)
            if not servers:
                break
    return 2 if failed else 0


@contextlib.contextmanager
def _dropping(server: _Server, servers: list[_Server], failed: list[str]) -> Iterator[None]:
    """Stop a server about which the block raises `ProcessError`, and go on with the others."""
    try:
        yield
    except ProcessError as error:
        child, _ = server
        failed.append(f"{child.name} failed: {error}")
        servers.remove(server)
        child.stop()


def _report(args: argparse.Namespace, found: _Loads, failed: Sequence[str]) -> None:
    """Print a table of what was measured so far, and write it."""
    cells: dict[tuple[int, str], dict[str, Any]] = {}
    for where, loads in found.items():
        by_speed = sorted(loads, key=itemgetter("tokens_per_s"))
        least, most = (by_speed[i]["tokens_per_s"] for i in (0, -1))
        cells[where] = {**by_speed[len(loads) // 2], "least": least, "most": most}
    rows = []
    for n, server in sorted(cells):
        cell = cells[n, server]
        base = cells.get((n, "vllm"), {}).get("tokens_per_s")
        cell["ratio"] = base and cell["tokens_per_s"] / base
        rows.append([f"{n}", server, *(report.number(cell[k], d) for k, d in _COLUMNS.values())])
    results = [{"in_flight": n, "server": server, **cell} for (n, server), cell in cells.items()]
    lines = [*report.table(["in flight", "server", *_COLUMNS], rows), *failed]
    report.publish(args.shape, "benchmarks.vllm_shapes", lines, results, args.out, gpu=gpu_name())


def _write(folder: Path, config: dict[str, Any]) -> None:
    source = resolve_model("embedded", "target")
    (folder / "config.json").write_text(json.dumps(config))
    tokenizer = json.loads((source / "tokenizer.json").read_text())
    vocab = tokenizer["model"]["vocab"]
    taken = {*vocab.values(), *(each["id"] for each in tokenizer["added_tokens"])}
    vocab |= {f"w{i}": i for i in range(config["vocab_size"]) if i not in taken}
    (folder / "tokenizer.json").write_text(json.dumps(tokenizer))
    shutil.copy(source / "tokenizer_config.json", folder)


def _start(
    name: str, bound: socket.socket, args: argparse.Namespace, folder: Path, children: list[Child]
) -> _Server:
    port = bound.getsockname()[1]
    both = f"--max-model-len 4096 --max-num-seqs {max(args.concurrency)} --dtype bfloat16"
    both += f" --no-enable-prefix-caching --port {port} --served-model-name default"
    theirs = ["--load-format", "dummy", *_MEMORY.split(), *args.flags]
    command = ["vllm.entrypoints.openai.api_server", "--model", f"{folder}", *both.split(), *theirs]
    if name == "outrider":
        command = ["outrider.cli", "serve", f"{folder}", "--engine", "vllm", "--method", "none"]
        command += ["--device", args.device, "--grpc-port", "0", *both.split(), "--", *theirs]
    return module_child(name, command, folder, children), f"http://127.0.0.1:{port}"


def _wait_ready(child: Child, url: str, deadline: float) -> None:
    """Raise `ProcessError` if it ends, or does not answer in time."""
    while not _answers(f"{url}/health"):
        if not child.running or time.monotonic() > deadline:
            raise ProcessError(f"it did not start{child.tail()}")
        time.sleep(0.5)


def _answers(url: str) -> bool:
    """Return whether a server is ready; a gateway answers before its scorer is there."""
    with contextlib.suppress(OSError), urllib.request.urlopen(url, timeout=5) as response:
        body = response.read()
        return not body or json.loads(body)["scorers_serving"] > 0
    return False


def _load(
    args: argparse.Namespace, child: Child, url: str, in_flight: int, waves: int
) -> dict[str, Any]:
    """Return what one load measured; CPU time is of all but vLLM's engine."""
    words = f"--url {url}/v1 --in-flight {in_flight} --requests {max(8, waves * in_flight)} "
    words += f"--prompt-words {args.prompt_words} --max-tokens {args.max_tokens} "
    words += "--seconds 60 --timeout 60"
    pids = process_tree(child.pid)
    fronts = [p for p in pids if not Path(f"/proc/{p}/comm").read_text().startswith("VLLM::")]
    before = cpu_seconds(fronts)
    found = load.measure(load.parser().parse_args([*words.split(), "--body", _BODY]))
    if not found["answered"] or found["failures"]:
        raise ProcessError(f"requests failed: {found['failures']}{child.tail()}")
    say(f"{child.name}, {in_flight} in flight: {found['tokens_per_s']:.0f} tokens/s")
    us = (cpu_seconds(fronts) - before) * 1e6 / (found["tokens_per_s"] * found["seconds"])
    times = {"ms_per_token": found["tpot_ms"]["p50"], "ttft_ms": found["ttft_ms"]["p50"]}
    return {"tokens_per_s": found["tokens_per_s"], **times, "us_per_token": us}


if __name__ == "__main__":
    sys.exit(main())
