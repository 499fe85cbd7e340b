"""Comparisons of texts."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from benchmarks.lib import stats
from benchmarks.lib.measure import Cell


@dataclass(frozen=True)
class Equality:
    """A comparison of texts. A difference fails the benchmark if `must` is set."""

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


def compare(cell: Cell, reference: Cell, *, must: bool, name: str = "") -> Equality:
    """Compare the texts of two systems for the same prompts."""
    differences = tuple(stats.divergences(cell, reference))
    return Equality(name or f"{cell.system} to {reference.system}", must, differences)


def of_kind(cells: Sequence[Cell]) -> list[Equality]:
    """Compare systems in bf16, where the shape of a batch changes the last bits."""
    single = {c.system: c for c in cells if c.concurrency == 1 and "bf16" in c.system}
    return [
        compare(cell, single[other], must=False)
        for name, cell in single.items()
        for other in ("outrider none bf16", "transformers generate bf16")
        if other in single and name != other
    ]
