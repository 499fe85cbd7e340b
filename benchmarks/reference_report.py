"""What reference_drafting.py found, as a table and against its bars."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

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
    tokens_per_s: float | None = None
    """Per CPU second; None where no model ran."""


def report(rows: Sequence[Row], cost: dict[str, dict[str, float]], changed: float) -> str:
    """The results as Markdown."""
    lines = [
        "# Drafting by copying",
        "",
        f"`python -m benchmarks.reference_drafting`. Edits change {changed:.1%} of the tokens on "
        "average. Outputs are given and forced on the target; see the module for how.",
        "",
        "| workload | kind | method | tokens | rounds | drafted | accepted | tokens/round | "
        "tokens/s (CPU) |",
        "|---|---|---|---|---|---|---|---|---|",
    ]
    for row in rows:
        speed = "" if row.tokens_per_s is None else f"{row.tokens_per_s:.0f}"
        lines.append(
            f"| {row.workload} | {row.kind} | {row.method} | {row.output_tokens} | {row.rounds} | "
            f"{row.drafted} | {row.accepted} | {row.tokens_per_round:.2f} | {speed} |"
        )
    lines += [
        "",
        "Per round and request from 8k tokens of context on, microseconds of CPU time:",
        "",
        "| method | draft | draft, 95th percentile | commit |",
        "|---|---|---|---|",
    ]
    for method, each in cost.items():
        p95 = each["draft_p95_us"]
        lines.append(f"| {method} | {each['draft_us']:.0f} | {p95:.0f} | {each['commit_us']:.0f} |")
    return "\n".join((*lines, "", "## Bars", "", *bars(rows, cost), ""))


def bars(rows: Sequence[Row], cost: dict[str, dict[str, float]]) -> list[str]:
    """What was to be reached, and whether it was."""
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
