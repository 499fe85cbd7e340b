"""A proposer within vLLM's worker, which drafts between its steps."""

from __future__ import annotations

from typing import Any

import pytest

from outrider.drafting.hidden_states.cached_proposer import CachedHeadProposer
from outrider.errors import ConfigError
from outrider.vllm import adapter
from tests.vllm.conftest import Engine
from tests.vllm.test_ahead import LONG
from tests.vllm.test_hidden_states import config_of
from tests.vllm.test_texts import KINDS, PROMPTS

pytestmark = [pytest.mark.vllm, pytest.mark.timeout(600), pytest.mark.filterwarnings("default")]

FLAGS = "--port 0 --data-port 0 --speculation-policy fixed --in-process-proposer '--method {}'"
KEPT: list[Engine] = []
"""An engine that is collected ends what all engines of a process share."""


def drafting(method: str, **options: Any) -> Engine:
    """Start an engine whose worker drafts by a method."""
    engine = Engine(additional_config={"outrider": FLAGS.format(method)}, **options)
    KEPT.append(engine)
    return engine


@pytest.mark.parametrize("method", ["draft_model", "ngram"])
def test_engine_with_proposer_in_its_worker_emits_the_same_texts(
    method: str, engine: Engine
) -> None:
    ours = drafting(method)
    for kind, params in KINDS.items():
        assert ours.texts(PROMPTS, **params) == engine.texts(PROMPTS, **params), kind
        if method == "draft_model":
            drafted, accepted = ours.drafted()
            assert accepted > drafted / 5 > 0, kind


def test_head_in_its_worker_keeps_texts_through_preemption_and_failures(
    engine: Engine, monkeypatch: pytest.MonkeyPatch
) -> None:
    ours = drafting("eagle3", block_size=32, num_gpu_blocks_override=64)  # for a part of the texts
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


def test_proposer_in_the_worker_and_steps_ahead_are_refused_together(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(adapter, "schedules_ahead", lambda _: True)
    with pytest.raises(ConfigError, match="leave --async-scheduling out"):
        config_of("--in-process-proposer '--method ngram'")
    monkeypatch.undo()
    with pytest.raises(ConfigError, match=r"in-process-proposer.*no-such-flag"):
        config_of("--in-process-proposer '--method ngram --no-such-flag 1'")
