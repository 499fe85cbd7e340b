"""The flags of `python -m outrider.train METHOD ...`."""

from __future__ import annotations

import argparse
from collections.abc import Callable, Sequence
from pathlib import Path

from outrider.errors import OutriderError, fail
from outrider.flag_types import RaisingParser, from_zero, positive, seconds, whole, whole_number

METHODS = {
    "eagle3": "one layer over three of the target's states (EAGLE-3)",
    "dflash": "a few layers that fill a block of tokens from four of the target's states (DFlash)",
    "dspark": "a DFlash whose tokens know the one before them, and how sure they are (DSpark)",
    "mtp": "a multi-token-prediction module in Qwen3.5's layout; embedding and head are shared",
    "medusa": "a residual block for each drafted position, before the target's head (Medusa-1)",
    "mlp_speculator": "IBM's recurrent MLP, its matrices shared by all positions",
    "draft_model": "a small Llama with the target's tokenizer",
}
_LAYER_SIZES = ("--intermediate-size", "--heads", "--kv-heads", "--head-dim")
_SIZE_FLAGS = {
    "mlp_speculator": ("--inner-size",),
    "mtp": _LAYER_SIZES,
    "dflash": (*_LAYER_SIZES, "--draft-vocab-size"),
    "dspark": (*_LAYER_SIZES, "--draft-vocab-size"),
    "eagle3": ("--hidden-size", *_LAYER_SIZES, "--draft-vocab-size"),
    "draft_model": ("--hidden-size", *_LAYER_SIZES),
}
"""Sizes that are the target's unless they are given."""


def build_parser() -> RaisingParser:
    """Build the command line."""
    parser = RaisingParser(
        prog="outrider train",
        description="Trains a draft method for a target model; writes its public format.",
    )
    commands = parser.add_subparsers(dest="method", required=True, metavar="METHOD")
    for name, help_text in METHODS.items():
        _add_method(commands.add_parser(name, help=help_text), name)
    answers = commands.add_parser("responses", help="the target's continuations of text, as rows")
    _add_common(answers)
    answers.add_argument("--out", type=_npy, required=True, help=".npy file to write")
    answers.add_argument("--count", type=positive, required=True, help="rows")
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
    _number(parser, "--prompt-length", 256, "tokens of what the target continues")
    _number(parser, "--new-tokens", 256, "tokens that it continues that by")
    _number(parser, "--generate-batch", 256, "rows that it continues at a time")
    parser.add_argument("--seed", type=_seed, default=0, help="of all that is drawn (default: 0)")


def _add_method(parser: argparse.ArgumentParser, method: str) -> None:
    _add_common(parser)
    parser.add_argument("--out", type=Path, required=True, help="folder of the checkpoint")
    parser.add_argument("--heldout", type=Path, help="a file like --data (default: its last 2 %%)")
    parser.add_argument(
        "--generate",
        type=whole_number,
        default=0,
        metavar="N",
        help="also train on N responses of the target (default: 0)",
    )
    parser.add_argument("--steps", type=positive, help="train for so many")
    parser.add_argument(
        "--seconds", type=seconds, help="train for so long; the bound that comes first counts"
    )
    parser.add_argument("--resume", action="store_true", help="go on from OUT/state.pt")
    _number(parser, "--length", 1024, "tokens of a window")
    _number(parser, "--tokens-per-step", 32768, "of each process")
    _number(parser, "--num-draft-tokens", 4, "positions trained")
    _number(parser, "--lr", 4e-3, "of matrices (Muon)", from_zero)
    _number(parser, "--table-lr", 4e-3, "of the rest (AdamW)", from_zero)
    _number(parser, "--save-steps", 1000, "steps from one OUT/state.pt to the next")
    parser.add_argument(
        "--mantissa-bits",
        type=int,
        default=7,
        choices=range(2, 8),
        help="of matrices; fewer compress better (default: 7, bfloat16)",
    )
    _number(parser, "--eval-rows", 128, "held-out prompts of the evaluation")
    for flag in _SIZE_FLAGS.get(method, ()):
        of_target = "hidden size" if flag == "--inner-size" else ""
        parser.add_argument(flag, type=positive, help=f"default: the target's {of_target}".rstrip())
    if method in ("draft_model", "dflash", "dspark"):
        _number(parser, "--num-layers", 2, "decoder layers")
    if method == "dspark":
        _number(parser, "--markov-rank", 128, "values that tell a slot the token before")


def _number(
    parser: argparse.ArgumentParser,
    flag: str,
    default: float,
    about: str,
    kind: Callable[[str], float] = positive,
) -> None:
    parser.add_argument(flag, type=kind, default=default, help=f"{about} (default: {default})")


def _seed(text: str) -> int:
    return whole(text, 0, 2**32 - 1)  # sums and products of seeds are seeds, too


def _npy(text: str) -> Path:
    """Add the ending that NumPy would add."""
    return Path(text if text.endswith(".npy") else f"{text}.npy")


def main(argv: Sequence[str] | None = None) -> int:
    """Run one command; return 0, or 2 for a wrong set-up."""
    try:
        args = build_parser().parse_args(argv)
        from outrider.train.run import run_responses, run_training  # torch: after --help

        if args.method == "responses":
            run_responses(args)
        else:
            run_training(args)
    except OutriderError as error:
        return fail("outrider train", error)
    return 0
