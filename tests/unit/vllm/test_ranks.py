"""Ranks that share each layer verify the same drafts: those of rank 0."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest

from tests.support.services.vllm_ranks import BATCHES, FAULTY

TIMEOUT_S = 100


@pytest.mark.parametrize("ranks", [2, 3])
def test_drafts_of_rank_0_reach_every_rank_in_every_step(ranks: int, tmp_path: Path) -> None:
    command = [sys.executable, "-m", "tests.support.services.vllm_ranks"]
    processes = [
        subprocess.Popen(
            [*command, str(rank), str(ranks), str(tmp_path / "meet")],
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
        )
        for rank in range(ranks)
    ]
    try:
        told = [process.communicate(timeout=TIMEOUT_S) for process in processes]
    finally:
        for process in processes:
            process.kill()
            process.wait()
    assert [process.returncode for process in processes] == [0] * ranks, told
    first, *others = [[json.loads(line) for line in out.splitlines()] for out, _ in told]
    assert [len(drafts) for drafts in first] == [len(names) for names in BATCHES]
    assert {len(draft) for drafts in first for draft in drafts} >= {0, 1, 2}  # of several lengths
    assert first[FAULTY] == [[], []]
    assert others == [first] * (ranks - 1)
    assert "drafts were not chosen" in told[0][1]
