"""A scorer that reports a given mean acceptance length. For benchmarks only: the text is spoilt.

    python -m benchmarks.synthetic_scorer --synthetic-acceptance-length 3.0 [scorer flags]

It is a program of its own so that no flag of the real scorer can do this.
"""

from __future__ import annotations

import argparse
import os
import sys
from collections.abc import Sequence
from typing import Any
from unittest import mock

from benchmarks.wrapped import leave
from scorer_service import __main__ as scorer


def main(argv: Sequence[str] | None = None) -> int:
    """Run until a signal; returns the exit code."""
    p = argparse.ArgumentParser(description=__doc__, add_help=False)
    p.add_argument("--synthetic-acceptance-length", type=float, required=True)
    ours, flags = p.parse_known_args(argv)
    options = scorer.parser().parse_args(flags)
    # Before torch is imported, as the scorer's own entry point does.
    os.environ["OMP_NUM_THREADS"] = str(options.threads)
    from benchmarks.synthetic import SyntheticRunner, chance_per_token
    from outrider.engine.engine import Engine
    from scorer_service import app

    chance_per_token(ours.synthetic_acceptance_length, options.num_speculative_tokens)
    build = app.build_engine

    def build_synthetic(*args: Any) -> Engine:
        engine = build(*args)
        engine._runner = SyntheticRunner(
            engine._runner, ours.synthetic_acceptance_length, options.num_speculative_tokens
        )
        return engine

    print("scorer: ACCEPTANCE IS SYNTHETIC, the text means nothing", file=sys.stderr, flush=True)
    with mock.patch.object(app, "build_engine", build_synthetic):
        return scorer.main(flags)


if __name__ == "__main__":
    leave(main())
