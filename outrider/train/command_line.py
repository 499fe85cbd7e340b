"""`python -m outrider.train METHOD ...`: flags, and what they build."""

from __future__ import annotations

import argparse
import math
import sys
from collections.abc import Sequence
from pathlib import Path

from outrider.errors import ConfigError, OutriderError
from outrider.flag_numbers import number, whole

METHODS = {
    "eagle3": "one layer over three of the target's states (EAGLE-3)",
    "mtp": "a multi-token-prediction module in Qwen3.5's layout; embedding and head are shared",
    "medusa": "a residual block for each drafted position, before the target's head (Medusa-1)",
    "mlp_speculator": "IBM's recurrent MLP, its matrices shared by all positions",
    "draft_model": "a small Llama with the target's tokenizer",
}


def build_parser() -> argparse.ArgumentParser:
    """The whole command line."""
    parser = argparse.ArgumentParser(
        prog="outrider train",
        description="Trains a draft method for a target model; writes its public format.",
    )
    commands = parser.add_subparsers(dest="method", required=True, metavar="METHOD")
    for name, help_text in METHODS.items():
        _add_method(commands.add_parser(name, help=help_text), name)
    answers = commands.add_parser("responses", help="the target's continuations of text, as rows")
    _add_common(answers)
    answers.add_argument("--out", type=_npy, required=True, help=".npy file to write")
    answers.add_argument("--count", type=_positive, required=True, help="rows")
    return parser


def _add_common(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--target", required=True, help='folder, Hugging Face id or "embedded"')
    parser.add_argument(
        "--data",
        type=Path,
        nargs="+",
        required=True,
        help="text, .jsonl (`text` or `messages`), .bin (uint16 stream) or .npy (stream or rows "
        "of tokens); several get equal shares of the steps",
    )
    parser.add_argument("--prompt-length", type=_positive, default=256, help="of generated rows")
    parser.add_argument("--new-tokens", type=_positive, default=256, help="of generated rows")
    parser.add_argument("--generate-batch", type=_positive, default=256, help="rows at a time")
    parser.add_argument("--seed", type=_seed, default=0)


def _add_method(parser: argparse.ArgumentParser, method: str) -> None:
    _add_common(parser)
    parser.add_argument("--out", type=Path, required=True, help="folder of the checkpoint")
    parser.add_argument("--heldout", type=Path, help="a file like --data (default: its last 2 %%)")
    parser.add_argument(
        "--generate", type=_count, default=0, metavar="N", help="also train on N responses"
    )
    parser.add_argument("--steps", type=_positive)
    parser.add_argument("--seconds", type=_above_zero, help="the bound that comes first counts")
    parser.add_argument("--resume", action="store_true", help="go on from OUT/state.pt")
    parser.add_argument("--length", type=_positive, default=1024, help="tokens of a window")
    parser.add_argument("--tokens-per-step", type=_positive, default=32768, help="of each process")
    parser.add_argument("--num-draft-tokens", type=_positive, default=4, help="positions trained")
    parser.add_argument("--lr", type=_rate, default=4e-3, help="of matrices (Muon)")
    parser.add_argument("--table-lr", type=_rate, default=4e-3, help="of the rest (AdamW)")
    parser.add_argument("--save-steps", type=_positive, default=1000)
    parser.add_argument("--mantissa-bits", type=int, default=7, choices=range(2, 8))
    parser.add_argument("--eval-rows", type=_positive, default=128, help="held-out prompts")
    if method == "mlp_speculator":
        parser.add_argument(
            "--inner-size", type=_positive, help="default: the target's hidden size"
        )
    elif method != "medusa":
        if method != "mtp":
            parser.add_argument("--hidden-size", type=_positive, help="default: the target's")
        parser.add_argument("--intermediate-size", type=_positive, help="default: the target's")
        parser.add_argument("--heads", type=_positive, help="default: the target's")
        parser.add_argument("--kv-heads", type=_positive, help="default: the target's")
        parser.add_argument("--head-dim", type=_positive, help="default: the target's")
    if method == "eagle3":
        parser.add_argument("--draft-vocab-size", type=_positive, help="default: the target's")
    if method == "draft_model":
        parser.add_argument("--num-layers", type=_positive, default=2)


def _positive(text: str) -> int:
    return whole(text, 1)


def _count(text: str) -> int:
    return whole(text, 0)


def _seed(text: str) -> int:
    return whole(text, 0, 2**32 - 1)  # sums and products with it are seeds, too


def _above_zero(text: str) -> float:
    value = _rate(text)
    if value == 0:
        raise argparse.ArgumentTypeError(f"{text!r} is not above 0")
    return value


def _rate(text: str) -> float:
    value = number(text)
    if not 0 <= value < math.inf:
        raise argparse.ArgumentTypeError(f"{text!r} is not a number from 0")
    return value


def _npy(text: str) -> Path:
    """As NumPy does, with the ending that it is known by."""
    return Path(text if text.endswith(".npy") else f"{text}.npy")


def main(argv: Sequence[str] | None = None) -> int:
    """Runs one command; 0, or 2 for a wrong set-up."""
    args = build_parser().parse_args(argv)
    from outrider.train.run import run_responses, run_training  # torch: after --help

    try:
        if args.method == "responses":
            run_responses(args)
        else:
            run_training(args)
    except OutriderError as error:
        print(f"outrider train: {error.message}", file=sys.stderr)
        return 2 if isinstance(error, ConfigError) else 1
    return 0
