"""Ranks that share each layer verify the same drafts: those of rank 0."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

from tests.support.services.vllm_ranks import BATCHES, FAULTY

RANKS, TIMEOUT_S = 3, 100


def test_drafts_of_rank_0_reach_every_rank_in_every_step(tmp_path: Path) -> None:
    command = [sys.executable, "-m", "tests.support.services.vllm_ranks"]
    processes = [
        subprocess.Popen(
            [*command, str(rank), str(RANKS), str(tmp_path / "meet")],
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
        )
        for rank in range(RANKS)
    ]
    try:
        told = [process.communicate(timeout=TIMEOUT_S) for process in processes]
    finally:
        for process in processes:
            process.kill()
            process.wait()
    assert [process.returncode for process in processes] == [0] * RANKS, told
    first, *others = [[json.loads(line) for line in out.splitlines()] for out, _ in told]
    assert [len(drafts) for drafts in first] == [len(names) for names in BATCHES]
    assert {len(draft) for drafts in first for draft in drafts} >= {0, 1, 2}  # of several lengths
    assert first[FAULTY] == [[], []]
    assert others == [first] * (RANKS - 1)
    assert "drafts were not chosen" in told[0][1]
