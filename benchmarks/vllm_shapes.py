"""Serve a shape with vLLM's own server, then with `outrider serve --engine vllm`: what ours costs.

    python -m benchmarks.vllm_shapes --shape qwen3-30b-a3b

A shape is a config.json, for which vLLM makes up weights, and the embedded tokenizer, which gets a
word for each further id. Neither server speculates. The run that `python` belongs to has vLLM.
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
from pathlib import Path
from typing import Any, Final

from benchmarks import load
from benchmarks.inflate import SHAPES
from benchmarks.lib import report
from benchmarks.lib.processes import (
    Child,
    ProcessError,
    process_tree,
    python_path,
    stopping,
    tree_cpu_seconds,
)
from benchmarks.lib.program import arguments, guarded, say
from outrider.cli.ports import free_port
from outrider.models.resolve import resolve_model

_COMMON: Final = {"max_position_embeddings": 8192, "rms_norm_eps": 1e-6, "dtype": "bfloat16"}
_COMMON_IDS: Final = {"bos_token_id": 0, "eos_token_id": 0, "hidden_act": "silu"}
_CONFIGS: Final[dict[str, dict[str, Any]]] = {
    "qwen3-30b-a3b": {
        **{"architectures": ["Qwen3MoeForCausalLM"], "model_type": "qwen3_moe"},
        **{"hidden_size": 2048, "num_hidden_layers": 48, "vocab_size": 151936},
        **{"num_attention_heads": 32, "num_key_value_heads": 4, "head_dim": 128},
        **{"intermediate_size": 6144, "moe_intermediate_size": 768, "rope_theta": 1e6},
        **{"num_experts": 128, "num_experts_per_tok": 8, "norm_topk_prob": True},
        **{"decoder_sparse_step": 1, "mlp_only_layers": [], "tie_word_embeddings": False},
    },
    "gpt-oss-20b": {
        **{"architectures": ["GptOssForCausalLM"], "model_type": "gpt_oss"},
        **{"hidden_size": 2880, "num_hidden_layers": 24, "vocab_size": 201088},
        **{"num_attention_heads": 64, "num_key_value_heads": 8, "head_dim": 64},
        **{"intermediate_size": 2880, "num_local_experts": 32, "num_experts_per_tok": 4},
        **{"sliding_window": 128, "swiglu_limit": 7.0, "attention_bias": True},
        **{"layer_types": ["sliding_attention", "full_attention"] * 12},
        **{"rope_theta": 150000, "tie_word_embeddings": False},
        "quantization_config": {"quant_method": "mxfp4"},
    },
    "llama-3.1-8b-fp8": {
        **{"architectures": ["LlamaForCausalLM"], "model_type": "llama"},
        **SHAPES["llama-3.1-8b"],
        **{"rope_theta": 500000.0},
        "quantization_config": {"quant_method": "fp8", "activation_scheme": "dynamic"},
    },
}
_REQUEST: Final = {"ignore_eos": True, "temperature": 0}
_BASE, _OURS = "vllm", "outrider"


def parser() -> argparse.ArgumentParser:
    p = arguments("benchmarks.vllm_shapes", __doc__)
    p.add_argument("--shape", choices=[*_CONFIGS], required=True)
    p.add_argument("--set", type=json.loads, default={}, metavar="JSON", help="of config.json")
    p.add_argument("--concurrency", type=int, nargs="+", default=[1, 32, 128])
    p.add_argument("--waves", type=int, default=4, help="requests for each in flight, at least 8")
    p.add_argument("--prompt-words", type=int, default=128)
    p.add_argument("--max-tokens", type=int, default=256)
    p.add_argument("--start-timeout", type=float, default=240.0, help="seconds, of each server")
    p.add_argument("--flags", type=shlex.split, default=[], help="of vLLM in both, quoted")
    p.add_argument("--device", choices=("cuda", "cpu"), default="cuda")
    p.add_argument("--out", type=Path, help="writes this name with .json and .md")
    return p


def main(argv: Sequence[str] | None = None) -> int:
    """Return 0 if it measured, 2 if it could not run."""
    args = parser().parse_args(argv)
    return guarded(lambda: _run(args))


def write_shape(folder: Path, config: dict[str, Any]) -> None:
    """Write a model's folder without weights, whose tokenizer knows every id as a word."""
    source = resolve_model("embedded", "target")
    (folder / "config.json").write_text(json.dumps({**_COMMON, **_COMMON_IDS, **config}))
    tokenizer = json.loads((source / "tokenizer.json").read_text())
    vocab = tokenizer["model"]["vocab"]
    taken = {*vocab.values(), *(each["id"] for each in tokenizer["added_tokens"])}
    vocab |= {f"w{i}": i for i in range(config["vocab_size"]) if i not in taken}
    (folder / "tokenizer.json").write_text(json.dumps(tokenizer))
    for name in ("tokenizer_config.json", "chat_template.jinja"):
        (folder / name).write_bytes((source / name).read_bytes())


def _run(args: argparse.Namespace) -> int:
    found: dict[str, dict[int, dict[str, Any]]] = {}
    with tempfile.TemporaryDirectory(prefix="bench-") as name:
        folder = Path(name, args.shape)
        folder.mkdir()
        write_shape(folder, _CONFIGS[args.shape] | args.set)
        for system in (_BASE, _OURS):
            with _server(system, args, folder) as (child, url):
                found[system] = {n: _load(args, child, url, n) for n in args.concurrency}
    rows = []
    for n in args.concurrency:
        base, ours = found[_BASE][n], found[_OURS][n]
        ratio = {key: ours[key] / base[key] for key in ("tokens_per_s", "tpot_p50_ms")}
        ours["ratio"] = ratio
        cells = [f"{n}", f"{base['tokens_per_s']:.0f}", f"{ours['tokens_per_s']:.0f}"]
        cells += [f"{ratio['tokens_per_s']:.3f}"]
        cells += [
            f"{each[key]:.2f}"
            for key in ("tpot_p50_ms", "ttft_p50_ms", "front_us_per_token")
            for each in (base, ours)
        ]
        rows.append([*cells, f"{base['failed']}, {ours['failed']}"])
    heads = ["in flight", "vLLM tok/s", "ours", "ratio", "vLLM ms per token", "ours"]
    heads += ["vLLM TTFT ms", "ours", "vLLM servers' CPU us per token", "ours", "failed"]
    told = [f"# {args.shape}, --engine vllm beside vLLM's server", "", *report.table(heads, rows)]
    print("\n".join(told))
    if args.out is not None:
        setup = {key: str(value) for key, value in vars(args).items()} | report.machine()
        report.write({"setup": setup, "results": found}, "\n".join([*told, ""]), args.out)
    return 0


@contextlib.contextmanager
def _server(name: str, args: argparse.Namespace, folder: Path) -> Iterator[tuple[Child, str]]:
    """Run a server until the block ends. Raises `ProcessError`."""
    port = free_port()
    limits = ["--max-model-len", "4096", "--max-num-seqs", f"{max(args.concurrency)}"]
    limits += ["--no-enable-prefix-caching", "--dtype", "bfloat16", "--port", f"{port}"]
    theirs = ["--load-format", "dummy", *args.flags]
    command = [sys.executable, "-m", "vllm.entrypoints.openai.api_server", "--model", str(folder)]
    command += ["--served-model-name", "default", *limits, *theirs]
    if name == _OURS:
        command = [sys.executable, "-m", "outrider.cli", "serve", str(folder), "--engine", "vllm"]
        command += ["--method", "none", "--device", args.device, *limits]
        command += ["--served-model-name", "default", "--", *theirs]
    with tempfile.TemporaryDirectory(prefix="bench-") as logs, stopping([]) as children:
        say(f"starting {name}")
        began = time.monotonic()
        child = Child(name, command, Path(logs), env=python_path())
        children.append(child)
        url = f"http://127.0.0.1:{port}"
        while not _answers(f"{url}/health"):
            if not child.running:
                raise ProcessError(f"{name} ended{child.tail()}")
            if time.monotonic() - began > args.start_timeout:
                raise ProcessError(f"{name} was not ready in time{child.tail()}")
            time.sleep(0.5)
        say(f"{name} is ready after {time.monotonic() - began:.0f} s")
        yield child, url


def _answers(url: str) -> bool:
    """Return whether a server is ready; a gateway is there before its scorer."""
    with contextlib.suppress(OSError), urllib.request.urlopen(url, timeout=5) as response:
        body = response.read()
        return not body or json.loads(body)["scorers_serving"] > 0
    return False


def _load(args: argparse.Namespace, child: Child, url: str, in_flight: int) -> dict[str, Any]:
    """Warm up with one wave and measure the others, all of a fixed length."""
    for requests in (in_flight, max(8, args.waves * in_flight)):
        words = ["--url", f"{url}/v1", "--in-flight", in_flight, "--requests", requests]
        words += ["--prompt-words", args.prompt_words, "--max-tokens", args.max_tokens]
        words += ["--seed", requests, "--body", json.dumps(_REQUEST), "--seconds", 60]
        pids = process_tree(child.pid)
        front = [p for p in pids if not Path(f"/proc/{p}/comm").read_text().startswith("VLLM::")]
        before = tree_cpu_seconds(front)
        found = load.measure(load.parser().parse_args(list(map(str, words))))
        front_s = tree_cpu_seconds(front) - before
    if not found["answered"]:
        raise ProcessError(f"no request was answered: {found['failures']}{child.tail()}")
    say(f"{child.name}, {in_flight} in flight: {found['tokens_per_s']:.0f} tokens/s")
    return {
        "tokens_per_s": found["tokens_per_s"],
        "tpot_p50_ms": found["tpot_ms"]["p50"],
        "ttft_p50_ms": found["ttft_ms"]["p50"],
        "front_us_per_token": front_s * 1e6 / (found["tokens_per_s"] * found["seconds"]),
        "failed": sum(found["failures"].values()),
        "generator_cores": found["generator_cores"],
    }


if __name__ == "__main__":
    sys.exit(main())
