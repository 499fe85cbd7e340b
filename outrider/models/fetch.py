"""Downloads a model before the service that needs it: `python -m outrider.models.fetch NAME`.

An init container runs this, so that the service itself starts without the network and the token.
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Sequence

from outrider.errors import ConfigError
from outrider.models.modules import resolve_module
from outrider.models.resolve import resolve_model
from outrider.signals import end_at_sigterm


def main(argv: Sequence[str] | None = None) -> int:
    """Print the folders; return the exit code, 2 for a model that cannot be had."""
    parser = argparse.ArgumentParser(
        prog="python -m outrider.models.fetch", description="Downloads a model into HF_HOME."
    )
    parser.add_argument("model", help="a Hugging Face id")
    parser.add_argument("--tokenizer-only", action="store_true", help="leave the weights out")
    parser.add_argument(
        "--module-of",
        metavar="TARGET",
        help="MODEL is a draft module: fetch it in any format, and of its target what both share",
    )
    args = parser.parse_args(argv)
    end_at_sigterm()
    try:
        if args.module_of is not None:
            print(*resolve_module(args.model, "draft", args.module_of), sep="\n")
        else:
            print(resolve_model(args.model, "target", tokenizer_only=args.tokenizer_only))
    except ConfigError as error:
        print(f"fetch: {error.message}", file=sys.stderr)
        return 2
    return 0


if __name__ == "__main__":
    sys.exit(main())
