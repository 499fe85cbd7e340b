"""Projections while vLLM starts: nothing may be allocated beside the capture of its graphs."""

from __future__ import annotations

import hashlib
from concurrent.futures import wait

import torch

from outrider.engine.kv_cache.hidden_states import HiddenStatePool
from outrider.features import FeatureSpec
from outrider.vllm.hidden_states.hosted import HostedStates


def test_projections_wait_until_vllm_has_captured_its_graphs() -> None:
    pool = HiddenStatePool(FeatureSpec(8, (), True), 1, 1, torch.device("cpu"))
    states = HostedStates(pool, lambda _: (0, ()))
    matrix = bytes(4 * 8 * 2)
    spec = FeatureSpec(8, (), True, 4, hashlib.sha256(matrix).digest())
    futures = [states.put_projection(spec, bytearray(matrix)) for _ in range(2)]
    assert not wait(futures, 0.2).done
    states.begin()
    futures.append(states.put_projection(spec, bytearray(matrix)))
    assert len(wait(futures, 30).done) == 3
    assert [future.result() for future in futures] == [None] * 3
    failed = states.put_projection(spec, bytearray(2))
    assert failed.exception(30)
