"""One tiny model for all tests of the offline API: loading takes longer than they do."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from gateway.config import GeneratorConfig
from outrider.models.tokenizer import Tokenizer
from outrider.offline import llm
from outrider.offline.arguments import Arguments, scorer_options
from outrider.offline.engine import LocalEngine
from scorer_service.config import ScorerOptions
from tests.support.checkpoints.tiny_pair import save_pair


@pytest.fixture(scope="session")
def pair(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, Path]:
    """Target and draft that differ often enough for every kind of token to occur."""
    return save_pair(tmp_path_factory.mktemp("pair"), eps=0.15)


@pytest.fixture(scope="session")
def shared_engine(pair: tuple[Path, Path]) -> Iterator[LocalEngine]:
    """The target, drafted for by the draft model."""
    target, draft = map(str, pair)
    speculation = {"method": "draft_model", "model": draft, "num_speculative_tokens": 3}
    arguments = Arguments(
        model=target,
        device="cpu",
        max_num_seqs=8,
        kv_cache_memory=32,
        speculation_policy="fixed",
        speculative_config=speculation,
        served_model_name="tiny",
    )
    config = GeneratorConfig(served_model_name="tiny", default_max_tokens=24, ends_at_context=True)
    tokenizer = Tokenizer.load(pair[0])
    with LocalEngine(scorer_options(arguments), tokenizer, config) as engine:
        yield engine
        assert_idle(engine)


@pytest.fixture
def engine(
    shared_engine: LocalEngine, monkeypatch: pytest.MonkeyPatch
) -> Iterator[list[ScorerOptions]]:
    """Every model that is loaded is the shared one; the options that were asked for."""
    asked: list[ScorerOptions] = []

    def load(options: ScorerOptions, *_: Any) -> LocalEngine:
        asked.append(options)
        return shared_engine

    monkeypatch.setattr(llm, "LocalEngine", load)
    for name in ("close", "dispose"):  # a model may be forgotten after its test
        monkeypatch.setattr(shared_engine, name, lambda: None)
    yield asked
    assert_idle(shared_engine)


def assert_idle(engine: LocalEngine) -> None:
    """Nothing is left of any request."""
    assert not engine._runs
    assert engine._places._taken == 0
    assert not engine._core._hub._sessions  # type: ignore[union-attr]
