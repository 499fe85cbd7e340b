"""Numbers of runs: speeds, paired ratios, acceptance, and the parts of a round."""

from __future__ import annotations

import statistics
from collections.abc import Sequence

from benchmarks.lib.measure import Cell
from benchmarks.lib.records import Completion, Run, first_divergence, median

Numbers = dict[str, float | None]


def ratio(cell: Cell, reference: Cell) -> float:
    """Return the median of the rounds' ratios."""
    pairs = zip(cell.runs, reference.runs, strict=True)
    return statistics.median(a.tokens_per_s / b.tokens_per_s for a, b in pairs)


def completions(cell: Cell) -> list[Completion]:
    return [c for run in cell.runs for c in run.completions]


def speeds(cell: Cell) -> Numbers:
    """Return tokens per second (median, lowest, highest round) and median TTFT and TPOT."""
    done = completions(cell)
    rates = [run.tokens_per_s for run in cell.runs]
    return {
        "tokens_per_s": statistics.median(rates),
        "tokens_per_s_min": min(rates),
        "tokens_per_s_max": max(rates),
        "ttft_ms": median([c.ttft_s * 1e3 for c in done if c.ttft_s is not None]),
        "tpot_ms": median([c.tpot_s * 1e3 for c in done if c.tpot_s is not None]),
        "foreign_cpu": statistics.median(cell.foreign_cpu),
    }


def speculation(cell: Cell) -> Numbers:
    """Return the mean acceptance length, the acceptance rate and the hit rate.

    The length is 1 + accepted tokens per round that had a draft. Systems that report only their
    rounds (`transformers`) get tokens per round as the length.
    """
    drafted, accepted, rounds = (_sum(cell.runs, n) for n in ("drafted", "accepted", "rounds"))
    if drafted is None and rounds is not None:
        return {"mean_acceptance_length": sum(r.num_tokens for r in cell.runs) / rounds}
    if not drafted or accepted is None or not rounds:
        return {}
    done = completions(cell)
    with_draft = rounds - sum(c.stats.get("undrafted_rounds", 0.0) for c in done)
    numbers: Numbers = {
        "mean_acceptance_length": 1 + accepted / with_draft,
        "acceptance_rate": accepted / drafted,
    }
    if any("undrafted_rounds" in c.stats for c in done):
        numbers["tokens_per_round"] = sum(r.num_tokens for r in cell.runs) / rounds
    hits, late, wrong = (
        sum(c.stats.get(n, 0.0) for c in done) for n in ("hits", "misses_late", "misses_wrong")
    )
    if hits + late + wrong:
        numbers["hit_rate"] = hits / (hits + late + wrong)
    return numbers


def accepted_per_position(cell: Cell) -> list[float]:
    """Return the share of the rounds with a draft that accepted position i."""
    done = completions(cell)
    rounds = sum(c.stats.get("rounds", 0.0) - c.stats.get("undrafted_rounds", 0.0) for c in done)
    width = max((len(c.accepted_per_pos) for c in done), default=0)
    counts = [sum(sum(c.accepted_per_pos[i : i + 1]) for c in done) for i in range(width)]
    return [n / rounds for n in counts] if rounds else []


def round_parts(cell: Cell) -> Numbers:
    """Return the milliseconds of a round's parts, or nothing for systems other than Outrider.

    benchmarks/README.md defines the parts.
    """
    done = completions(cell)
    after_first = sum(len(c.round_gaps_s) for c in done)
    if not cell.step_seconds or not after_first:
        return {}
    rounds = sum(c.stats["rounds"] for c in done)
    steps = cell.step_seconds["steps"]
    step_ms = {p: cell.step_seconds[p] * 1e3 / steps for p in ("schedule", "verify", "commit")}
    numbers: Numbers = {
        "draft": sum(c.stats["propose_ms"] for c in done) / rounds,
        "wire": sum(c.stats["network_ms"] for c in done) / rounds,
        "wait": sum(c.stats["wait_ms"] for c in done) / rounds,
        # score_ms is the forward and verification of the steps after the first token.
        "forward": sum(c.stats["score_ms"] for c in done) / after_first - step_ms["verify"],
        "round": median([gap * 1e3 for c in done for gap in c.round_gaps_s]),
        **step_ms,
    }
    if gaps := cell.step_seconds.get("gaps"):
        numbers["gap"] = cell.step_seconds["gap"] * 1e3 / gaps
    return numbers


def divergences(cell: Cell, reference: Cell) -> list[int | None]:
    """Return for each prompt where the text first differs from the reference's, or None."""
    return [
        first_divergence(a.token_ids, b.token_ids)
        for a, b in zip(completions(cell), completions(reference), strict=True)
    ]


def _sum(runs: Sequence[Run], name: str) -> int | None:
    values = [getattr(run, name) for run in runs]
    return None if None in values else sum(values)
