"""A service whose policy never drafts: proposers merely follow. For benchmarks only.

python -m benchmarks.k_zero scorer_service|proposer_service|gateway [the service's flags]
"""

from __future__ import annotations

from unittest import mock

from benchmarks.wrapped import serve
from outrider.engine.policy.draft_mode import DraftMode
from outrider.engine.policy.mode_trials import ModeTrials

if __name__ == "__main__":
    serve(lambda _: mock.patch.object(ModeTrials, "mode", new=DraftMode.OFF).start())
