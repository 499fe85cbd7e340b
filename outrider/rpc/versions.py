"""Which versions of the Draft stream can talk to each other: a pool is upgraded pod by pod."""

from __future__ import annotations

from typing import Final

from outrider.errors import ProposerRefusedError

PROTOCOL_VERSION: Final = 1
"""The version that this code speaks (Hello, Welcome, GetScorerInfo)."""

TOLERANCE: Final = 1
"""Versions above and below its own that a build talks to. It speaks the one below itself; one
above comes down to it."""


def agreed_version(theirs: int, ours: int = PROTOCOL_VERSION) -> int:
    """The version that a stream is held in: the lower of both.

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
