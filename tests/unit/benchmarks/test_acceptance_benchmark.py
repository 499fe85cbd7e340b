"""The benchmark of verification rules, on a tiny pair."""

from __future__ import annotations

from pathlib import Path

import pytest

from benchmarks.acceptance import NONE, RULES, Pair, document, row
from outrider.params import SamplingParams
from tests.support.checkpoints.tiny_pair import save_pair


def test_acceptance_of_pair_runs_every_rule_and_coupled_keeps_the_text(tmp_path: Path) -> None:
    pair = Pair(*save_pair(tmp_path, eps=0.1), k=3)
    prompt, sampling = tuple(range(2, 30)), SamplingParams(0.8, seed=4)
    samples = {name: [pair.run(prompt, sampling, 24, name)] for name in RULES}
    rows = {name: row(0.8, name, samples[name], samples[NONE]) for name in RULES}
    assert samples[NONE][0].token_ids == samples["coupled"][0].token_ids
    assert all(len(sample.token_ids) == 24 for (sample,) in samples.values())
    assert (rows[NONE].acceptance, rows[NONE].tokens_per_round) == (None, 1.0)
    for name in RULES[1:]:
        one, stats = rows[name], samples[name][0].stats
        assert one.acceptance == stats.accepted / stats.drafted > 0
        with_draft = stats.rounds - stats.k_histogram[0]
        assert one.length == pytest.approx(1 + stats.accepted / with_draft)
        assert one.tokens_per_round == 24 / stats.rounds > 1
    lines = document(list(rows.values()), "command", {"cpu": "this", "k": 3})
    assert sum(line.startswith("| 0.8 ") for line in lines) == len(RULES)
