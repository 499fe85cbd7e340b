"""A service whose policy drafts in every round and waits for the draft. For benchmarks only.

python -m benchmarks.fixed_k scorer_service|proposer_service|gateway [the service's flags]

What a round costs by different ways can be compared only if all of them do the same rounds.
"""

from __future__ import annotations

from typing import Final
from unittest import mock

from benchmarks.wrapped import serve

_PATIENCE_S: Final = 60.0


def fix() -> None:
    """From now on every policy of this process does so. Imports torch."""
    from outrider.engine.policy.adaptive import AdaptivePolicy
    from outrider.engine.policy.draft_mode import DraftMode
    from outrider.engine.policy.fixed import FixedPolicy

    mock.patch.object(AdaptivePolicy, "may_wait", new=True).start()
    mock.patch.object(AdaptivePolicy, "mode", new=DraftMode.AHEAD).start()
    mock.patch.object(AdaptivePolicy, "choose_k", new=FixedPolicy.choose_k).start()
    mock.patch.object(AdaptivePolicy, "patience_s", new=_patience).start()


def _patience(*_: object) -> float:
    """No mock, which takes 8 us to call: each row asks before its commit is told."""
    return _PATIENCE_S


if __name__ == "__main__":
    serve(lambda service: fix() if service == "scorer_service" else None)
