"""The table people read, the JSON that the next run is compared with, and the bars."""

from __future__ import annotations

import json
import os
import platform
import subprocess
from collections.abc import Sequence
from dataclasses import dataclass
from datetime import UTC, datetime
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import Any

from benchmarks.lib import stats
from benchmarks.lib.measure import Cell

_LIBRARIES = ("outrider", "torch", "transformers", "grpcio", "protobuf")
_PARTS = ("draft", "wire", "wait", "schedule", "forward", "verify", "commit", "gap", "round")


@dataclass(frozen=True)
class Bar:
    """A target of the project, and what was reached."""

    name: str
    reached: float
    wanted: float
    at_most: bool = False

    @property
    def ok(self) -> bool:
        return self.reached <= self.wanted if self.at_most else self.reached >= self.wanted

    def __str__(self) -> str:
        word = "reached" if self.ok else "MISSED "
        wanted = f"{'<=' if self.at_most else '>='} {self.wanted:g}"
        return f"{word}  {self.name}: {self.reached:.2f} (wanted {wanted})"


@dataclass(frozen=True)
class Equality:
    """A comparison of texts. Only those that must be equal can fail the benchmark."""

    name: str
    must: bool
    divergences: tuple[int | None, ...]  # per prompt; None: equal

    @property
    def ok(self) -> bool:
        return not self.must or all(d is None for d in self.divergences)

    def __str__(self) -> str:
        different = [d for d in self.divergences if d is not None]
        total = len(self.divergences)
        if not different:
            return f"equal    {self.name}: {total} of {total} texts"
        word = "DIFFERS " if self.must else "differs "
        return (
            f"{word} {self.name}: {total - len(different)} of {total} texts equal; "
            f"first difference at output token {min(different)}"
        )


def document(
    cells: Sequence[Cell],
    references: dict[int, str],
    bars: Sequence[Bar],
    equalities: Sequence[Equality],
    setup: dict[str, Any],
) -> dict[str, Any]:
    """All that the benchmark found. `references`: by concurrency, the system ratios are to."""
    by_key = {(c.concurrency, c.system): c for c in cells}
    results = []
    for cell in cells:
        reference = by_key.get((cell.concurrency, references.get(cell.concurrency, "")))
        results.append(
            {
                "system": cell.system,
                "concurrency": cell.concurrency,
                **stats.speeds(cell),
                **stats.speculation(cell),
                "ratio": None if reference is None else stats.ratio(cell, reference),
                "reference": None if reference is None else reference.system,
                "accepted_per_position": stats.accepted_per_position(cell),
                "round_ms": stats.round_parts(cell),
                "rounds_tokens_per_s": [run.tokens_per_s for run in cell.runs],
            }
        )
    return {
        "setup": setup,
        "results": results,
        "bars": [{**vars(b), "ok": b.ok} for b in bars],
        "equality": [{**vars(e), "ok": e.ok} for e in equalities],
    }


def machine() -> dict[str, Any]:
    """What ran where and when."""
    cpu = next(
        (
            line.partition(":")[2].strip()
            for line in Path("/proc/cpuinfo").read_text().splitlines()
            if line.startswith("model name")
        ),
        platform.processor(),
    )
    commit = subprocess.run(
        ["git", "describe", "--always", "--dirty"], capture_output=True, text=True, check=False
    ).stdout.strip()
    return {
        "date": datetime.now(UTC).isoformat(timespec="seconds"),
        "commit": commit,
        "cpu": cpu,
        "cores": os.cpu_count(),
        "python": platform.python_version(),
        **{name: _version(name) for name in _LIBRARIES},
    }


def _version(library: str) -> str:
    try:
        return version(library)
    except PackageNotFoundError:  # Outrider itself may run from its folder
        return "not installed"


def markdown(found: dict[str, Any], title: str = "The pair on a CPU") -> str:
    """The report as Markdown; it reads well in a terminal too."""
    setup = found["setup"]
    lines = [f"# {title}", "", f"`{setup['command']}`", ""]
    shown = ["date", "commit", "gpu", "cpu", "cores", "torch", "transformers", "prompts"]
    shown.append("max_tokens")
    lines += ["; ".join(f"{name} {setup[name]}" for name in shown if name in setup) + ".", ""]
    lines += [f"{note}" for note in setup.get("notes", [])] + [""]
    for concurrency in sorted({r["concurrency"] for r in found["results"]}):
        rows = [r for r in found["results"] if r["concurrency"] == concurrency]
        lines += [f"## {concurrency} concurrent", ""]
        reference = next((r["reference"] for r in rows if r["reference"]), None)
        head = ["system", "tok/s", "min-max", "ratio", "TTFT ms", "TPOT ms"]
        head += ["acc. length", "tok/round", "acceptance", "hits"]
        speeds = [
            [
                r["system"],
                number(r["tokens_per_s"], 1),
                f"{r['tokens_per_s_min']:.0f}-{r['tokens_per_s_max']:.0f}",
                number(r["ratio"]),
                number(r["ttft_ms"], 0),
                number(r["tpot_ms"], 1),
                number(r.get("mean_acceptance_length")),
                number(r.get("tokens_per_round")),
                share(r.get("acceptance_rate")),
                share(r.get("hit_rate")),
            ]
            for r in sorted(rows, key=lambda r: -r["tokens_per_s"])
        ]
        lines += [*table(head, speeds), "", f"Ratios are to {reference}.", ""]
        parts = [r for r in rows if r["round_ms"]]
        if parts:
            lines += ["Where a round's time goes, ms (benchmarks/README.md says what each is):", ""]
            names = [*_PARTS, *(["host_overhead"] if concurrency == 1 else [])]
            body = [[r["system"], *(number(r["round_ms"].get(n)) for n in names)] for r in parts]
            lines += [*table(["system", *(n.replace("_", " ") for n in names)], body), ""]
    return "\n".join(lines)


def verdict(bars: Sequence[Bar], equalities: Sequence[Equality]) -> str:
    """Bars and text equality, a line each."""
    lines = ["## Text equality", "", *(f"- {e}" for e in equalities), ""]
    lines += ["## Bars", "", *(f"- {b}" for b in bars), ""]
    return "\n".join(lines)


def write(found: dict[str, Any], text: str, out: Path) -> None:
    """`out`.json and `out`.md."""
    out.parent.mkdir(parents=True, exist_ok=True)
    out.with_suffix(".json").write_text(json.dumps(found, indent=1) + "\n")
    out.with_suffix(".md").write_text(text)


def number(value: float | None, digits: int = 2) -> str:
    """A table's cell; empty for what is not known."""
    return "" if value is None else f"{value:.{digits}f}"


def share(value: float | None) -> str:
    """The same in percent."""
    return "" if value is None else f"{value:.0%}"


def table(head: Sequence[str], rows: Sequence[Sequence[str]]) -> list[str]:
    """A Markdown table, a line each; the first column to the left, the others to the right."""
    widths = [max(len(r[i]) for r in (head, *rows)) for i in range(len(head))]

    def line(cells: Sequence[str]) -> str:
        padded = [
            c.ljust(w) if i == 0 else c.rjust(w)
            for i, (c, w) in enumerate(zip(cells, widths, strict=True))
        ]
        return f"| {' | '.join(padded)} |"

    rule = "|".join("-" * (w + 2) for w in widths)
    return [line(head), f"|{rule}|", *(line(r) for r in rows)]
