"""From runs to numbers: speeds, paired ratios, acceptance, and where a round's time goes."""

from __future__ import annotations

import statistics
from collections.abc import Sequence

from benchmarks.measure import Cell
from benchmarks.records import Completion, Run, first_divergence, median

Numbers = dict[str, float | None]


def tokens_per_s(cell: Cell) -> float:
    """The median over rounds."""
    return statistics.median(run.tokens_per_s for run in cell.runs)


def ratio(cell: Cell, reference: Cell) -> float:
    """The median of the rounds' ratios: both did the same prompts minutes apart at most."""
    pairs = zip(cell.runs, reference.runs, strict=True)
    return statistics.median(a.tokens_per_s / b.tokens_per_s for a, b in pairs)


def completions(cell: Cell) -> list[Completion]:
    return [c for run in cell.runs for c in run.completions]


def speeds(cell: Cell) -> Numbers:
    """Tokens per second (median, lowest, highest round), TTFT and TPOT in ms (medians)."""
    done = completions(cell)
    rates = [run.tokens_per_s for run in cell.runs]
    ttft = median([c.ttft_s for c in done if c.ttft_s is not None])
    tpot = median([c.tpot_s for c in done if c.tpot_s is not None])
    return {
        "tokens_per_s": statistics.median(rates),
        "tokens_per_s_min": min(rates),
        "tokens_per_s_max": max(rates),
        "ttft_ms": None if ttft is None else ttft * 1e3,
        "tpot_ms": None if tpot is None else tpot * 1e3,
        "foreign_cpu": statistics.median(cell.foreign_cpu),
    }


def speculation(cell: Cell) -> Numbers:
    """Mean acceptance length (1 + accepted per round that had a draft), acceptance and hit rate.

    Systems that tell only their rounds (`transformers`) get tokens per round as the length.
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
        numbers["late_rate"] = late / (hits + late + wrong)
        numbers["wrong_rate"] = wrong / (hits + late + wrong)
    return numbers


def accepted_per_position(cell: Cell) -> list[float]:
    """Share of the rounds with a draft that accepted position i."""
    done = completions(cell)
    rounds = sum(c.stats.get("rounds", 0.0) - c.stats.get("undrafted_rounds", 0.0) for c in done)
    width = max((len(c.accepted_per_pos) for c in done), default=0)
    counts = [sum(_at(c.accepted_per_pos, i) for c in done) for i in range(width)]
    return [n / rounds for n in counts] if rounds else []


def round_parts(cell: Cell) -> Numbers:
    """Where a round's time goes, milliseconds. Empty for systems that are not Outrider.

    draft, wire and wait are per round of a request, as its aux_info says; forward is the mean
    over its decode steps; schedule, verify and commit are means over all engine steps, from the
    scorer's metrics; gap, the host's time between a result and the next launch where nothing was
    waited for, is too; `round` is the median time between two messages of a request at the client.
    `host_overhead` (single stream only): see `host_overhead_ms`.
    """
    done = completions(cell)
    after_first = sum(len(c.round_gaps_s) for c in done)
    if not cell.step_seconds or not after_first:
        return {}
    rounds = sum(c.stats["rounds"] for c in done)
    steps = cell.step_seconds["steps"]
    gap = median([gap for c in done for gap in c.round_gaps_s])
    step_ms = {p: cell.step_seconds[p] * 1e3 / steps for p in ("schedule", "verify", "commit")}
    numbers: Numbers = {
        "draft": sum(c.stats["propose_ms"] for c in done) / rounds,
        "wire": sum(c.stats["network_ms"] for c in done) / rounds,
        "wait": sum(c.stats["wait_ms"] for c in done) / rounds,
        # score_ms is forward and verification of the steps after the first token.
        "forward": sum(c.stats["score_ms"] for c in done) / after_first - step_ms["verify"],
        "round": None if gap is None else gap * 1e3,
        **step_ms,
    }
    if gaps := cell.step_seconds.get("gaps"):
        numbers["gap"] = cell.step_seconds["gap"] * 1e3 / gaps
    if cell.concurrency == 1:
        numbers["host_overhead"] = host_overhead_ms(done, step_ms["verify"])
    return numbers


def host_overhead_ms(done: Sequence[Completion], verify_ms: float) -> float | None:
    """Everything of a round but the target's and the draft's forward: the median over requests.

    Per request: the mean time between its messages at the client, less the draft time that the
    proposer reported and the decode steps' forward time. aux_info has forward and verification
    together, so verification's mean is put back: it is not a forward. What the proposer's own
    Python costs inside its drafting is not seen here.
    """
    left = []
    for c in done:
        n = len(c.round_gaps_s)
        if n:
            forwards_ms = c.stats["propose_ms"] + c.stats["score_ms"] - n * verify_ms
            left.append((sum(c.round_gaps_s) * 1e3 - forwards_ms) / n)
    return median(left)


def divergences(cell: Cell, reference: Cell) -> list[int | None]:
    """Per prompt, where the text first differs from the reference's; None: equal."""
    return [
        first_divergence(a.token_ids, b.token_ids)
        for a, b in zip(completions(cell), completions(reference), strict=True)
    ]


def _sum(runs: Sequence[Run], name: str) -> int | None:
    values = [getattr(run, name) for run in runs]
    return None if None in values else sum(values)


def _at(values: Sequence[int], i: int) -> int:
    return values[i] if i < len(values) else 0
