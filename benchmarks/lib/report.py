"""Tables for readers, and JSON that later runs are compared with."""

from __future__ import annotations

import json
import os
import platform
import re
import shlex
import subprocess
import sys
from collections.abc import Callable, Mapping, Sequence
from datetime import UTC, datetime
from importlib.metadata import version
from pathlib import Path
from typing import Any

import outrider
from benchmarks.lib import stats
from benchmarks.lib.measure import Cell
from benchmarks.lib.prompts import Prompts

_LIBRARIES = ("torch", "transformers", "grpcio", "protobuf")
_PARTS = ("draft", "wire", "wait", "schedule", "forward", "verify", "commit", "gap", "round")
_NUMBERS = {
    **{"ratio": ("ratio", 2), "TTFT ms": ("ttft_ms", 0), "TPOT ms": ("tpot_ms", 1)},
    **{"acc. length": ("mean_acceptance_length", 2), "tok/round": ("tokens_per_round", 2)},
}
_SHOWN = ("date", "commit", "gpu", "cpu", "cores", "torch", "transformers", "prompts", "max_tokens")


def machine() -> dict[str, Any]:
    """Return the date, the commit, the CPU and the versions of libraries."""
    cpus = re.findall(r"^model name\s*: (.*)", Path("/proc/cpuinfo").read_text(), re.MULTILINE)
    describe = ["git", "describe", "--always", "--dirty"]
    commit = subprocess.run(describe, capture_output=True, text=True, check=False).stdout
    return {
        "date": datetime.now(UTC).isoformat(timespec="seconds"),
        "commit": commit.strip(),
        "cpu": cpus[0] if cpus else platform.processor(),
        "cores": os.cpu_count(),
        "python": platform.python_version(),
        "outrider": outrider.__version__,
        **{name: version(name) for name in _LIBRARIES},
    }


def command(module: str) -> str:
    """Return the command line of this process, which runs `module`."""
    return shlex.join(["python", "-m", module, *sys.argv[1:]])


def head(title: str, command: str, facts: Mapping[str, object]) -> list[str]:
    """Return the lines at the top of a report."""
    told = "; ".join(f"{name} {value}" for name, value in facts.items())
    return [f"# {title}", "", f"`{command}`", "", f"{told}.", ""]


def document(
    cells: Sequence[Cell], baseline_of: Callable[[str], str], setup: dict[str, Any]
) -> dict[str, Any]:
    """Return the results of systems; `baseline_of` names the system that ratios are to."""
    by_key = {(c.concurrency, c.system): c for c in cells}

    def result(cell: Cell) -> dict[str, Any]:
        reference = by_key.get((cell.concurrency, baseline_of(cell.system)))
        return {
            **{"system": cell.system, "concurrency": cell.concurrency},
            **stats.speeds(cell),
            **stats.speculation(cell),
            "ratio": None if reference is None else stats.ratio(cell, reference),
            "reference": None if reference is None else reference.system,
            "accepted_per_position": stats.accepted_per_position(cell),
            "round_ms": stats.round_parts(cell),
            "rounds_tokens_per_s": [run.tokens_per_s for run in cell.runs],
        }

    return {"setup": setup, "results": [result(cell) for cell in cells]}


def write_cells(
    cells: Sequence[Cell],
    baseline_of: Callable[[str], str],
    setup: dict[str, Any],
    title: str,
    out: Path,
) -> str:
    """Write `document` and return it as Markdown."""
    found = document(cells, baseline_of, setup)
    text = markdown(found, title)
    write(found, text, out)
    return text


def load_facts(module: str, loaded: Prompts) -> dict[str, Any]:
    """Return the machine, the command of `module`, and the prompts that it gave."""
    told = f"{loaded.file} (sha256 {loaded.sha256[:12]})"
    return machine() | {"command": command(module), "prompts": told}


def markdown(found: dict[str, Any], title: str) -> str:
    """Return a `document` as Markdown."""
    setup = found["setup"]
    lines = head(title, setup["command"], {n: setup[n] for n in _SHOWN if n in setup})
    lines += [*setup["notes"], ""]
    for concurrency in sorted({r["concurrency"] for r in found["results"]}):
        rows = [r for r in found["results"] if r["concurrency"] == concurrency]
        baselines = dict.fromkeys(r["reference"] for r in rows if r["reference"])
        lines += [f"## {concurrency} concurrent", "", *_speeds(rows), ""]
        if len(baselines) == 1:
            lines += [f"Ratios are to {next(iter(baselines))}.", ""]
        parts = [r for r in rows if r["round_ms"]]
        if parts:
            lines += ["The parts of a round in ms (benchmarks/README.md defines them):", ""]
            body = [[r["system"], *(number(r["round_ms"].get(n)) for n in _PARTS)] for r in parts]
            lines += [*table(["system", *_PARTS], body), ""]
    return "\n".join(lines)


def _speeds(rows: Sequence[dict[str, Any]]) -> list[str]:
    names = ["system", "tok/s", "min-max", *_NUMBERS, "acceptance", "hits"]
    body = [
        [r["system"], number(r["tokens_per_s"], 1)]
        + [f"{r['tokens_per_s_min']:.0f}-{r['tokens_per_s_max']:.0f}"]
        + [number(r.get(name), digits) for name, digits in _NUMBERS.values()]
        + ["" if r.get(n) is None else f"{r[n]:.0%}" for n in ("acceptance_rate", "hit_rate")]
        for r in sorted(rows, key=lambda r: -r["tokens_per_s"])
    ]
    return table(names, body)


def publish(
    title: str,
    module: str,
    lines: Sequence[str],
    results: object,
    out: Path | None,
    **facts: object,
) -> None:
    """Print a report of `module`, and write it and `results` where `out` says so."""
    setup, line = machine() | facts, command(module)
    text = "\n".join([*head(title, line, setup), *lines, ""])
    print(text)
    if out is not None:
        write({"setup": setup | {"command": line}, "results": results}, text, out)


def write(found: dict[str, Any], text: str, out: Path) -> None:
    """Write `out`.json and `out`.md, also where `out` has dots."""
    out.parent.mkdir(parents=True, exist_ok=True)
    out.with_name(f"{out.name}.json").write_text(json.dumps(found, indent=1) + "\n")
    out.with_name(f"{out.name}.md").write_text(text)


def number(value: float | None, digits: int = 2) -> str:
    """Return a table's cell, empty for None."""
    return "" if value is None else f"{value:.{digits}f}"


def table(head: Sequence[str], rows: Sequence[Sequence[str]]) -> list[str]:
    """Return the lines of a Markdown table; all columns but the first align to the right."""
    widths = [max(len(r[i]) for r in (head, *rows)) for i in range(len(head))]

    def line(cells: Sequence[str]) -> str:
        padded = [
            c.ljust(w) if i == 0 else c.rjust(w)
            for i, (c, w) in enumerate(zip(cells, widths, strict=True))
        ]
        return f"| {' | '.join(padded)} |"

    rule = "|".join("-" * (w + 2) for w in widths)
    return [line(head), f"|{rule}|", *(line(r) for r in rows)]
