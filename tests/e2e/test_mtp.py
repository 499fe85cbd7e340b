"""A model that brings its own prediction module: one checkpoint, served and drafted with."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace

import pytest

from tests.support.checkpoints.deepseek_target import save_deepseek
from tests.support.services.options import GenerateOptions
from tests.support.services.up import EVERY_ROUND, Up, complete, running

pytestmark = pytest.mark.timeout(400)

SAMPLINGS = {"greedy": {"temperature": 0.0}, "seeded": {"temperature": 1.0, "seed": 5}}


@pytest.fixture(scope="module")
def stack(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Up]:
    folder = save_deepseek(tmp_path_factory.mktemp("deepseek"), eps=0.003)
    with running("--model", folder, *EVERY_ROUND) as up:  # it finds the module by itself
        yield up


@pytest.mark.parametrize("sampling", SAMPLINGS)
async def test_mtp_module_when_drafting_keeps_text_and_is_accepted(
    stack: Up, sampling: str
) -> None:
    options = GenerateOptions(
        prompt="def fibonacci(n):\n    return",
        max_tokens=40,
        ignore_eos=True,
        aux_info=True,
        **SAMPLINGS[sampling],
    )
    plain = await complete(stack.grpc, replace(options, speculation=False), timeout_s=120)
    drafted = await complete(stack.grpc, options, timeout_s=120)
    assert len(plain.token_ids) == 40
    assert drafted.token_ids == plain.token_ids
    assert [counts.method for counts in drafted.aux.by_method] == ["mtp"]
    assert drafted.aux.accepted > 0
