"""The benchmark of copying methods: its traces, its forced target, its report."""

from __future__ import annotations

import ast
import re

import pytest

from benchmarks.edit_traces import EDITS, agentic, edits
from benchmarks.forced_target import ForcedTarget, replay
from benchmarks.reference_report import Row, bars
from outrider.drafting.copying.deterministic import DeterministicProposer
from outrider.drafting.proposer import Proposer
from outrider.engine.policy.fixed import FixedPolicy
from outrider.params import Advice

TEXT = """def f(a, b):
    '''Adds.'''
    if a:
        b += b
    total = a + b
    return total
"""


@pytest.mark.parametrize(
    ("kind", "edited"),
    [
        ("rename a variable", re.sub(r"\bb\b", "current_b", TEXT)),
        ("add an argument", TEXT.replace("b):", "b, verbose=False):")),
        ("insert logging", TEXT),
        ("delete a branch", TEXT.replace("    if a:\n        b += b\n", "")),
    ],
)
def test_an_edit_is_what_it_says(kind: str, edited: str) -> None:
    if kind == "add an argument":
        edited = edited.replace(
            "Adds.'''\n", "Adds.'''\n    if verbose:\n        print('called')\n"
        )
    if kind == "insert logging":
        edited = edited.replace("Adds.'''\n", "Adds.'''\n    logger.debug('f begins')\n")
        edited = edited.replace("    return", "    logger.debug('f returns')\n    return")
    assert EDITS[kind](TEXT) == edited


def test_traces_are_the_same_every_time_and_edits_of_real_code() -> None:
    traces = edits(limit=8)
    assert traces == edits(limit=8)
    assert {trace.kind for trace in traces} == set(EDITS)
    for trace in traces:
        assert ast.dump(ast.parse(trace.output)) != ast.dump(ast.parse(trace.advice))
    turns = agentic(tasks=2, attempts=2)
    assert turns == agentic(tasks=2, attempts=2)
    assert all(trace.prompt.startswith("You are") for trace in turns)


def test_a_forced_target_says_its_text_with_and_without_drafts() -> None:
    prompt, output = (1, 2, 3), tuple(range(10, 60))
    advice = Advice(token_ids=(*output[:20], 5, *output[20:]), edit=True)
    rounds = []
    proposers: tuple[Proposer | None, ...] = (None, DeterministicProposer())
    for session, proposer in enumerate(proposers):
        target = ForcedTarget(64, 100)
        run = replay(target, FixedPolicy(128), session, prompt, output, proposer, advice, 128)
        assert run.output_tokens == 50
        rounds.append(run.stats.rounds)
    assert rounds[0] == 50
    assert rounds[1] <= 4


def test_bars_say_what_was_missed() -> None:
    rows = [
        Row("edits", "all", "deterministic", 100, 4, 0, 0, 25.0),
        Row("edits", "all", "suffix", 100, 10, 0, 0, 10.0),
        Row("agentic", "agentic", "suffix", 100, 20, 0, 0, 5.0),
        Row("agentic", "agentic", "ngram", 100, 25, 0, 0, 4.0),
        Row("agentic", "all", "arctic", 100, 25, 0, 0, 4.0),
    ]
    found = bars(rows, {"ngram": {"draft_us": 60.0}})
    assert [line.split(":")[0] for line in found] == [
        *("- reached", "- MISSED", "- MISSED", "- reached"),
    ]
