"""The embedded heads in a whole stack: no flags but the method, and drafts that come true."""

from __future__ import annotations

import json
from collections.abc import Iterator
from contextlib import nullcontext
from dataclasses import replace
from importlib import resources

import pytest

from tests.support.services.options import GenerateOptions
from tests.support.services.up import EVERY_ROUND, Up, complete_all, drafting, running

pytestmark = pytest.mark.timeout(400)

SAMPLINGS = ({"temperature": 0.0}, {"temperature": 1.0, "seed": 5})
NUM_TOKENS = 48


@pytest.fixture(scope="module")
def dspark_stack() -> Iterator[Up]:
    with running("--method", "dspark", *EVERY_ROUND) as up:  # eagle3 reads some of its states
        assert "proposer_service" in up.services
        yield up


@pytest.fixture(params=["mtp", "dspark", "eagle3"])
def stack(request: pytest.FixtureRequest) -> Iterator[tuple[str, Up]]:
    """A method, and a stack in which a proposer, or the scorer's process, drafts with it."""
    method = request.param
    if method == "mtp":
        with running("--method", method, *EVERY_ROUND, beside=False) as up:
            assert "proposer_service" not in up.services
            yield method, up
        return
    up = request.getfixturevalue("dspark_stack")
    with drafting(up.scorer, method) if method != "dspark" else nullcontext():
        yield method, up


async def test_embedded_head_when_drafting_keeps_text_and_is_accepted(
    stack: tuple[str, Up],
) -> None:
    method, up = stack
    file = resources.files("outrider.models") / "data" / "heldout_prompts.jsonl"
    lines = file.read_text(encoding="utf-8").splitlines()
    requests = [
        GenerateOptions(
            prompt=json.loads(line)["prompt"],
            max_tokens=NUM_TOKENS,
            ignore_eos=True,
            aux_info=True,
            methods=(method,),
            **sampling,
        )
        for line in lines[9:30:10]
        for sampling in SAMPLINGS
    ]
    plain = await complete_all(up.grpc, *(replace(one, speculation=False) for one in requests))
    drafted = await complete_all(up.grpc, *requests)
    accepted = rounds = 0
    for done, expected in zip(drafted, plain, strict=True):
        assert len(expected.token_ids) == NUM_TOKENS
        assert done.token_ids == expected.token_ids
        assert [counts.method for counts in done.aux.by_method] == [method]
        accepted += done.aux.accepted
        rounds += sum(done.aux.k_histogram[1:])
    assert 1 + accepted / rounds > 1.5
