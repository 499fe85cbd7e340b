"""Versions of the streams between services, of which neighbours can talk to each other."""

from __future__ import annotations

from typing import Final

from outrider.errors import ProposerRefusedError

PROTOCOL_VERSION: Final = 1
"""The version of this code, in Hello, Welcome and GetScorerInfo."""

STEPS_VERSION: Final = 1
"""The version of GenerateSteps in this code, in GetScorerInfo."""

TOLERANCE: Final = 1
"""Distance of versions that can talk: the newer side speaks the older version, too."""


def agreed_version(theirs: int, ours: int = PROTOCOL_VERSION) -> int:
    """Return the version of a stream: the lower of both.

    Raises `ProposerRefusedError` (PROTOCOL_VERSION) for two that are too far apart.
    """
    accepted = range(max(1, ours - TOLERANCE), ours + TOLERANCE + 1)
    if theirs not in accepted:
        raise ProposerRefusedError(
            f"version {theirs} of the Draft protocol is not among those spoken here "
            f"({accepted[0]} to {accepted[-1]}): upgrade one release at a time",
            reason="PROTOCOL_VERSION",
        )
    return min(theirs, ours)
