"""The table of reference_drafting.py, and its results against the targets."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from benchmarks.lib import report

EDITS, AGENTIC = "edits", "agentic"


@dataclass(frozen=True)
class Row:
    """One method on one kind of trace."""

    workload: str
    kind: str
    method: str
    output_tokens: int
    rounds: int
    drafted: int
    accepted: int
    tokens_per_round: float
    tokens_per_s: float | None = None  # per CPU second; None: no model ran


def document(
    rows: Sequence[Row], cost: dict[str, dict[str, float]], changed: float, command: str
) -> str:
    """Return the results as Markdown."""
    head = ["workload", "kind", "method", "tokens", "rounds", "drafted", "accepted"]
    body = [
        [
            *(row.workload, row.kind, row.method),
            *map(str, (row.output_tokens, row.rounds, row.drafted, row.accepted)),
            report.number(row.tokens_per_round),
            report.number(row.tokens_per_s, 0),
        ]
        for row in rows
    ]
    facts = {"edits change": f"{changed:.1%} of the tokens on average"}
    lines = report.head("Drafting by copying", command, facts)
    lines += report.table([*head, "tokens/round", "tokens/s (CPU)"], body)
    lines += ["", "CPU microseconds per round and request from 8k tokens of context on:", ""]
    names = ("draft_us", "draft_p95_us", "commit_us")
    costs = [[method, *(report.number(each[n], 0) for n in names)] for method, each in cost.items()]
    lines += report.table(["method", "draft", "draft, 95th percentile", "commit"], costs)
    return "\n".join((*lines, "", "## Bars", "", *bars(rows, cost), ""))


def bars(rows: Sequence[Row], cost: dict[str, dict[str, float]]) -> list[str]:
    """Return the targets, each reached or missed."""
    best = {
        (row.workload, row.method): row.tokens_per_round
        for row in rows
        if row.tokens_per_s is None and (row.kind == "all" or row.workload == AGENTIC)
    }
    edit, ratio = best[EDITS, "deterministic"], best[AGENTIC, "suffix"] / best[AGENTIC, "ngram"]
    checks = [
        (f"speculative edit: {edit:.1f} tokens per round, at least 20", edit >= 20),
        (f"suffix on agentic work: {ratio:.2f} times ngram's tokens per round, 2", ratio >= 2),
    ]
    for method, each in cost.items():
        us = each["draft_us"]
        checks.append((f"{method}: {us:.0f} us per draft at 8k tokens, at most 50", us <= 50))
    for workload in (EDITS, AGENTIC):
        reference = best.get((workload, "arctic"))
        if reference is not None:
            own = best[workload, "suffix"]
            what = f"suffix on {workload}: {own:.2f} tokens per round, arctic-inference's"
            checks.append((f"{what} {reference:.2f}", own >= reference))
    return [f"- {'reached' if reached else 'MISSED'}: {what}" for what, reached in checks]
