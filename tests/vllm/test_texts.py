"""Texts of vLLM with our proposers: the same as without, whatever becomes of these."""

from __future__ import annotations

import signal
import threading
import time
from collections.abc import Callable
from subprocess import Popen
from typing import Any

import pytest

from tests.vllm.conftest import Engine

pytestmark = [pytest.mark.vllm, pytest.mark.timeout(600), pytest.mark.filterwarnings("default")]

PROMPTS = [
    *("The little dog ran to", "Once upon a time there was a", "Lily and Tom went to the park"),
    *("It was raining, so", "The red ball rolled", "Mom said that", "A big bear lived in the"),
    *("One day, a boy named Tim", "The cat sat", "In the forest there was", "Ben had a toy car."),
    *("The sun was", "Sara wanted to bake", "There was once a king", "The bird flew", "At night"),
]
GREEDY = {"temperature": 0.0, "max_tokens": 32}
SAMPLED = {"temperature": 1.0, "max_tokens": 32}
FILTERED = {"temperature": 0.8, "top_p": 0.9, "top_k": 40, "max_tokens": 32}
PENALIZED = {"temperature": 1.0, "frequency_penalty": 0.7, "max_tokens": 32}
KINDS = {"greedy": GREEDY, "sampled": SAMPLED, "filtered": FILTERED, "penalized": PENALIZED}


@pytest.fixture(scope="session")
def alone(engine: Engine) -> dict[str, list[tuple[int, ...]]]:
    """The texts without any proposer."""
    assert engine.info["verification"] == "coupled"
    engine.texts(PROMPTS[:1], **GREEDY)  # with which the last requests of other tests are counted
    engine.drafted()
    texts = {kind: engine.texts(PROMPTS, **params) for kind, params in KINDS.items()}
    assert engine.drafted() == (0, 0)
    return texts


def test_engine_with_seeds_and_no_draft_repeats_its_texts(
    engine: Engine, alone: dict[str, Any]
) -> None:
    for kind, params in KINDS.items():
        assert engine.texts(PROMPTS, **params) == alone[kind]
    assert alone["sampled"] != alone["greedy"]
    assert alone["sampled"] != alone["penalized"]
    other = engine.texts(PROMPTS[::-1], **SAMPLED)[::-1]
    assert other[0] != alone["sampled"][0], "another seed, another text"


@pytest.mark.parametrize("flags", ["suffix", "ngram", "draft_model"])
def test_engine_with_proposer_emits_the_same_texts(
    flags: str, engine: Engine, alone: dict[str, Any]
) -> None:
    with engine.proposer("--method", flags):
        for kind, params in KINDS.items():
            assert engine.texts(PROMPTS, **params) == alone[kind], kind
            if flags == "draft_model":
                drafted, accepted = engine.drafted()
                assert accepted > drafted / 5 > 0, kind


def test_engine_with_proposer_killed_hung_and_restarted_fails_no_request(
    engine: Engine, alone: dict[str, Any]
) -> None:
    params = {**SAMPLED, "max_tokens": 160, "ignore_eos": True}
    expected = engine.texts(PROMPTS, **params)

    def hung(process: Any) -> None:
        process.send_signal(signal.SIGSTOP)
        time.sleep(1.0)
        process.send_signal(signal.SIGCONT)

    with engine.proposer("--method", "draft_model") as first:
        assert during(hung, first, lambda: engine.texts(PROMPTS, **params)) == expected
        engine.drafted()
        assert during(Popen.kill, first, lambda: engine.texts(PROMPTS, **params)) == expected
    with engine.proposer("--method", "draft_model"):
        assert engine.texts(PROMPTS, **GREEDY) == alone["greedy"]
        assert engine.drafted()[1] > 0


def during(act: Callable[[Any], None], process: Any, work: Callable[[], Any]) -> Any:
    """Do `work`, and half a second after it began, `act`."""
    timer = threading.Timer(0.5, act, (process,))
    timer.start()
    began = time.monotonic()
    done = work()
    assert time.monotonic() - began > 0.6, "it was over before anything happened"
    timer.join()
    return done
