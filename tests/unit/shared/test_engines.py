"""Which engine serves which model."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from outrider.engines import AUTO, NATIVE, VLLM, Wanted, choose, naming_vllm
from outrider.errors import ConfigError, UnsupportedModelError

LLAMA = {"architectures": ["LlamaForCausalLM"]}
MOE = {"architectures": ["Qwen3MoeForCausalLM"], "num_experts": 128}
GEMMA = {"architectures": ["Gemma3ForCausalLM"], "sliding_window": 1024}
MLA = {"architectures": ["DeepseekV3ForCausalLM"], "kv_lora_rank": 512}
HYBRID = {"architectures": ["Qwen3NextForCausalLM"], "layer_types": ["linear_attention"]}


@pytest.mark.parametrize(
    ("config", "fields", "engine"),
    [
        (LLAMA, {}, NATIVE),
        (MOE, {}, NATIVE),
        (GEMMA, {}, NATIVE),
        (MLA, {}, NATIVE),
        (LLAMA, {"on_gpu": True}, NATIVE),
        (MOE, {"on_gpu": True}, VLLM),
        (GEMMA, {"on_gpu": True}, VLLM),
        (MLA, {"on_gpu": True}, VLLM),
        (LLAMA, {"num_devices": 2}, VLLM),
        (LLAMA, {"quantised": True}, VLLM),
        (HYBRID, {}, VLLM),
        ({"architectures": ["X"], "index_topk": 8}, {}, VLLM),
    ],
)
def test_auto_takes_native_where_it_is_exact_and_faster(
    config: dict[str, Any], fields: dict[str, Any], engine: str
) -> None:
    wanted = Wanted(config, **fields)
    assert choose(AUTO, wanted, installed=True) == engine
    assert choose(VLLM, wanted, installed=True) == VLLM


@pytest.mark.parametrize(
    ("asked", "wanted", "slower"),
    [
        (AUTO, Wanted(MOE, on_gpu=True), True),
        (AUTO, Wanted(LLAMA, num_devices=2), False),
        (VLLM, Wanted(LLAMA), False),
        (VLLM, Wanted(HYBRID), False),
    ],
)
def test_lack_of_vllm_names_what_to_install_and_a_slower_engine_if_there_is_one(
    asked: str, wanted: Wanted, slower: bool
) -> None:
    with pytest.raises(ConfigError, match=r"pip install 'outrider\[vllm\]'") as error:
        choose(asked, wanted, installed=False)
    assert ("--engine native" in error.value.message) == slower


def test_model_that_native_refuses_is_left_to_its_refusal_without_vllm() -> None:
    assert choose(AUTO, Wanted(HYBRID), installed=False) == NATIVE


def test_native_engine_serves_what_it_is_asked_to_but_from_one_device() -> None:
    assert choose(NATIVE, Wanted(MOE, on_gpu=True), installed=True) == NATIVE
    with pytest.raises(ConfigError, match="one device"):
        choose(NATIVE, Wanted(LLAMA, num_devices=2), installed=True)


def test_wanted_reads_a_nested_text_model_and_quantisation_beside_it(tmp_path: Path) -> None:
    nested = {"text_config": {"kv_lora_rank": 8}, "architectures": ["X"]}
    (tmp_path / "config.json").write_text(json.dumps(nested))
    assert Wanted.of(tmp_path, on_gpu=True).config["kv_lora_rank"] == 8
    assert not Wanted.of(tmp_path, on_gpu=True).quantised
    (tmp_path / "hf_quant_config.json").write_text("{}")
    assert Wanted.of(tmp_path, on_gpu=True).quantised


def test_refusal_of_the_native_engine_names_vllm() -> None:
    error = naming_vllm(UnsupportedModelError("It keeps recurrent state."))
    assert error.message.startswith("It keeps recurrent state. vLLM may serve it: --engine vllm")


@pytest.mark.parametrize(
    "config", [{"layer_types": 3}, {"num_experts": "many"}, {"architectures": [[]]}]
)
def test_config_with_a_field_of_a_wrong_type_is_refused(config: dict[str, Any]) -> None:
    with pytest.raises(ConfigError, match=r"config\.json has a wrong type"):
        choose(AUTO, Wanted(config, on_gpu=True), installed=True)
