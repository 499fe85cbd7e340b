"""The step benchmark's engine part, on a CPU: it times the sizes it is asked for."""

from __future__ import annotations

import torch
from transformers import LlamaConfig, LlamaForCausalLM

from benchmarks.lib.engine_step import EngineSteps
from outrider.engine.model.loader import ModelOptions, build_paged_model


def test_engine_steps_of_every_size_are_timed_and_the_loop_decodes() -> None:
    torch.manual_seed(0)
    config = LlamaConfig(
        vocab_size=1000,
        hidden_size=32,
        intermediate_size=32,
        num_hidden_layers=1,
        num_attention_heads=2,
        num_key_value_heads=1,
        max_position_embeddings=512,
    )
    model = build_paged_model(
        LlamaForCausalLM(config), ModelOptions(page_size=16, num_pages=3 * 24, max_model_len=384)
    )
    steps = EngineSteps(model, [(1, 1), (3, 1), (3, 5)])
    for rows, query_len in ((1, 1), (3, 5)):
        times = steps.measure(rows, query_len, 40, repeats=3, loop_steps=20)
        assert times.device_ms > 0
        assert times.runner_ms > 0
        assert times.engine_ms is not None
        assert times.gap_ms is not None
    assert steps.measure(3, 1, 40, repeats=3, loop_steps=0).engine_ms is None
