"""What draft_ahead.py tells: a row per mode, delay, batch and temperature, and the last word."""

from __future__ import annotations

import argparse
import statistics
from collections.abc import Sequence
from dataclasses import dataclass

from benchmarks.ahead_model import Times, drafted_ahead, on_demand
from benchmarks.ahead_pair import Sample
from benchmarks.lib.records import Run
from benchmarks.lib.report import number, share, table

_HOST_MS = 0.5  # c of the formulas: two event loops and the engine's own time


@dataclass(frozen=True)
class Row:
    """One mode, delay, batch and temperature. None: not told, or it has no meaning there."""

    mode: str
    round_trip_ms: float  # added
    batch: int
    temperature: float
    tokens_per_s: float
    plain_tokens_per_s: float  # Outrider's own without speculation
    speed_up: float  # over that
    gpu_normalised: float  # tokens per second and GPU
    predicted: float | None = None  # batch 1 only: the formulas know no batch
    acceptance_length: float | None = None  # tokens per round that had a draft
    acceptance: float | None = None
    hit_rate: float | None = None
    hits_after_hit: float | None = None
    hits_after_miss: float | None = None
    late: float | None = None  # share of rounds
    wrong: float | None = None
    bytes_to: float | None = None  # per request and round, from the proposer, through the proxy
    bytes_from: float | None = None
    texts_equal: float | None = None  # share


@dataclass(frozen=True)
class Cell:
    """The repetitions of one mode, delay, batch and temperature."""

    mode: str
    round_trip_ms: float
    batch: int
    temperature: float
    samples: Sequence[Sample]

    def total(self, name: str) -> float:
        """A field of `aux_info`, summed."""
        return sum(sample.aux[name] for sample in self.samples)

    @property
    def drafted_rounds(self) -> float:
        """Rounds that had a draft; 1 at least, to divide by."""
        return max(1.0, self.total("rounds") - self.total("undrafted_rounds"))

    def draft_step_ms(self, k: int) -> float:
        """Per drafted token, where drafts are made on demand."""
        return self.total("propose_ms") / self.drafted_rounds / k


def row_of(cell: Cell, draft_step_ms: float, args: argparse.Namespace) -> Row:
    """`draft_step_ms`: 0 if not measured yet, and nothing is predicted."""
    total, samples = cell.total, cell.samples
    rounds = max(1.0, total("rounds"))
    colocated = cell.mode == "colocated"
    gpus = 2 if args.proposer_gpu not in (None, args.scorer_gpu) and not colocated else 1
    speed = statistics.median(sample.tokens_per_s for sample in samples)
    plain = statistics.median(sample.plain_tokens_per_s for sample in samples)
    tokens = 1 + total("accepted") / cell.drafted_rounds
    h1 = total("hits_after_hit") / max(1.0, total("rounds_after_hit"))
    h0 = total("hits_after_miss") / max(1.0, total("rounds_after_miss"))
    predicted = None
    if cell.batch == 1 and draft_step_ms:
        times = Times(1e3 / plain, draft_step_ms, cell.round_trip_ms, _HOST_MS)
        k = args.num_speculative_tokens
        if cell.mode == "ahead":
            predicted = drafted_ahead(times, k, tokens, h1, h0)
        else:
            predicted = on_demand(times, k, tokens)
    return Row(
        mode=cell.mode,
        round_trip_ms=cell.round_trip_ms,
        batch=cell.batch,
        temperature=cell.temperature,
        tokens_per_s=speed,
        plain_tokens_per_s=plain,
        speed_up=statistics.median(s.tokens_per_s / s.plain_tokens_per_s for s in samples),
        gpu_normalised=speed / gpus,
        predicted=predicted,
        acceptance_length=tokens,
        acceptance=total("accepted") / max(1.0, total("drafted")),
        hit_rate=total("hits") / rounds,
        hits_after_hit=h1,
        hits_after_miss=h0,
        late=total("misses_late") / rounds,
        wrong=total("misses_wrong") / rounds,
        bytes_to=sum(s.bytes_to for s in samples) / rounds or None,
        bytes_from=sum(s.bytes_from for s in samples) / rounds or None,
        texts_equal=sum(s.num_equal for s in samples) / sum(s.num_texts for s in samples),
    )


def vllm_row(mode: str, batch: int, runs: Sequence[Run], ours: Sequence[Row]) -> Row:
    """A mode of vLLM, greedy, over what Outrider does without speculation at this batch.

    `ours` has a row of this batch at temperature 0; where there are several, their median counts.
    """
    _, plain = _greedy(ours, batch)
    speed = statistics.median(run.tokens_per_s for run in runs)
    rounds, drafted, accepted = (
        sum(getattr(run, name) or 0 for run in runs) for name in ("rounds", "drafted", "accepted")
    )
    return Row(
        mode=mode,
        round_trip_ms=0.0,
        batch=batch,
        temperature=0.0,
        tokens_per_s=speed,
        plain_tokens_per_s=plain,
        speed_up=speed / plain,
        gpu_normalised=speed,
        acceptance_length=1 + accepted / rounds if rounds else None,
        acceptance=accepted / drafted if drafted else None,
    )


def _greedy(ours: Sequence[Row], batch: int) -> tuple[list[Row], float]:
    """The rows of this batch at temperature 0, and tokens/s without speculation there."""
    rows = [row for row in ours if (row.batch, row.temperature) == (batch, 0.0)]
    return rows, statistics.median(row.plain_tokens_per_s for row in rows)


def against_vllm(ours: Sequence[Row], theirs: Sequence[Row]) -> list[str]:
    """Per batch, each side's best mode, no speculation among them, at temperature 0."""
    lines = []
    for batch in dict.fromkeys(row.batch for row in theirs):
        modes, plain = _greedy(ours, batch)
        best, per_gpu, mode = max(
            (plain, plain, "no speculation"),
            *(
                (row.tokens_per_s, row.gpu_normalised, f"{row.mode}, RT {row.round_trip_ms:g} ms")
                for row in modes
            ),
        )
        rival = max((r for r in theirs if r.batch == batch), key=lambda r: r.tokens_per_s)
        ratio, ratio_per_gpu = best / rival.tokens_per_s, per_gpu / rival.tokens_per_s
        lines.append(
            f"{batch} at once, T = 0: {mode}: {best:.1f} tok/s; {rival.mode}: "
            f"{rival.tokens_per_s:.1f}; {ratio:.2f} times vLLM's, per GPU {ratio_per_gpu:.2f}."
        )
    return lines


_HEAD = (
    *("mode", "RT ms", "batch", "T", "tok/s", "plain", "speed-up", "predicted", "tok/s/GPU"),
    *("acc. len", "accept.", "hits", "h1", "h0", "late", "wrong", "B to", "B from", "equal"),
)


def _cells(row: Row) -> list[str]:
    return [
        *(row.mode, f"{row.round_trip_ms:g}", str(row.batch), f"{row.temperature:g}"),
        *(number(row.tokens_per_s, 1), number(row.plain_tokens_per_s, 1), number(row.speed_up)),
        *(number(row.predicted), number(row.gpu_normalised, 1), number(row.acceptance_length)),
        *(number(row.acceptance), number(row.hit_rate), number(row.hits_after_hit)),
        *(number(row.hits_after_miss), number(row.late), number(row.wrong)),
        *(number(row.bytes_to, 0), number(row.bytes_from, 0)),
        share(row.texts_equal),
    ]


def line(row: Row) -> str:
    """A row as it is told while the benchmark runs."""
    cells = zip(_HEAD, _cells(row), strict=True)
    return "  ".join(f"{name} {cell}" for name, cell in cells if cell)


def markdown(rows: Sequence[Row], notes: Sequence[str]) -> str:
    """The table, and what is to be said about it."""
    lines = table(_HEAD, [_cells(row) for row in rows])
    return "\n".join([*lines, *(["", *(f"- {note}" for note in notes)] if notes else [])]) + "\n"
