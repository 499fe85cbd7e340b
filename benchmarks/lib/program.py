"""Exit codes and progress lines of the programs that start other processes."""

from __future__ import annotations

import argparse
import signal
import sys
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import NoReturn

from benchmarks.lib.processes import ProcessError
from benchmarks.lib.prompts import PromptsError
from outrider.errors import OutriderError


def guarded(
    measure: Callable[[argparse.Namespace], int],
    parser: argparse.ArgumentParser,
    argv: Sequence[str] | None = None,
) -> int:
    """Return the exit code of `measure` with these arguments, or 2 if it could not run.

    The reason is printed to stderr. SIGTERM unwinds `measure`, so that children are stopped.
    """
    args = parser.parse_args(argv)
    signal.signal(signal.SIGTERM, _end)
    try:
        return measure(args)
    except (ProcessError, OutriderError, PromptsError) as error:
        print(f"benchmark: {error}", file=sys.stderr)
        return 2


def arguments(module: str, doc: str | None) -> argparse.ArgumentParser:
    """Return a parser for `python -m module` whose help shows the module's docstring."""
    return argparse.ArgumentParser(
        prog=f"python -m {module}",
        description=doc,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )


def measuring_arguments(module: str, doc: str | None) -> argparse.ArgumentParser:
    """Return `arguments` with the flags of all programs that give prompts to several systems."""
    p = arguments(module, doc)
    p.add_argument("--model", default="embedded", help="target: a folder or a Hugging Face id")
    p.add_argument("--prompts", type=Path, help="JSON lines; default: the held-out prompts")
    p.add_argument("--max-tokens", type=int, default=128, help="output tokens of each request")
    p.add_argument("--max-prompt-tokens", type=int, default=256, help="the last ones of each")
    p.add_argument("--rounds", type=int, default=5, help="interleaved repetitions")
    p.add_argument("--request-timeout", type=float, default=120.0, help="seconds, per request")
    out = Path("benchmarks", "results", module.rpartition(".")[2])
    p.add_argument("--out", type=Path, default=out, help="without suffix")
    return p


def add_pair_flags(p: argparse.ArgumentParser) -> None:
    """Add the flags of programs that measure a target and its draft model."""
    p.add_argument("--draft-model", default="embedded", help="with the target's tokenizer")
    p.add_argument("--num-speculative-tokens", type=int, default=4, help="K, of all systems")


def add_vllm_flags(p: argparse.ArgumentParser) -> None:
    """Add the flags of programs that measure a pair under load, beside vLLM on a GPU."""
    add_pair_flags(p)
    p.add_argument("--waves", type=int, default=3, help="requests of a round for each in flight")
    p.add_argument("--vllm", help="a folder of vLLM's wheels for this Python, or another Python")
    p.add_argument("--vllm-memory", type=float, default=0.22, help="part of the GPU, each engine")


def say(message: str) -> None:
    """Print progress to stderr."""
    print(message, file=sys.stderr, flush=True)


def _end(*_: object) -> NoReturn:
    raise SystemExit(143)
