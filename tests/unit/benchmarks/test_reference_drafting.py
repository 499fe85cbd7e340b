"""The benchmark of copying methods: its traces and its forced target."""

from __future__ import annotations

import ast
import re

import pytest

from benchmarks.lib.edit_traces import EDITS, agentic, edits
from benchmarks.lib.forced_target import ForcedTarget, replay, request_of
from outrider.drafting.copying.deterministic import DeterministicProposer
from outrider.drafting.proposer import Proposer
from outrider.params import Advice
from outrider.policy.fixed import FixedPolicy

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
def test_edits_of_each_kind_change_what_it_says(kind: str, edited: str) -> None:
    if kind == "add an argument":
        edited = edited.replace(
            "Adds.'''\n", "Adds.'''\n    if verbose:\n        print('called')\n"
        )
    if kind == "insert logging":
        edited = edited.replace("Adds.'''\n", "Adds.'''\n    logger.debug('f begins')\n")
        edited = edited.replace("    return", "    logger.debug('f returns')\n    return")
    assert EDITS[kind](TEXT) == edited


def test_traces_made_twice_are_equal_and_edit_real_code() -> None:
    traces = edits(limit=8)
    assert traces == edits(limit=8)
    assert {trace.kind for trace in traces} == set(EDITS)
    for trace in traces:
        assert ast.dump(ast.parse(trace.output)) != ast.dump(ast.parse(trace.advice))
    turns = agentic(tasks=2, attempts=2)
    assert turns == agentic(tasks=2, attempts=2)
    assert all(trace.prompt.startswith("You are") for trace in turns)


def test_forced_target_with_and_without_drafts_emits_its_text() -> None:
    prompt, output = (1, 2, 3), tuple(range(10, 60))
    advice = Advice(token_ids=(*output[:20], 5, *output[20:]), edit=True)
    rounds = []
    proposers: tuple[Proposer | None, ...] = (None, DeterministicProposer())
    for session, proposer in enumerate(proposers):
        target = ForcedTarget(64, 100)
        request = request_of(session, prompt, output, advice, 128)
        run = replay(target, FixedPolicy(128), request, output, proposer, 128)
        assert len(run.token_ids) == 50
        rounds.append(run.stats.rounds)
    assert rounds[0] == 50
    assert rounds[1] <= 4
