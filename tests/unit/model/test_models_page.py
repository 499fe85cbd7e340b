"""docs/models.md says what is served and what is refused, and with which words."""

from __future__ import annotations

from tests.support.checkpoints.models_page import PAGE, page


def test_models_page_says_what_engines_do() -> None:
    assert page() == PAGE.read_text(), "run `make models`"
