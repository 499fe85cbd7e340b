"""Interleaved repetitions: in each round every system gets the same prompts."""

from __future__ import annotations

import os
import time
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path

from benchmarks.lib.processes import Child, ProcessError, cpu_seconds
from benchmarks.lib.program import say
from benchmarks.lib.prompts import Prompts
from benchmarks.lib.records import Run, System
from benchmarks.lib.stack import OutriderSystem


@dataclass
class Cell:
    """One system at one concurrency, with a run per round."""

    system: str
    concurrency: int
    runs: list[Run] = field(default_factory=list)
    # For Outrider, the seconds that the scorer's steps took, by part, and their number.
    step_seconds: dict[str, float] = field(default_factory=dict)
    # CPU seconds per second of processes that are not the benchmark's.
    foreign_cpu: list[float] = field(default_factory=list)


@dataclass(frozen=True)
class Plan:
    """The number of rounds and prompts at one concurrency."""

    concurrency: int
    rounds: int
    prompts_per_round: int


def measure(
    systems: Sequence[System],
    plan: Plan,
    prompts: Prompts,
    max_tokens: int,
    children: Sequence[Child],
    failures: dict[str, str] | None = None,
) -> list[Cell]:
    """Run `plan`. Raises `ProcessError` where a system fails or drafts nothing.

    With `failures`, a system that fails is told of there by its name, and the others go on.
    """
    chosen = [s for s in systems if plan.concurrency in s.concurrencies]
    cells = [Cell(s.name, plan.concurrency) for s in chosen]
    for r in range(plan.rounds):
        group = prompts.group(r, plan.prompts_per_round)
        for i in range(len(chosen)):
            # The order rotates, so that no system always runs behind the same one.
            j = (i + r) % len(chosen)
            system, cell = chosen[j], cells[j]
            if failures is not None and system.name in failures:
                continue
            before = system.stack.step_seconds() if isinstance(system, OutriderSystem) else {}
            cpu = _foreign_cpu_seconds(children)
            try:
                run = system.run(group, max_tokens, plan.concurrency)
            except ProcessError as error:
                if failures is None:
                    raise
                failures[system.name] = str(error)
                say(f"{system.name} failed: {error}")
                continue
            spent = max(0.0, _foreign_cpu_seconds(children) - cpu)
            cell.foreign_cpu.append(spent / run.wall_s)
            cell.runs.append(run)
            if isinstance(system, OutriderSystem):
                for part, seconds in system.stack.step_seconds().items():
                    seconds += cell.step_seconds.get(part, 0.0) - before.get(part, 0.0)
                    cell.step_seconds[part] = seconds
            where = f"{plan.concurrency:>2} concurrent, round {r + 1}/{plan.rounds}"
            say(f"{where}: {system.name}: {run.tokens_per_s:.1f} tok/s")
    for system, cell in zip(chosen, cells, strict=True):
        # With many requests the policy may choose not to draft, and prompt lookup may find nothing.
        speculates = isinstance(system, OutriderSystem) and system.method not in ("none", "ngram")
        if speculates and plan.concurrency == 1 and not any(run.drafted for run in cell.runs):
            raise ProcessError(f"{system.name}: nothing was drafted; the proposer does not work")
    return [cell for cell in cells if len(cell.runs) == plan.rounds]


def _foreign_cpu_seconds(children: Sequence[Child]) -> float:
    """Return the CPU time so far that neither this process nor its children used."""
    first = Path("/proc/stat").read_text().split("\n", 1)[0].split()[1:]
    user, nice, system, _idle, _iowait, irq, softirq, steal = map(int, first[:8])
    busy = (user + nice + system + irq + softirq + steal) / os.sysconf("SC_CLK_TCK")
    pids = [child.pid for child in children if child.running]
    return busy - time.process_time() - cpu_seconds(pids)
