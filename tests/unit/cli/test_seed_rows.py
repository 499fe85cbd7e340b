"""What becomes of other engines' flags for quantisation, MLA, experts and several devices.

Each case is a row of the tables in docs/engines.md, by words that the row holds.
"""

from __future__ import annotations

import json
import shlex
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import pytest
from safetensors.numpy import save_file

from outrider.cli.command_line import main

PAGE = (Path(__file__).parents[3] / "docs" / "engines.md").read_text()
LLAMA = {"architectures": ["LlamaForCausalLM"], "model_type": "llama", "dtype": "bfloat16"}
DEEPSEEK = {
    "architectures": ["DeepseekV3ForCausalLM"],
    "model_type": "deepseek_v3",
    "kv_lora_rank": 512,
    "n_routed_experts": 256,
    "dtype": "bfloat16",
}
FP8 = {"quant_method": "fp8", "activation_scheme": "dynamic", "weight_block_size": [128, 128]}


class Case(NamedTuple):
    row: str
    """Words of its row in the page."""
    flags: str
    scorer: str
    """Words in the scorer's command, or after `REFUSED:` of the error."""
    config: dict[str, Any] = LLAMA


def stored(method: str, config: dict[str, Any] = LLAMA) -> dict[str, Any]:
    return config | {"quantization_config": {"quant_method": method}}


CASES = (
    # Quantisation
    Case("`a8w8_fp8_wint4`", "--quant_type a8w8_fp8_wint4", "REFUSED:--quantization int8 or fp8"),
    Case("`weight_only_int4`", "--quant_type weight_only_int4", "REFUSED:--quantization int8 or"),
    Case("`weight_only_int8`", "--quant_type weight_only_int8", "--quantization int8"),
    Case("`a8w8_fp8`", "--quant_type a8w8_fp8", "--quantization fp8"),
    Case(
        "`weight_only_int8`",
        "--quant_type weight_only_int8",
        "REFUSED:give vLLM's own after --",
        DEEPSEEK,
    ),
    Case(
        "int8_per_channel",
        "-- --quantization int8_per_channel",
        "-- --quantization int8_",
        DEEPSEEK,
    ),
    Case("DeepSeek-V3 and R1", "", "--engine vllm", DEEPSEEK | {"quantization_config": FP8}),
    Case("a scale per block", "", "--engine vllm", LLAMA | {"quantization_config": FP8}),
    Case("AWQ", "", "--engine vllm", stored("awq")),
    Case("GPTQ", "", "--engine vllm", stored("gptq")),
    Case("ModelOpt", "", "--engine vllm", stored("modelopt")),
    Case("MXFP4", "", "--engine vllm", stored("mxfp4")),
    Case("`--quantization ascend`", "--quantization ascend", "REFUSED:--quantization ascend"),
    Case("`FP8_PER_BLOCK`", "--draft-model MODEL --sp_quantization FP8_PER_BLOCK", "--quant"),
    Case("`FP8`", "--draft-model MODEL --sp_quantization FP8", "--quantization int8"),
    Case("draft in int4", "--sp_quantization INT4", "REFUSED:--draft-quantization int8"),
    Case("draft in int8", "--draft-model MODEL --draft-quantization int8", "--quantization int8"),
    # Attention, experts, parallel
    Case("MLA", "", "--engine vllm", DEEPSEEK),
    Case(
        "`--mla_use_matrix_absorption`", "--mla_use_matrix_absorption 1", "--engine vllm", DEEPSEEK
    ),
    Case("DeepSeek-V3.2", "", "--engine vllm", DEEPSEEK | {"index_topk": 2048}),
    Case("mixtures of experts", "", "--engine vllm", LLAMA | {"num_experts": 128}),
    Case("`--enable-expert-parallel`", "-tp 8 --enable-expert-parallel", "--enable-expert-par"),
    *(
        Case("tensor, pipeline, data parallel", f"{flag} 4", "-- --tensor-parallel-size 4")
        for flag in ("--tensor-parallel-size", "-tp", "--tp", "--tp-size", "--tp_size")
    ),
    Case("tensor, pipeline, data parallel", "--gpus 0,1", "-- --tensor-parallel-size 2"),
    Case("tensor, pipeline, data parallel", "-pp 2", "-- --pipeline-parallel-size 2"),
    Case("tensor, pipeline, data parallel", "-dp 2", "-- --data-parallel-size 2"),
    Case("tensor, pipeline, data parallel", "--data-parallel-size 1", "--engine native"),
    Case("`--distributed-executor-backend`", "-tp 2 --distributed-executor-backend mp", "-size 2"),
    Case("two machines", "-tp 16 --nnodes 2 --master-addr a", "--nnodes 2 --master-addr a"),
    Case("`--ips`", "--ips a,b", "REFUSED:--nnodes N --master-addr FIRST"),
    Case(
        "draft on one device beside a target on several",
        "-tp 4 --draft-model MODEL --speculative-config.draft_tensor_parallel_size 1",
        "--tensor-parallel-size 4",
    ),
    Case("recurrent and hybrid layers", "", "--engine vllm", LLAMA | {"layer_types": ["mamba"]}),
)


@pytest.mark.parametrize("case", CASES, ids=lambda case: f"{case.row}: {case.flags}")
def test_row_of_the_tables_is_served_or_refused_as_the_page_says(
    case: Case, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    tables = [line for line in PAGE.splitlines() if line.startswith("|")]
    assert any(case.row in line for line in tables)
    (tmp_path / "config.json").write_text(json.dumps(case.config))
    save_file({"x": np.zeros(1)}, tmp_path / "model.safetensors")
    words = shlex.split(case.flags.replace("MODEL", str(tmp_path)))
    code = main(["serve", str(tmp_path), "--device", "cuda", "--dry-run", *words])
    said = capsys.readouterr()
    if case.scorer.startswith("REFUSED:"):
        assert code == 2
        assert case.scorer.removeprefix("REFUSED:") in said.err
        return
    assert code == 0, said.err
    scorer = next(line for line in said.out.splitlines() if line.startswith("scorer: "))
    assert case.scorer in shlex.join(shlex.split(scorer))
