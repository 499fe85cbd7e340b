"""What draft_ahead.py makes of measurements, and that it keeps them when vLLM cannot run."""

from __future__ import annotations

import json
import subprocess
import sys
from dataclasses import replace
from pathlib import Path

import pytest
from benchmarks.ahead_pair import Sample
from benchmarks.ahead_rows import Cell, Row, against_vllm, markdown, row_of, vllm_row

from benchmarks import draft_ahead
from benchmarks.lib.processes import ProcessError
from benchmarks.lib.records import Completion, Run

ARGS = draft_ahead.parser().parse_args(["--scorer-gpu", "0", "--proposer-gpu", "1"])


def sample(speed: float, plain: float) -> Sample:
    aux = dict.fromkeys(("hits", "misses_late", "misses_wrong", "rounds_after_miss"), 2.0)
    aux |= {"rounds": 10.0, "undrafted_rounds": 2.0, "drafted": 32.0, "accepted": 16.0}
    aux |= {"rounds_after_hit": 8.0, "hits_after_hit": 6.0, "hits_after_miss": 1.0}
    return Sample(speed, plain, aux | {"propose_ms": 64.0}, 100, 50, 3, 4)


def row(mode: str, speed: float, plain: float, batch: int = 8) -> Row:
    per_gpu = speed / 2 if mode == "ahead" else speed
    return Row(mode, 0.0, batch, 0.0, speed, plain, speed / plain, per_gpu)


def run(num_tokens: int, *counts: int) -> Run:
    return Run((Completion(tuple(range(num_tokens)), 1.0),), 1.0, *counts)


def test_a_row_pairs_each_repetition_with_its_own_run_without_speculation() -> None:
    # The machine was three times as fast in the second repetition, twice in the third.
    samples = [sample(20.0, 10.0), sample(60.0, 30.0), sample(40.0, 25.0)]
    cell = Cell("ahead", 0.0, 8, 0.0, samples)
    found = row_of(cell, 0.0, ARGS)
    assert (found.tokens_per_s, found.plain_tokens_per_s, found.speed_up) == (40.0, 25.0, 2.0)
    assert (found.gpu_normalised, found.acceptance_length, found.acceptance) == (20.0, 3.0, 0.5)
    assert (found.hits_after_hit, found.hits_after_miss, found.late) == (0.75, 0.5, 0.2)
    assert (found.bytes_to, found.texts_equal, found.predicted) == (10.0, 0.75, None)
    assert cell.draft_step_ms(4) == 2.0


def test_bytes_are_told_only_of_what_went_through_the_proxy() -> None:
    direct = replace(sample(20.0, 10.0), bytes_to=0, bytes_from=0)
    found = row_of(Cell("ahead", 0.0, 1, 0.0, [direct]), 0.0, ARGS)
    assert (found.bytes_to, found.bytes_from) == (None, None)


def test_only_a_single_request_is_predicted() -> None:
    cells = [Cell("colocated", 0.0, batch, 0.0, [sample(20.0, 10.0)]) for batch in (1, 2)]
    alone, two = [row_of(cell, 2.0, ARGS) for cell in cells]
    assert alone.predicted == pytest.approx(3.0 * 100 / (100 + 4 * 2.0 + 0.5))
    assert two.predicted is None


def test_vllm_stands_beside_outrider_without_speculation() -> None:
    ours = [row("ahead", 300.0, 100.0), row("colocated", 200.0, 120.0), row("ahead", 9.0, 5.0, 1)]
    found = vllm_row("vllm draft_model", 8, [run(220, 100, 400, 150), run(330, 100, 400, 50)], ours)
    assert (found.tokens_per_s, found.plain_tokens_per_s, found.speed_up) == (275.0, 110.0, 2.5)
    assert (found.acceptance_length, found.acceptance) == (2.0, 0.25)
    none = vllm_row("vllm none", 8, [run(110)], ours)
    assert (none.speed_up, none.acceptance_length) == (1.0, None)
    assert "| vllm none" in markdown([none], ["a note"])


def test_the_last_word_compares_each_sides_best_mode() -> None:
    ours = [row("ahead", 300.0, 100.0), row("remote", 80.0, 100.0), row("ahead", 40.0, 50.0, 32)]
    theirs = [row("vllm none", 120.0, 100.0), row("vllm draft_model", 200.0, 100.0)]
    theirs += [row("vllm none", 25.0, 50.0, 32)]
    eight, many = against_vllm(ours, theirs)
    assert "ahead, RT 0 ms: 300.0" in eight
    assert "vllm draft_model: 200.0; 1.50 times vLLM's, per GPU 0.75." in eight
    assert "32 at once" in many
    assert "no speculation: 50.0" in many
    assert "2.00 times vLLM's, per GPU 2.00." in many


def test_what_cannot_be_measured_is_refused_at_once(capsys: pytest.CaptureFixture[str]) -> None:
    for flags, said in [
        (["--waves", "0"], "at least 1"),
        (["--simulated", "--vllm", sys.executable], "nothing slows vLLM down"),
        (["--temperature", "1", "--vllm", sys.executable], "temperature 0"),
    ]:
        with pytest.raises(SystemExit):
            draft_ahead.main(flags)
        assert said in capsys.readouterr().err
    with pytest.raises(ProcessError, match="neither a folder"):
        draft_ahead.VllmPlace.find("no-such-python")


def test_requests_follow_each_other_and_a_vllm_that_fails_loses_nothing(tmp_path: Path) -> None:
    out = tmp_path / "found"
    flags = ["--modes", "ahead", "--round-trip-ms", "0", "0.5", "--temperature", "0"]
    flags += [
        "--batch",
        "2",
        "--waves",
        "2",
        "--rounds",
        "1",
        "--max-tokens",
        "8",
        "--timeout",
        "120",
    ]
    # This Python has no vLLM.
    flags += ["--max-prompt-tokens", "32", "--vllm", sys.executable, "--out", str(out)]
    command = [sys.executable, "-m", "benchmarks.draft_ahead", *flags]
    done = subprocess.run(command, capture_output=True, text=True, timeout=300, check=False)
    assert done.returncode == 0, done.stderr
    found = json.loads(out.with_suffix(".json").read_text())
    for measured in found["results"]:
        assert (measured["mode"], measured["batch"], measured["texts_equal"]) == ("ahead", 2, 1.0)
        assert measured["acceptance_length"] >= 1.0
    by_delay = {measured["round_trip_ms"]: measured for measured in found["results"]}
    assert by_delay[0.0]["bytes_to"] is None
    assert by_delay[0.5]["bytes_to"] > 0
    notes = found["setup"]["notes"]
    assert [note.partition(":")[0] for note in notes] == [
        "vLLM none failed",
        "vLLM draft_model failed",
    ]
