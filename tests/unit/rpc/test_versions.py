"""Which versions of the Draft protocol talk to each other."""

from __future__ import annotations

import pytest

from outrider.errors import ProposerRefusedError
from outrider.rpc.versions import agreed_version


@pytest.mark.parametrize(
    ("ours", "theirs", "agreed"),
    [(1, 1, 1), (1, 2, 1), (2, 1, 1), (2, 2, 2), (2, 3, 2), (7, 6, 6), (7, 8, 7)],
)
def test_agreed_version_of_neighbours_is_the_lower(ours: int, theirs: int, agreed: int) -> None:
    assert agreed_version(theirs, ours) == agreed


@pytest.mark.parametrize(("ours", "theirs"), [(1, 0), (1, 3), (2, 0), (2, 4), (7, 5), (7, 9)])
def test_agreed_version_of_others_is_refused(ours: int, theirs: int) -> None:
    with pytest.raises(ProposerRefusedError, match="one release at a time") as caught:
        agreed_version(theirs, ours)
    assert caught.value.reason == "PROTOCOL_VERSION"
