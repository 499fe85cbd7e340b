"""The numbers of a load as a table, and as JSON."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any, Final

from benchmarks.lib import report

_TIMES: Final = {
    "time to first token": "ttft_ms",
    "between two events of a stream": "inter_token_ms",
    "per token after the first": "tpot_ms",
    "whole answer": "total_ms",
}
_COUNTS: Final = (
    ("answered", 0),
    ("requests_per_s", 1),
    ("goodput_per_s", 1),
    ("good", 3),
    ("messages_per_s", 0),
    ("tokens_per_s", 0),
    ("slowest_to_median", 2),
    ("most_open", 0),
    ("lag_ms", 1),
    ("generator_cores", 2),
)


def lines(
    found: Mapping[str, Any], module: str, setup: Mapping[str, Any], out: Path | None
) -> list[str]:
    """Return the lines of a report, and write it to `out`.md and `out`.json if that is given."""
    facts = report.machine()
    command = report.command(module)
    told = [*report.head("Load", command, facts), *tables(found)]
    if out is not None:
        setup = {**facts, "command": command, **setup}
        report.write({"setup": setup, "results": dict(found)}, "\n".join([*told, ""]), out)
    return told


def tables(found: Mapping[str, Any]) -> list[str]:
    """Return the tables of one load."""
    quantiles = ["p50", "p90", "p99", "max"]
    times = [
        [name, *(report.number(found[field][q], 1) for q in quantiles)]
        for name, field in _TIMES.items()
    ]
    counts = [[name.replace("_", " "), report.number(found[name], n)] for name, n in _COUNTS]
    failures = [[kind, str(count)] for kind, count in found["failures"].items()]
    return [
        *report.table(["ms", *quantiles], times),
        "",
        *report.table(["", "count"], counts),
        "",
        *(report.table(["failure", "requests"], failures) if failures else ["No request failed."]),
    ]
