"""Downloads a model before the service that needs it: `python -m outrider.models.fetch NAME`.

An init container runs this, so that the service itself starts without the network and the token.
What a broken download has fetched is kept for the next try.
"""

from __future__ import annotations

import sys
import time
from collections.abc import Sequence

from outrider.errors import ConfigError, refuse
from outrider.flag_types import RaisingParser, from_zero
from outrider.models.download import DownloadError
from outrider.models.modules import resolve_module
from outrider.models.resolve import resolve_model
from outrider.process.signals import end_at_sigterm

_PAUSE_S = 10.0


def main(argv: Sequence[str] | None = None) -> int:
    """Print the folders; return the exit code, 2 for a model that cannot be had."""
    parser = RaisingParser(
        prog="python -m outrider.models.fetch", description="Downloads a model into HF_HOME."
    )
    parser.add_argument("model", help="a Hugging Face id")
    parser.add_argument("--tokenizer-only", action="store_true", help="leave the weights out")
    parser.add_argument(
        "--module-of",
        metavar="TARGET",
        help="MODEL is a draft module: fetch it in any format, and of its target what both share",
    )
    parser.add_argument(
        "--retry-seconds",
        type=from_zero,
        default=0.0,
        metavar="SECONDS",
        help="how long to try again while the network or the hub fails",
    )
    try:
        args = parser.parse_args(argv)
    except ConfigError as error:
        return refuse("fetch", error)
    end_at_sigterm()
    give_up = time.monotonic() + args.retry_seconds
    while True:
        try:
            if args.module_of is not None:
                print(*resolve_module(args.model, "draft", args.module_of), sep="\n")
            else:
                print(resolve_model(args.model, "target", tokenizer_only=args.tokenizer_only))
            return 0
        except ConfigError as error:
            code = refuse("fetch", error)
            passes = isinstance(error, DownloadError) and error.may_pass
            if not passes or time.monotonic() + _PAUSE_S > give_up:
                return code
            time.sleep(_PAUSE_S)


if __name__ == "__main__":
    sys.exit(main())
