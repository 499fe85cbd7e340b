"""What the stamps of `benchmarks.way` say, and its tables."""

from __future__ import annotations

import bisect
import json
import math
import statistics
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Final

from benchmarks.processes import ProcessError
from benchmarks.stamped import Round

PARTS: Final = (
    ("of the engine", "result", "publish"),
    ("to the loop", "publish", "hub"),  # of the scorer
    ("to gRPC", "hub", "sent"),
    ("wire there", "sent", "received"),
    ("to the thread", "received", "applied"),  # of the proposer
    ("cycle before", "applied", "asked"),
    ("cycle after", "guessed", "drafted"),
    ("to gRPC", "drafted", "answered"),
    ("wire back", "answered", "arrived"),
    ("to the queue", "arrived", "posted"),
    ("to the engine", "posted", "taken"),
)
Stamps = dict[str, dict[Round, int]]


@dataclass(frozen=True)
class Turn:
    """Some requests at once, in one stack."""

    sessions: int
    began_ns: int
    ended_ns: int
    cpu_s: tuple[float, ...]  # scorer, its event loop, proposer, its event loop
    tokens: int


@dataclass(frozen=True)
class Row:
    """One stack and number of sessions. Milliseconds, per round; CPU per step."""

    stack: str
    sessions: int
    rounds: int
    rounds_per_step: float
    cycles_per_step: float  # of the proposer, for one step's commits; 1: all are drafted together
    tokens_per_s: float
    way: tuple[float, float, float]  # 10th percentile, median, 90th; of rounds after the first
    first_way: tuple[float, float, float]  # of first rounds
    parts: tuple[tuple[float, float], ...]  # 10th percentile and median, in the order of PARTS
    first_parts: tuple[tuple[float, float], ...]
    cpu_ms: tuple[float, ...]  # as in Turn


def row(
    name: str, files: Sequence[Path], turns: Sequence[Turn], sessions: int, prompt_tokens: int
) -> Row:
    """What the stamps in `files` say of all turns with so many sessions."""
    stamps: Stamps = {}
    steps: list[tuple[int, int]] = []
    for file in files:
        noted = json.loads(file.read_text())
        steps += noted["steps"]
        for point, taken in noted["rounds"].items():
            stamps[point] = {(session, length): ns for session, length, ns in taken}
    missing = {point for _, *points in PARTS for point in points} - stamps.keys()
    if missing:
        raise ProcessError(f"{name}: its benchmarks note other stamps: no {', '.join(missing)}")
    turns = [turn for turn in turns if turn.sessions == sessions]
    published = {
        key: ns
        for key, ns in stamps["publish"].items()
        if any(turn.began_ns <= ns <= turn.ended_ns for turn in turns)
    }
    complete = [
        key
        for key in published  # a request's last commits ask for no draft
        if all(key in of_point for of_point in stamps.values())
        and not _within(stamps["posted"][key], steps)
    ]
    if not complete:
        raise ProcessError(f"{name}: no round was drafted for")

    def parts_of(keys: Sequence[Round]) -> list[list[float]]:
        return [
            [(stamps[end][key] - stamps[begin][key]) * 1e-6 for key in keys]
            for _, begin, end in PARTS
        ]

    def ways(keys: Sequence[Round]) -> tuple[float, float, float]:
        return _deciles([sum(of_round) for of_round in zip(*parts_of(keys), strict=True)])

    first = [key for key in complete if key[1] == prompt_tokens + 1]
    later = [key for key in complete if key[1] != prompt_tokens + 1]
    cycles: dict[int, set[int]] = {}  # that drafted from a step's commits
    for key in complete:
        cycles.setdefault(published[key], set()).add(stamps["asked"][key])
    num_steps = len(set(published.values()))
    used = [sum(of_turns) for of_turns in zip(*(turn.cpu_s for turn in turns), strict=True)]
    return Row(
        stack=name,
        sessions=sessions,
        rounds=len(later),
        rounds_per_step=len(published) / num_steps,
        cycles_per_step=sum(map(len, cycles.values())) / len(cycles),
        tokens_per_s=sum(turn.tokens for turn in turns)
        / sum((turn.ended_ns - turn.began_ns) * 1e-9 for turn in turns),
        way=ways(later),
        first_way=ways(first),
        parts=tuple(_deciles(each)[:2] for each in parts_of(later)),
        first_parts=tuple(_deciles(each)[:2] for each in parts_of(first)),
        cpu_ms=tuple(seconds * 1e3 / num_steps for seconds in used),
    )


def _within(ns: int, steps: Sequence[tuple[int, int]]) -> bool:
    """Whether the engine's thread was in a forward, for which a block has to wait."""
    before = bisect.bisect(steps, ns, key=lambda step: step[0])
    return before > 0 and ns <= steps[before - 1][1]


def _deciles(values: Sequence[float]) -> tuple[float, float, float]:
    if len(values) < 2:  # a request alone, in few turns
        only = values[0] if values else math.nan
        return only, only, only
    found = statistics.quantiles(values, n=10)
    return found[0], found[4], found[8]


def report(rows: Sequence[Row]) -> None:
    """Two tables."""
    head = (
        "stack",
        "sessions",
        "rounds",
        "per step",
        "cycles",
        "tokens/s",
        "way, ms: p10",
        "median",
        "p90",
    )
    more = ("first rounds: p10", "median", "p90")
    print(f"| {' | '.join(head + more)} | scorer CPU (its loop), ms per step | proposer |")
    print("|---" * (2 + len(head) + len(more)) + "|")
    for r in rows:
        which = f"{r.stack} | {r.sessions} | {r.rounds} | {r.rounds_per_step:.1f}"
        which += f" | {r.cycles_per_step:.2f} | {r.tokens_per_s:.0f}"
        way = " | ".join(f"{each:.2f}" for each in (*r.way, *r.first_way))
        cpu = " | ".join(f"{r.cpu_ms[i]:.2f} ({r.cpu_ms[i + 1]:.2f})" for i in (0, 2))
        print(f"| {which} | {way} | {cpu} |")
    for title in ("Parts", "Parts of first rounds"):
        print(f"\n{title}, ms: 10th percentile and median\n")
        print(f"| stack | sessions | {' | '.join(name for name, _, _ in PARTS)} |")
        print("|---" * (2 + len(PARTS)) + "|")
        for r in rows:
            found = r.parts if title == "Parts" else r.first_parts
            parts = " | ".join(f"{low:.2f} {median:.2f}" for low, median in found)
            print(f"| {r.stack} | {r.sessions} | {parts} |")
