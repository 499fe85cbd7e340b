"""A proposer within vLLM's worker, which drafts between its steps or behind them."""

from __future__ import annotations

import random
from collections.abc import Callable, Iterator
from typing import Any

import pytest

from outrider.drafting.hidden_states.cached_proposer import CachedHeadProposer
from outrider.errors import ConfigError
from outrider.vllm.draft_host import DraftHost
from outrider.vllm.waiting import LockstepFixedPolicy
from tests.support.services.vllm_ahead import let_cpu_schedule_ahead
from tests.support.services.vllm_loops import capture_loops
from tests.vllm.conftest import Engine
from tests.vllm.test_ahead import LONG, mixed
from tests.vllm.test_hidden_states import config_of
from tests.vllm.test_texts import KINDS, PENALIZED, PROMPTS

pytestmark = [pytest.mark.vllm, pytest.mark.timeout(600), pytest.mark.filterwarnings("default")]

FLAGS = "--port 0 --data-port 0 --speculation-policy fixed --in-process-proposer '--method {}'"
KEPT: list[Engine] = []
"""An engine that is collected ends what all engines of a process share."""

Start = Callable[..., Engine]


@pytest.fixture(scope="module")
def drafting(engine: Engine) -> Iterator[Start]:  # noqa: ARG001
    """Starts an engine whose worker drafts by a method."""
    from outrider.vllm.ahead_config import allow

    with pytest.MonkeyPatch.context() as patch:
        let_cpu_schedule_ahead(patch)
        allow()

        def start(method: str, **options: Any) -> Engine:
            ours = Engine(additional_config={"outrider": FLAGS.format(method)}, **options)
            KEPT.append(ours)
            return ours

        yield start


def check_texts(ours: Engine, engine: Engine, *, often: bool = True) -> None:
    for kind, params in KINDS.items():
        expected = engine.texts(PROMPTS, **params)
        engine.drafted()
        ours.drafted()
        assert ours.texts(PROMPTS, **params) == expected, kind
        drafted, accepted = ours.drafted()
        assert not often or accepted > drafted / 5 > 0, kind


@pytest.mark.parametrize("ahead", [False, True], ids=["in turns", "ahead"])
@pytest.mark.parametrize("method", ["draft_model", "ngram"])
def test_engine_with_proposer_in_its_worker_emits_the_same_texts(
    method: str, ahead: bool, engine: Engine, drafting: Start
) -> None:
    ours = drafting(method, async_scheduling=ahead)
    check_texts(ours, engine, often=method != "ngram")


@pytest.mark.parametrize("ahead", [False, True], ids=["in turns", "ahead"])
def test_head_in_its_worker_keeps_texts_through_preemption_and_failures(
    ahead: bool, engine: Engine, drafting: Start, monkeypatch: pytest.MonkeyPatch
) -> None:
    # Pages for a part of the texts.
    ours = drafting("eagle3", async_scheduling=ahead, block_size=32, num_gpu_blocks_override=64)
    for kind, params in (*KINDS.items(), ("long", LONG)):
        assert ours.texts(PROMPTS, **params) == engine.texts(PROMPTS, **params), kind
        drafted, accepted = ours.drafted()
        assert accepted > drafted / 5 > 0, kind
    draft, calls = CachedHeadProposer.draft, iter(range(1000))

    def failing(*args: Any) -> Any:
        if next(calls) % 8 == 5:
            raise RuntimeError("no device")
        return draft(*args)

    monkeypatch.setattr(CachedHeadProposer, "draft", failing)
    params = KINDS["sampled"]
    assert ours.texts(PROMPTS, **params) == engine.texts(PROMPTS, **params)


@pytest.mark.parametrize("method", ["eagle3", "draft_model"])
def test_steps_begin_with_drafts_that_were_made_behind_the_last(
    method: str, engine: Engine, drafting: Start
) -> None:
    with pytest.MonkeyPatch.context() as patch:
        counts = capture_loops(patch)
        ours = drafting(method, async_scheduling=True, max_num_seqs=6)  # requests come and go
        check_texts(ours, engine)
        steps = counts["behind"]
        assert steps >= counts["LOOP"] > steps / 2 > 50
        expected = engine.answers(PROMPTS, mixed())
        counts.clear()
        assert ours.answers(PROMPTS, mixed()) == expected
    assert counts["LOOP"] > counts["behind"] / 2 > 10, "beside grammars and penalties"


def test_texts_are_the_same_whatever_rows_have_no_drafts(engine: Engine, drafting: Start) -> None:
    chance = random.Random(8)

    def at_random(_: DraftHost, names: list[str], **__: Any) -> frozenset[str]:
        share = chance.choice([0.0, 0.5, 1.0])
        return frozenset([name for name in names if chance.random() < share])

    with pytest.MonkeyPatch.context() as patch:
        counts = capture_loops(patch)
        patch.setattr(DraftHost, "undrafted", at_random)
        ours = drafting("eagle3", async_scheduling=True, block_size=32, num_gpu_blocks_override=64)
        check_texts(ours, engine)
        for params in (LONG, PENALIZED):
            assert ours.texts(PROMPTS, **params) == engine.texts(PROMPTS, **params)
    assert counts["LOOP"] > 50


def test_steps_have_no_room_for_drafts_that_the_policy_does_not_want(
    engine: Engine, drafting: Start, monkeypatch: pytest.MonkeyPatch
) -> None:
    sizes: list[int] = []
    begin = DraftHost.begin_step

    def noted(host: DraftHost, ended: Any, scheduled: Any, verified: Any, *args: Any) -> None:
        sizes.extend([len(verified.get(name, ())) for name in scheduled])
        begin(host, ended, scheduled, verified, *args)

    expected = engine.texts(PROMPTS, **LONG)
    monkeypatch.setattr(DraftHost, "begin_step", noted)
    capture_loops(monkeypatch)
    ours = drafting("eagle3", async_scheduling=True)
    assert ours.texts(PROMPTS, **LONG) == expected
    assert sizes.count(4) > 0.8 * len(sizes)
    sizes.clear()
    monkeypatch.setattr(LockstepFixedPolicy, "drafting", False)
    monkeypatch.setattr(LockstepFixedPolicy, "choose_counts", lambda _, rows: [0] * len(rows))
    assert ours.texts(PROMPTS, **LONG) == expected
    assert sizes.count(0) > 0.9 * len(sizes)


def test_flags_of_no_proposer_are_refused() -> None:
    with pytest.raises(ConfigError, match=r"in-process-proposer.*no-such-flag"):
        config_of("--in-process-proposer '--method ngram --no-such-flag 1'")
