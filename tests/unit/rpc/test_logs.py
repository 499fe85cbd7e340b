"""outrider/rpc/logs.py: what peers send cannot look like a record of its own."""

from __future__ import annotations

import logging
import sys

import pytest

from outrider.rpc.logs import LineFormatter

FORGED = "a\nscorer ERROR b"


@pytest.mark.parametrize("text", [FORGED, FORGED.replace("\n", "\r"), FORGED.replace("\n", "\x85")])
def test_formatter_with_line_breaks_of_peers_writes_one_record(text: str) -> None:
    try:
        raise ValueError(text)
    except ValueError:
        record = logging.LogRecord(
            "n", logging.WARNING, "f", 1, "proposer %s left", (text,), sys.exc_info()
        )
    first, *rest = LineFormatter("scorer %(levelname)s %(message)s").format(record).splitlines()
    assert first.startswith("scorer WARNING proposer a\\")
    assert first.endswith("scorer ERROR b left")
    assert len(rest) > 2
    assert all(line.startswith("  ") for line in rest)


def test_formatter_with_printable_text_changes_nothing() -> None:
    record = logging.LogRecord("n", logging.INFO, "f", 1, "Modèle %s: 模型\\n", ("x",), None)
    assert LineFormatter("%(message)s").format(record) == "Modèle x: 模型\\n"
