"""A simulated scorer with known hidden states and too few pages, and random requests to it."""

from __future__ import annotations

import random
from collections.abc import Sequence
from typing import Any

from outrider.config import EngineConfig
from outrider.engine.hidden_states.streams import HiddenStateStreams
from outrider.engine.runner import EagerStep, Runner
from outrider.engine.step import Step
from outrider.params import SamplingParams, StopParams
from outrider.policy.base import FixedPolicy
from outrider.types import Request
from tests.support.models.features import FeatureHash
from tests.support.models.hash_model import HashModel, Sequential
from tests.support.simulators.methods import VOCAB
from tests.support.simulators.simulation import World

MAX_LEN, PAGE_SIZE, NUM_PAGES, NUM_REQUESTS = 48, 4, 26, 5
TRUTH = Sequential(HashModel(VOCAB, max_model_len=MAX_LEN))


class FeatureModel(FeatureHash, HashModel):
    """The target."""


class Eager(Runner):
    """Runs a step when it is launched, as a device does."""

    def launch(self, step: Step) -> EagerStep:
        launched = EagerStep(self, step)
        launched.run()
        return launched


def feature_world(
    rng: random.Random, k: int, waits_s: Sequence[float], budget: int, *, max_ahead_bytes: int = 0
) -> World:
    """Drafts K tokens in every round, and waits for them for one of `waits_s`."""
    config = EngineConfig(PAGE_SIZE, NUM_PAGES, 3, budget, MAX_LEN, num_speculative_tokens=k)
    model = FeatureModel(VOCAB, PAGE_SIZE, NUM_PAGES, MAX_LEN)
    parts: dict[str, Any] = {"runner": Eager(model)} if max_ahead_bytes else {}
    parts["features"] = HiddenStateStreams(model.capture(), max_ahead_bytes=max_ahead_bytes)
    policy = FixedPolicy(k, max_wait_s=rng.choice(waits_s))
    return World(policy, config, lambda step: 0.001 + step.num_tokens / 64e3, rng, model, **parts)


def run_random_requests(world: World) -> None:
    """Their prompts share a prefix. Each one's text must be the target's alone."""
    rng = world.rng
    prefix = tuple(rng.randrange(VOCAB) for _ in range(rng.randrange(20)))
    for session in range(1, NUM_REQUESTS + 1):
        prompt = (*prefix, *(rng.randrange(VOCAB) for _ in range(rng.randint(1, 8))))
        sampling = SamplingParams(temperature=rng.choice((0.0, 1.0)), seed=session)
        room = StopParams(max_tokens=rng.randint(1, MAX_LEN - len(prompt)))
        world.begin(Request(session, prompt, sampling=sampling, stop=room))
    world.run()
    for session, request in world.requests.items():
        tokens, _ = TRUTH.output(request, MAX_LEN, frozenset())
        assert world.committed[session][len(request.prompt_token_ids) :] == tokens
