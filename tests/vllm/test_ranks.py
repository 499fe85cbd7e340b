"""Tensor-parallel ranks in processes of their own verify what the first or its device chooses."""

from __future__ import annotations

import contextlib
from typing import Any

import pytest

from tests.support.services.vllm_ahead import CAPTURED, LATE, let_cpu_schedule_ahead
from tests.vllm.conftest import Engine
from tests.vllm.test_ahead import mixed
from tests.vllm.test_in_process import FLAGS, KEPT
from tests.vllm.test_texts import KINDS, PROMPTS

pytestmark = [pytest.mark.vllm, pytest.mark.timeout(600), pytest.mark.filterwarnings("default")]


@pytest.mark.parametrize(
    ("chooser", "method", "late"),
    [
        ("LOOP", "eagle3", 0),
        ("LOOP", "draft_model", 0),
        ("BRANCHES", "draft_model", 3000),  # looks, for which the device works
        ("HOST", "draft_model", 0),
    ],
)
def test_ranks_that_schedule_ahead_emit_the_same_texts(
    chooser: str, method: str, late: int, engine: Engine, monkeypatch: pytest.MonkeyPatch
) -> None:
    from outrider.vllm.ahead_config import allow

    let_cpu_schedule_ahead(monkeypatch)
    allow()
    monkeypatch.setenv(LATE, str(late))
    options: dict[str, Any] = {}
    if chooser == "LOOP":
        monkeypatch.setenv(CAPTURED, "1")
        options = {"additional_config": {"outrider": FLAGS.format(method)}}
    ours = Engine(
        worker_cls="tests.support.services.counting_rank.CountingRank",
        tensor_parallel_size=2,
        async_scheduling=True,
        **options,
    )
    KEPT.append(ours)
    executor = ours.llm.llm_engine.engine_core.engine_core.model_executor
    remote = ours.proposer("--method", method, "--max-branches", "8")
    try:
        with contextlib.nullcontext() if chooser == "LOOP" else remote:
            ours.llm.collective_rpc("take_choosers")
            for kind, params in KINDS.items():
                assert ours.texts(PROMPTS, **params) == engine.texts(PROMPTS, **params), kind
            assert ours.answers(PROMPTS, mixed()) == engine.answers(PROMPTS, mixed())
            first, other = ours.llm.collective_rpc("take_choosers")
    finally:
        executor.shutdown()  # else its ranks would look for work all the time
    assert first == other
    assert first[chooser] > sum(first.values()) / 2 > 40
