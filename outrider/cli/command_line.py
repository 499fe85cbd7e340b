"""Flags, and which command they belong to. Knows nothing of torch, nor of gRPC until needed."""

from __future__ import annotations

import argparse
import os
import sys
from collections.abc import Sequence
from typing import NoReturn

from outrider import __version__, flag_types
from outrider.cli.ports import HOST
from outrider.cli.serve_flags import add_model_flags, add_passed_flags
from outrider.cli.translate import translate
from outrider.errors import OutriderError, fail
from outrider.flag_types import DEFAULT_GRPC_PORT, DEFAULT_HTTP_PORT
from outrider.methods import METHODS

MODULES = {
    "scorer": "scorer_service",
    "proposer": "proposer_service",
    "gateway": "gateway",
    "batch": "outrider.offline.batch",
    "train": "outrider.train",
}
"""Command -> the module that `python -m` runs instead, with all of its flags."""
_ABOUT = {
    "scorer": "run a scorer alone",
    "proposer": "run a proposer alone",
    "gateway": "run a gateway alone",
    "batch": "answer a file of requests, without a server",
    "train": "train a draft method for a target",
}
_LISTENING = ("serve", "scorer", "proposer", "gateway")
HOST_VARIABLE = "OUTRIDER_HOST"
"""Environment variable with the default of --host: a container is reached at all addresses."""


def main(argv: Sequence[str] | None = None) -> int:
    """Run one command; returns its exit code: 0, 1 for a failed request, 2 for a wrong set-up."""
    words = list(sys.argv[1:] if argv is None else argv) or ["--help"]
    try:
        vllm_flags: list[str] = []
        if words[:1] == ["serve"]:
            if "--" in words:
                words, vllm_flags = words[: words.index("--")], words[words.index("--") + 1 :]
            words = ["serve", *_in_our_words(words[1:])]
        if words and words[0] in _LISTENING and HOST_VARIABLE in os.environ:
            words[1:1] = ["--host", os.environ[HOST_VARIABLE]]  # a flag after it wins
        args, unknown = build_parser().parse_known_args(words)
        args.vllm_flags = vllm_flags
        if unknown:  # argparse itself would blame the whole command line
            command: argparse.ArgumentParser = args.parser
            command.error(
                f"unrecognized arguments: {' '.join(unknown)} (see {command.prog} --help)"
            )
        match args.command:
            case "demo":
                from outrider.cli.demo import run_demo

                return run_demo(args)
            case "serve":
                from outrider.cli.serve import run_serve

                return run_serve(args)
            case "generate":
                from outrider.cli.generate import run_generate

                return run_generate(args)
            case _:
                run_module(MODULES[args.command], args.args)
    except OutriderError as error:
        return fail("outrider", error)
    except KeyboardInterrupt:  # while modules are imported; afterwards the loop has the signal
        return 130
    except BrokenPipeError:  # who reads, as `head`, has enough; nor may the flush at the end fail
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        return 0


def _in_our_words(words: Sequence[str]) -> list[str]:
    """Translate the flags and variables of other engines; say on stderr what they mean here."""
    from outrider.cli.process import relay

    translated, notes = translate(words, os.environ)
    for note in notes:
        relay("outrider", note)
    return translated


def run_module(module: str, args: Sequence[str]) -> NoReturn:
    """Replace this process by `python -m <module>`."""
    # -P: a folder called gateway in the working directory is not our gateway.
    os.execv(sys.executable, [sys.executable, "-P", "-m", module, *args])


def build_parser() -> flag_types.RaisingParser:
    """Build the whole command line."""
    parser = flag_types.RaisingParser(
        prog="outrider",
        description="Speculative decoding for large language models as a distributed service.",
    )
    parser.add_argument("--version", action="version", version=f"outrider {__version__}")
    commands = parser.add_subparsers(dest="command", required=True, metavar="COMMAND")
    serve = commands.add_parser(
        "serve",
        allow_abbrev=False,
        help="serve a model on this machine until Ctrl-C",
        description="Serves one model with speculation: a gateway, a scorer and the drafting, on a "
        "GPU if there is one. Flags of vllm serve, lmdeploy serve api_server, SGLang, RTP-LLM and "
        "PaddleNLP are taken, too, and what they mean here is said on stderr.",
    )
    _add_serve(serve)
    demo = commands.add_parser(
        "demo",
        help="watch one completion with and without speculation",
        description="Starts all three services on loopback and shows one completion, twice.",
    )
    _add_demo(demo)
    generate = commands.add_parser("generate", help="ask a running gateway for a completion")
    _add_generate(generate)
    for command in (serve, demo, generate):
        command.set_defaults(parser=command)
    for name, about in _ABOUT.items():
        alone = commands.add_parser(
            name,
            help=f"{about}; see `outrider {name} --help`",
            add_help=False,
            prefix_chars="\0",  # --help, too, is for what it starts
        )
        alone.add_argument("args", nargs=argparse.REMAINDER)
        alone.set_defaults(parser=alone)
    return parser


def _add_serve(parser: argparse.ArgumentParser) -> None:
    add_model_flags(parser)
    host_help = "to listen on (default: %(default)s)"
    parser.add_argument("--host", type=flag_types.some_text, default=HOST, help=host_help)
    parser.add_argument(
        "--port",
        type=flag_types.port,
        default=DEFAULT_HTTP_PORT,
        help="OpenAI-compatible HTTP; 0: any free one (default: %(default)s)",
    )
    parser.add_argument(
        "--grpc-port",
        type=flag_types.port,
        default=DEFAULT_GRPC_PORT,
        metavar="PORT",
        help="GenerationService; 0: any free one (default: %(default)s)",
    )
    parser.add_argument(
        "--served-model-name",
        nargs="+",
        metavar="NAME",
        help="what clients ask for, beside default; several names: any of them; default: MODEL",
    )
    parser.add_argument(
        "--dry-run", action="store_true", help="print the processes with their flags, and end"
    )
    add_passed_flags(parser)


def _add_demo(parser: argparse.ArgumentParser) -> None:
    add_model_flags(parser)
    parser.set_defaults(device="cpu", draft_device="cpu")
    parser.add_argument(
        "--prompt",
        type=flag_types.some_text,
        help="the text to complete (default: held-out Python code)",
    )
    parser.add_argument("--max-tokens", type=flag_types.positive, default=128, metavar="N")
    parser.add_argument(
        "--temperature", type=flag_types.temperature, default=0.0, metavar="T", help="0 is greedy"
    )
    parser.add_argument("--seed", type=flag_types.seed, default=0, metavar="S")


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
    parser.add_argument("--seed", type=flag_types.seed, metavar="S")
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
