"""Serve a shape with vLLM's own server, then with `outrider serve --engine vllm`.

    python -m benchmarks.vllm_shapes --shape qwen3-30b-a3b

A shape is a config.json, for which vLLM makes up weights, and the embedded tokenizer with a word
for each further id. Neither server speculates. This Python has vLLM. Each cell is the median of
some loads: vLLM compiles kernels when a number of tokens comes first, which stops it for seconds.
Results are written after each cell; where one server fails, the other is measured.
"""

from __future__ import annotations

import argparse
import contextlib
import json
import shlex
import sys
import tempfile
import time
import urllib.request
from collections.abc import Iterator, Sequence
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
_IDS = {"bos_token_id": 0, "eos_token_id": 0}
_BODY = json.dumps({"ignore_eos": True, "temperature": 0})
_TIMES = ("ms per token", "TTFT ms", "us per token")
_HEAD = ["in flight", "server", "tok/s", "least", "most", "ratio", *_TIMES]


def parser() -> argparse.ArgumentParser:
    p = arguments("benchmarks.vllm_shapes", __doc__)
    p.add_argument("--shape", choices=[*_SHAPES], required=True)
    p.add_argument("--set", type=json.loads, default={}, metavar="JSON", help="of config.json")
    p.add_argument("--concurrency", type=int, nargs="+", default=[1, 32, 128])
    p.add_argument("--waves", type=int, default=2, help="requests for each in flight; 8 at least")
    p.add_argument("--rounds", type=int, default=5, help="loads of each size")
    p.add_argument("--prompt-words", type=int, default=128)
    p.add_argument("--max-tokens", type=int, default=256)
    p.add_argument("--start-timeout", type=float, default=240.0, help="seconds, of each server")
    p.add_argument("--flags", type=shlex.split, default=[], help="of vLLM in both, quoted")
    p.add_argument("--device", choices=("cuda", "cpu"), default="cuda")
    p.add_argument("--out", type=Path, help="writes this name with .json and .md")
    return p


def main(argv: Sequence[str] | None = None) -> int:
    """Return 0 if it measured, 2 if it could not run."""
    return guarded(_run, parser(), argv)


def _run(args: argparse.Namespace) -> int:
    found: dict[tuple[int, str], dict[str, Any]] = {}
    failed: list[str] = []
    with tempfile.TemporaryDirectory(prefix="bench-") as name:
        _write(Path(name), {**_COMMON, **_IDS, **_SHAPES[args.shape], **args.set})
        for server in ("vllm", "outrider"):
            try:
                with _server(server, args, name) as (child, url):
                    for n in args.concurrency:
                        found[n, server] = _load(args, child, url, n)
                        _report(args, found, failed)
            except ProcessError as error:
                failed.append(f"{server} failed: {error}")
                _report(args, found, failed)
    return 2 if failed else 0


def _report(
    args: argparse.Namespace, found: dict[tuple[int, str], dict[str, Any]], failed: list[str]
) -> None:
    """Print a table of what was measured so far, and write it."""
    rows = []
    for n, server in sorted(found):
        cell = found[n, server]
        base = found.get((n, "vllm"), {}).get("tokens_per_s")
        cell["ratio"] = base and cell["tokens_per_s"] / base
        keys = {"tokens_per_s": 0, "least": 0, "most": 0, "ratio": 3}
        keys |= {"ms_per_token": 2, "ttft_ms": 1, "us_per_token": 1}
        rows.append([f"{n}", server, *(report.number(cell[k], d) for k, d in keys.items())])
    results = [{"in_flight": n, "server": server, **cell} for (n, server), cell in found.items()]
    lines = [*report.table(_HEAD, rows), *failed]
    report.publish(args.shape, "benchmarks.vllm_shapes", lines, results, args.out, gpu=gpu_name())


def _write(folder: Path, config: dict[str, Any]) -> None:
    source = resolve_model("embedded", "target")
    (folder / "config.json").write_text(json.dumps(config))
    tokenizer = json.loads((source / "tokenizer.json").read_text())
    vocab = tokenizer["model"]["vocab"]
    taken = {*vocab.values(), *(each["id"] for each in tokenizer["added_tokens"])}
    vocab |= {f"w{i}": i for i in range(config["vocab_size"]) if i not in taken}
    (folder / "tokenizer.json").write_text(json.dumps(tokenizer))
    settings = "tokenizer_config.json"
    (folder / settings).write_bytes((source / settings).read_bytes())


@contextlib.contextmanager
def _server(name: str, args: argparse.Namespace, folder: str) -> Iterator[tuple[Child, str]]:
    """Run a server until the block ends. Raises `ProcessError`."""
    began, reserved = time.monotonic(), bind(HOST, 0)
    port = reserved.getsockname()[1]
    limits = f"--max-model-len 4096 --max-num-seqs {max(args.concurrency)} --dtype bfloat16"
    both = [*limits.split(), "--no-enable-prefix-caching", "--port", f"{port}"]
    both += ["--served-model-name", "default"]
    theirs = ["--load-format", "dummy", *args.flags]
    command = ["vllm.entrypoints.openai.api_server", "--model", folder, *both, *theirs]
    if name == "outrider":
        command = ["outrider.cli", "serve", folder, "--engine", "vllm", "--method", "none"]
        command += ["--device", args.device, "--grpc-port", "0", *both, "--", *theirs]
    with tempfile.TemporaryDirectory(prefix="bench-") as logs, stopping([]) as children:
        say(f"starting {name}")
        child = module_child(name, command, Path(logs), children)
        while not _answers(f"http://127.0.0.1:{port}/health"):
            if not child.running or time.monotonic() - began > args.start_timeout:
                raise ProcessError(f"{name} did not start{child.tail()}")
            time.sleep(0.5)
        say(f"{name} is ready after {time.monotonic() - began:.0f} s")
        yield child, f"http://127.0.0.1:{port}/v1"


def _answers(url: str) -> bool:
    """Return whether a server is ready; a gateway answers before its scorer is there."""
    with contextlib.suppress(OSError), urllib.request.urlopen(url, timeout=5) as response:
        body = response.read()
        return not body or json.loads(body)["scorers_serving"] > 0
    return False


def _load(args: argparse.Namespace, child: Child, url: str, in_flight: int) -> dict[str, Any]:
    """Warm up with one wave, and return the load of median speed."""
    _one_load(args, child, url, in_flight, in_flight)
    requests = max(8, args.waves * in_flight)
    cells = [_one_load(args, child, url, in_flight, requests) for _ in range(args.rounds)]
    cells.sort(key=itemgetter("tokens_per_s"))
    speeds = [*map(itemgetter("tokens_per_s"), cells)]
    say(f"{child.name}, {in_flight} in flight: {', '.join(map('{:.0f}'.format, speeds))} tokens/s")
    return {**cells[len(cells) // 2], "least": speeds[0], "most": speeds[-1]}


def _one_load(
    args: argparse.Namespace, child: Child, url: str, in_flight: int, requests: int
) -> dict[str, Any]:
    """Return what one load measured; CPU time is of all but vLLM's engine."""
    words = f"--url {url} --in-flight {in_flight} --requests {requests} --seconds 60 --timeout 60"
    words += f" --prompt-words {args.prompt_words} --max-tokens {args.max_tokens}"
    pids = process_tree(child.pid)
    fronts = [p for p in pids if not Path(f"/proc/{p}/comm").read_text().startswith("VLLM::")]
    before = cpu_seconds(fronts)
    found = load.measure(load.parser().parse_args([*words.split(), "--body", _BODY]))
    used = cpu_seconds(fronts) - before
    if not found["answered"] or found["failures"]:
        raise ProcessError(f"{child.name}: requests failed: {found['failures']}{child.tail()}")
    us = used * 1e6 / (found["tokens_per_s"] * found["seconds"])
    times = {"ms_per_token": found["tpot_ms"]["p50"], "ttft_ms": found["ttft_ms"]["p50"]}
    return {"tokens_per_s": found["tokens_per_s"], **times, "us_per_token": us}


if __name__ == "__main__":
    sys.exit(main())
