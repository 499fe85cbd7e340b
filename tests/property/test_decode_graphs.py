"""An engine with captured steps says what one row after the other says, in any history."""

from __future__ import annotations

import random

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from outrider.config import EngineConfig
from outrider.engine.engine import Engine
from outrider.engine.graphs.decode_buckets import Bucket, make_buckets
from outrider.engine.graphs.decode_graphs import DecodeGraphs
from outrider.engine.sampling.verify import choose_and_verify
from outrider.policy.base import FixedPolicy, Policy
from tests.property.test_engine_equality import EOS, Scenario, configs
from tests.support.models.recordable import rerun
from tests.unit.graphs.test_decode_graphs import SAMPLINGS, RecordableHashModel


class GraphScenario(Scenario):
    """The engine's property test, with captured steps."""

    def __init__(self, rng: random.Random, config: EngineConfig, policy: Policy) -> None:
        super().__init__(rng, config, policy)
        if rng.random() < 0.7:  # what is drawn in the captured step itself
            self.samplings, self.top_logprobs = SAMPLINGS[:3], (None,)
        self.model = model = RecordableHashModel(config.page_size, config.num_pages)
        most = config.max_num_seqs
        ragged = {
            Bucket(q, most, trees, most * q * share // 4)
            for q, trees in ((5, False), (5, True), (9, True))
            for share in (1, 2, 3)
            if most * q * share // 4 >= most
        }
        buckets = [*make_buckets(most, (1, 3, 5), (5, 9)), *ragged]
        self.graphs = DecodeGraphs(
            model, buckets, capture=rerun, choose_and_verify=choose_and_verify
        )
        self.engine = Engine(
            model, config, eos_token_ids=EOS, policy=policy, runner=self.graphs, clock=self.clock
        )


@pytest.mark.timeout(600)  # a quarter of a minute on a machine of its own
@settings(max_examples=100, derandomize=True, suppress_health_check=list(HealthCheck))
@given(seed=st.integers(0, 2**32), config=configs, k=st.integers(0, 8))
def test_engine_with_decode_graphs_equals_sequential_decoding(
    seed: int, config: EngineConfig, k: int
) -> None:
    scenario = GraphScenario(random.Random(seed), config, FixedPolicy(k, max_wait_s=0.002))
    for _ in range(40):
        scenario.act()
    scenario.finish()
