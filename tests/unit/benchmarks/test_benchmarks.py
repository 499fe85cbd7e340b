"""The benchmark's arithmetic: what it reports must follow from what was measured."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from importlib import resources
from pathlib import Path

import pytest

from benchmarks.lib import report, stats
from benchmarks.lib.measure import Cell, Plan, measure
from benchmarks.lib.processes import ProcessError
from benchmarks.lib.prompts import Prompts
from benchmarks.lib.records import Completion, Run, TokenIds, first_divergence


def run(num_tokens: int, wall_s: float) -> Run:
    return Run((Completion(tuple(range(num_tokens)), wall_s, wall_s / 2),), wall_s)


def test_ratio_on_a_slowing_machine_compares_pairs_of_rounds() -> None:
    # The machine slowed down fourfold in the second round; the ratio does not see it.
    ours = Cell("a", 1, [run(100, 1.0), run(100, 4.0)])
    theirs = Cell("b", 1, [run(100, 2.0), run(100, 8.0)])
    assert stats.ratio(ours, theirs) == 2.0


@dataclass
class Failing:
    """A system that fails after so many runs."""

    name: str
    runs: int
    concurrencies: frozenset[int] = frozenset({1})

    def run(
        self,
        prompts: Sequence[TokenIds],
        max_tokens: int,
        concurrency: int,  # noqa: ARG002
    ) -> Run:
        self.runs -= 1
        if self.runs < 0:
            raise ProcessError("it hangs")
        return run(len(prompts) * max_tokens, 1.0)


def test_measure_where_one_system_fails_goes_on_with_the_others() -> None:
    prompts = Prompts(((1,), (2,)), "prompts", "")
    failures: dict[str, str] = {}
    systems = [Failing("a", 9), Failing("b", 1), Failing("c", 9)]
    cells = measure(systems, Plan(1, 3, 2), prompts, 4, [], failures)
    assert [(cell.system, len(cell.runs)) for cell in cells] == [("a", 3), ("c", 3)]
    assert failures == {"b": "it hangs"}
    assert systems[1].runs == -1  # it is asked once more, and then left alone
    with pytest.raises(ProcessError, match="it hangs"):
        measure(systems, Plan(1, 3, 2), prompts, 4, [])


def test_speeds_of_a_cell_are_medians() -> None:
    numbers = stats.speeds(Cell("a", 1, [run(11, 2.0)], foreign_cpu=[0.0]))
    assert numbers["tokens_per_s"] == 5.5
    assert numbers["ttft_ms"] == 1000.0
    assert numbers["tpot_ms"] == 100.0


def test_speculation_with_undrafted_rounds_counts_hits_of_the_others() -> None:
    # 10 rounds, 2 of them without a draft; 8 drafts of 4 tokens, half accepted.
    completion = Completion(
        tuple(range(26)),
        1.0,
        stats={"undrafted_rounds": 2.0, "hits": 6.0, "misses_late": 1.0, "misses_wrong": 1.0},
    )
    numbers = stats.speculation(Cell("a", 1, [Run((completion,), 1.0, 10, 32, 16)]))
    assert numbers["mean_acceptance_length"] == 3.0
    assert numbers["acceptance_rate"] == 0.5
    assert numbers["hit_rate"] == 0.75
    assert numbers["tokens_per_round"] == 2.6


def test_speculation_with_rounds_alone_is_tokens_per_round() -> None:
    numbers = stats.speculation(Cell("a", 1, [Run(run(30, 1.0).completions, 1.0, 10)]))
    assert numbers == {"mean_acceptance_length": 3.0}


@pytest.mark.parametrize(
    ("a", "b", "expected"),
    [((1, 2), (1, 2), None), ((1, 2), (1, 3), 1), ((1, 2), (1, 2, 3), 2), ((), (1,), 0)],
)
def test_first_divergence_of_two_texts_is_the_first_differing_index(
    a: tuple[int, ...], b: tuple[int, ...], expected: int | None
) -> None:
    assert first_divergence(a, b) == expected


def test_prompts_group_at_the_end_wraps_around() -> None:
    prompts = Prompts(((1,), (2,), (3,)), "", "")
    assert prompts.group(1, 2) == ((3,), (1,))


def test_load_of_categories_tells_that_of_each_prompt() -> None:
    from benchmarks.lib.prompts import load

    file = Path(__file__).parents[3] / "benchmarks" / "prompts" / "categories.jsonl"
    target = Path(str(resources.files("outrider.models"))) / "data" / "target"
    loaded = load(file, target, count=100, max_prompt_tokens=256)
    assert len(loaded.token_ids) == len(loaded.categories) == len(file.read_text().splitlines())
    assert len(set(loaded.categories)) == 11


def test_load_without_the_file_raises_prompts_error(tmp_path: Path) -> None:
    from benchmarks.lib.prompts import PromptsError, load

    with pytest.raises(PromptsError, match="does not exist"):
        load(tmp_path / "none.jsonl", tmp_path, count=1, max_prompt_tokens=8)


def test_write_results_to_a_name_with_dots_keeps_the_name(tmp_path: Path) -> None:
    for temperature in (0.0, 0.5):
        report.write({}, "text", tmp_path / f"load-{temperature}")
    names = sorted(path.name for path in tmp_path.iterdir())
    assert names == ["load-0.0.json", "load-0.0.md", "load-0.5.json", "load-0.5.md"]
