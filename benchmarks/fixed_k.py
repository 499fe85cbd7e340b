"""A service whose policy drafts in every round and waits for the draft. For benchmarks only.

python -m benchmarks.fixed_k scorer_service|proposer_service|gateway [the service's flags]

What a round costs by different ways can be compared only if all of them do the same rounds.
"""

from __future__ import annotations

import importlib
import os
import sys
from typing import Final
from unittest import mock

_PATIENCE_S: Final = 60.0


def fix() -> None:
    """From now on every policy of this process does so. Imports torch."""
    from outrider.engine.adaptive import AdaptivePolicy
    from outrider.engine.contest import Contest
    from outrider.engine.policy import Policy

    mock.patch.object(Contest, "drafting", new=True).start()
    mock.patch.object(AdaptivePolicy, "choose_k", new=Policy.choose_k).start()
    mock.patch.object(AdaptivePolicy, "patience", return_value=_PATIENCE_S).start()


def main(argv: list[str]) -> int:
    """Runs until a signal; returns the exit code."""
    module, *flags = argv
    if module == "scorer_service":
        fix()
    run = importlib.import_module(f"{module}.__main__").main
    code: int = run(flags)
    return code


if __name__ == "__main__":
    exit_code = main(sys.argv[1:])
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(exit_code)  # as the services do
