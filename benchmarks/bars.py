"""What the project set out to reach, and how texts compare where equality is not demanded."""

from __future__ import annotations

from collections.abc import Sequence

from benchmarks import report, stats
from benchmarks.measure import Cell


def find_bars(cells: Sequence[Cell], fastest: str) -> list[report.Bar]:
    """What the project set out to reach, as far as it was measured."""
    by_key = {(c.system, c.concurrency): c for c in cells}

    def bar(name: str, system: str, reference: str, concurrency: int, wanted: float) -> None:
        ours, theirs = by_key.get((system, concurrency)), by_key.get((reference, concurrency))
        if ours and theirs:
            bars.append(report.Bar(name, stats.ratio(ours, theirs), wanted))

    bars: list[report.Bar] = []
    ours = "outrider draft_model bf16"
    assisted = next((c.system for c in cells if " assisted " in c.system), "")
    bar("single stream to generate", ours, fastest, 1, 2.0)
    bar("single stream to assisted generation", ours, assisted, 1, 1.3)
    bar("single stream to vLLM draft_model", ours, "vllm draft_model bf16", 1, 1.0)
    bar("engine without speculation to generate", "outrider scorer alone bf16", fastest, 1, 1.3)
    bar("16 concurrent to 16 sequential generate", ours, fastest, 16, 3.0)
    if single := by_key.get((ours, 1)):
        overhead = stats.round_parts(single).get("host_overhead")
        if overhead is not None:
            bars.append(report.Bar("host overhead of a round, ms", overhead, 1.5, at_most=True))
    return bars


def differences_bf16(cells: Sequence[Cell]) -> list[report.Equality]:
    """Not demanded: in bf16 the shape of a batch changes the last bits."""
    single = {c.system: c for c in cells if c.concurrency == 1}
    pairs = [
        ("outrider draft_model bf16", "outrider none bf16"),
        ("outrider ngram bf16", "outrider none bf16"),
        ("outrider none bf16", "transformers generate bf16"),
        ("outrider none bf16", "transformers generate fp32"),
        ("transformers generate bf16", "transformers generate fp32"),
        ("vllm draft_model bf16", "vllm none bf16"),
        ("vllm none bf16", "transformers generate bf16"),
        ("llama.cpp bf16 draft", "llama.cpp bf16"),
        ("llama.cpp bf16", "transformers generate bf16"),
    ]
    return [
        report.Equality(f"{a} to {b}", False, tuple(stats.divergences(single[a], single[b])))
        for a, b in pairs
        if a in single and b in single
    ]
