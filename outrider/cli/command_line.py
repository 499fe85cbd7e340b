"""Flags, and which command they belong to. Knows nothing of torch, nor of gRPC until needed."""

from __future__ import annotations

import argparse
import os
import sys
from collections.abc import Sequence
from typing import NoReturn

from outrider import __version__
from outrider.cli import flag_types
from outrider.cli.flag_types import DEFAULT_GRPC_PORT, DEFAULT_HTTP_PORT
from outrider.config import SPECULATION_POLICIES
from outrider.errors import ConfigError, OutriderError
from outrider.methods import METHODS

SERVICES = {
    "gateway": "gateway",
    "scorer": "scorer_service",
    "proposer": "proposer_service",
}
"""Name on the command line -> the package that `python -m` runs."""


def main(argv: Sequence[str] | None = None) -> int:
    """Run one command; returns its exit code: 0, 1 for a failed request, 2 for a wrong set-up."""
    args, unknown = build_parser().parse_known_args(argv)
    if unknown:  # argparse itself would blame the whole command line
        command: argparse.ArgumentParser = args.parser
        command.error(f"unrecognized arguments: {' '.join(unknown)} (see {command.prog} --help)")
    try:
        match args.command:
            case "demo":
                from outrider.cli.demo import run_demo

                return run_demo(args)
            case "up":
                from outrider.cli.up import run_up

                return run_up(args)
            case "generate":
                from outrider.cli.generate import run_generate

                return run_generate(args)
            case "train":
                run_module("outrider.train", args.args)
            case _:
                run_module(SERVICES[args.service], args.args)
    except OutriderError as error:
        print(f"outrider: {error.message}", file=sys.stderr)
        return 2 if isinstance(error, ConfigError) else 1
    except KeyboardInterrupt:  # while modules are imported; afterwards the loop has the signal
        return 130
    except BrokenPipeError:  # who reads, as `head`, has enough; nor may the flush at the end fail
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        return 0


def run_module(module: str, args: Sequence[str]) -> NoReturn:
    """Replace this process by `python -m <module>`."""
    # -P: a folder called gateway in the working directory is not our gateway.
    os.execv(sys.executable, [sys.executable, "-P", "-m", module, *args])


def build_parser() -> argparse.ArgumentParser:
    """Build the whole command line."""
    parser = argparse.ArgumentParser(
        prog="outrider",
        description="Speculative decoding for large language models as a distributed service.",
    )
    parser.add_argument("--version", action="version", version=f"outrider {__version__}")
    commands = parser.add_subparsers(dest="command", required=True, metavar="COMMAND")

    demo = commands.add_parser(
        "demo",
        help="watch one completion with and without speculation",
        description="Starts all three services on loopback and shows one completion, twice.",
    )
    _add_stack_flags(demo)
    demo.add_argument(
        "--prompt",
        type=flag_types.some_text,
        help="the text to complete (default: held-out Python code)",
    )
    demo.add_argument("--max-tokens", type=flag_types.positive, default=128, metavar="N")
    demo.add_argument(
        "--temperature", type=flag_types.temperature, default=0.0, metavar="T", help="0 is greedy"
    )

    up = commands.add_parser(
        "up",
        help="run scorer, proposer and gateway until Ctrl-C",
        description="Runs all three services on loopback and on the CPU. For a GPU (--device), "
        "other addresses (--host) or several machines run each by itself: see `outrider serve`.",
    )
    _add_stack_flags(up)
    up.add_argument(
        "--http-port",
        type=flag_types.port,
        metavar="PORT",
        help=f"OpenAI-compatible HTTP; 0: any (default: {DEFAULT_HTTP_PORT} if free, else any)",
    )
    up.add_argument(
        "--grpc-port",
        type=flag_types.port,
        metavar="PORT",
        help=f"GenerationService; 0: any (default: {DEFAULT_GRPC_PORT} if free, else any)",
    )
    up.add_argument(
        "--served-model-name", default="default", metavar="NAME", help="default: %(default)s"
    )

    generate = commands.add_parser("generate", help="ask a running gateway for a completion")
    _add_generate(generate)
    serve = commands.add_parser("serve", help="run one service; its flags follow its name")
    serve.add_argument("service", choices=SERVICES)
    serve.add_argument("args", nargs=argparse.REMAINDER, help="see `outrider serve scorer --help`")

    train = commands.add_parser(
        "train",
        help="train a draft method for a target; see `outrider train --help`",
        add_help=False,
        prefix_chars="\0",  # --help, too, is for what it starts
    )
    train.add_argument("args", nargs=argparse.REMAINDER)
    for command in (demo, up, generate, serve, train):
        command.set_defaults(parser=command)
    return parser


def _add_stack_flags(parser: argparse.ArgumentParser) -> None:
    parser.add_argument(
        "--model", metavar="NAME", help="target: Hugging Face id or folder (default: embedded)"
    )
    parser.add_argument(
        "--draft-model",
        metavar="NAME",
        help="draft: Hugging Face id or folder; a model with the same tokenizer, or what --method "
        "eagle3, mtp, eagle, medusa or mlp_speculator made for the target (default: embedded, but "
        "there is none for eagle)",
    )
    parser.add_argument(
        "--method",
        type=flag_types.methods,
        metavar="NAME[,...]",
        help=f"who drafts: {', '.join(METHODS)}, or several, of which the first that has a guess "
        "does; or none (default: draft_model, but ngram for a --model without --draft-model)",
    )
    parser.add_argument(
        "--in-process",
        action="store_true",
        help="draft in the scorer's process instead of a proposer's, in turns with its steps",
    )
    parser.add_argument(
        "--num-speculative-tokens",
        type=flag_types.speculative_tokens,
        default=4,
        metavar="K",
        help="draft tokens per round at most (default: %(default)s)",
    )
    parser.add_argument(
        "--speculation-policy",
        choices=SPECULATION_POLICIES,
        default=SPECULATION_POLICIES[0],
        help="adaptive: as many draft tokens as are the fastest; fixed: K in every round "
        "(default: %(default)s)",
    )
    parser.add_argument(
        "--dtype",
        choices=("float32", "bfloat16"),
        default="float32",
        help="float32: text equal to the last bit with and without speculation; bfloat16: faster, "
        "near ties may fall differently (default: %(default)s)",
    )
    parser.add_argument(
        "--seed",
        type=flag_types.seed,
        metavar="S",
        help="seed of requests that give none (default: a new one for each request)",
    )


def _add_generate(parser: argparse.ArgumentParser) -> None:
    parser.add_argument(
        "prompt",
        nargs="?",
        type=flag_types.utf8,
        default="-",
        help="the text to complete; -: stdin",
    )
    parser.add_argument(
        "--address",
        type=flag_types.address,
        default=f"127.0.0.1:{DEFAULT_GRPC_PORT}",
        metavar="HOST:PORT",
        help="the gateway's gRPC, with grpc:// or without (default: %(default)s)",
    )
    parser.add_argument(
        "--api-key", type=flag_types.key, metavar="KEY", help="for a gateway that asks for one"
    )
    parser.add_argument(
        "--model", type=flag_types.utf8, default="", metavar="NAME", help="a served model's name"
    )
    parser.add_argument("--max-tokens", type=flag_types.positive, metavar="N")
    parser.add_argument(
        "--temperature", type=flag_types.temperature, metavar="T", help="0 is greedy"
    )
    parser.add_argument("--top-k", type=flag_types.top_k, metavar="N", help="0 is off")
    parser.add_argument("--top-p", type=float, metavar="P")
    parser.add_argument("--min-p", type=float, metavar="P")
    parser.add_argument("--seed", type=flag_types.seed, metavar="S")
    parser.add_argument(
        "--stop",
        action="append",
        type=flag_types.utf8,
        default=[],
        metavar="TEXT",
        help="may be given several times",
    )
    parser.add_argument("--ignore-eos", action="store_true", help="go on past the model's end")
    parser.add_argument("--speculation", choices=("on", "off"), default="on")
    parser.add_argument(
        "--method",
        type=flag_types.utf8,
        metavar="NAME[,...]",
        help=f"{', '.join(METHODS)} or none; several: the preferred one first",
    )
    parser.add_argument("--num-speculative-tokens", type=flag_types.speculative_tokens, metavar="K")
    parser.add_argument(
        "--aux-info", action="store_true", help="print what speculation did, on stderr"
    )
    parser.add_argument(
        "--timeout",
        type=flag_types.seconds,
        default=600.0,
        metavar="S",
        help="seconds (default: %(default)g)",
    )
