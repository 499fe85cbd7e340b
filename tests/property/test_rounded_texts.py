"""Targets with 8-bit weights or caches say the same with and without drafts."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from outrider import LLM, SamplingParams
from tests.support.checkpoints.tiny_pair import save_pair


@pytest.fixture(scope="module")
def pair(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, Path]:
    return save_pair(tmp_path_factory.mktemp("pair"), eps=0.15)


@pytest.mark.parametrize(
    "rounding", [{"quantization": "int8"}, {"quantization": "fp8"}, {"kv_cache_dtype": "fp8"}]
)
def test_texts_of_rounded_target_do_not_depend_on_drafts(
    rounding: dict[str, Any], pair: tuple[Path, Path]
) -> None:
    prompts = ["def fib(n):", "The future of AI is"]
    texts, accepted = [], 0
    for draft_tokens in (0, 5):
        speculation = {
            "method": "draft_model",
            "model": str(pair[1]),
            "num_speculative_tokens": draft_tokens,
        }
        llm = LLM(
            str(pair[0]),
            device="cpu",
            **rounding,
            speculative_config=speculation if draft_tokens else {},
            speculation_policy="fixed",
        )
        for temperature in (0.0, 1.0):
            params = SamplingParams(temperature=temperature, seed=3, max_tokens=24)
            outputs = llm.generate(prompts, params, use_tqdm=False)
            texts.append([each.outputs[0].token_ids for each in outputs])
            accepted += sum(each.aux_info.accepted for each in outputs if each.aux_info)
    assert texts[:2] == texts[2:]
    assert accepted > 0
