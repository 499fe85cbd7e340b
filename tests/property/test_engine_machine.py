"""The engine under arbitrary interleavings; its invariants hold after every rule."""

from __future__ import annotations

import random

from hypothesis import HealthCheck, settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, precondition, rule

from outrider.config import EngineConfig
from outrider.policy.base import Policy
from tests.property.test_engine_equality import Scenario, configs, policies


class EngineMachine(RuleBasedStateMachine):
    """Each rule is one thing that can happen to an engine between two steps."""

    scenario: Scenario

    @initialize(
        seed=st.integers(0, 2**32), config=configs, policy=st.integers(0, 8).flatmap(policies)
    )
    def start(self, seed: int, config: EngineConfig, policy: Policy) -> None:
        self.scenario = Scenario(random.Random(seed), config, policy)

    @rule()
    def submit(self) -> None:
        self.scenario.submit()

    @precondition(lambda self: self.scenario.clients)
    @rule(blocks=st.integers(1, 3))
    def draft(self, blocks: int) -> None:
        for _ in range(blocks):
            self.scenario.draft()

    @precondition(lambda self: self.scenario.open)
    @rule()
    def abort(self) -> None:
        self.scenario.abort()

    @precondition(lambda self: self.scenario.open)
    @rule(proposer=st.sampled_from((None, "a", "b")))
    def attach(self, proposer: str | None) -> None:
        self.scenario.attach(proposer)

    @rule(seconds=st.sampled_from((0.001, 0.05)))
    def wait(self, seconds: float) -> None:
        self.scenario.now += seconds

    @rule(steps=st.integers(1, 4))
    def step(self, steps: int) -> None:
        for _ in range(steps):
            self.scenario.step()

    @precondition(lambda self: self.scenario.open)
    @rule()
    def fail_a_forward(self) -> None:
        self.scenario.fail_a_forward()

    @invariant()
    def books_agree(self) -> None:
        if hasattr(self, "scenario"):
            self.scenario.engine.check_invariants()

    def teardown(self) -> None:
        if hasattr(self, "scenario"):
            self.scenario.finish()


TestEngineMachine = EngineMachine.TestCase
TestEngineMachine.settings = settings(
    max_examples=150,
    stateful_step_count=30,
    deadline=None,
    derandomize=True,
    suppress_health_check=list(HealthCheck),
)
