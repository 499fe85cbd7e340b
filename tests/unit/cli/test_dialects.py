"""Command lines of other engines, as their documentation has them, after `outrider serve`."""

from __future__ import annotations

import re
import shlex

import pytest

from outrider.cli.command_line import main
from outrider.cli.dialects import DIALECTS
from outrider.cli.translate import translate
from outrider.errors import ConfigError

PROGRAMS = (
    "lmdeploy serve",
    "vllm serve",
    "python -m vllm.entrypoints.openai.api_server",
    "python -m sglang.launch_server",
    "python3 -m rtp_llm.start_server",
    "python3 -m lmdeploy.mtp.pipeline",
    "python -m paddle.distributed.launch",
    "python",
)

EAGLE3 = """lmdeploy serve api_server \
meta-llama/Llama-3.1-8B-Instruct \
--backend pytorch \
--server-port 24545 \
--speculative-draft-model yuhuili/EAGLE3-LLaMA3.1-Instruct-8B \
--speculative-algorithm eagle3 \
--speculative-num-draft-tokens 3 \
--max-batch-size 128 \
--enable-metrics"""

LMDEPLOY_MTP = """lmdeploy serve api_server \
deepseek-ai/DeepSeek-V3 \
--backend pytorch \
--server-port 24545 \
--tp 16 \
--speculative-algorithm deepseek_mtp \
--speculative-num-draft-tokens 3 \
--max-batch-size 128 \
--enable-metrics"""

OPT = """python -m vllm.entrypoints.openai.api_server --host 0.0.0.0 --port 8000 \
       --model facebook/opt-6.7b \
       --seed 42 -tp 1 \
       --speculative_model facebook/opt-125m \
       --use-v2-block-manager \
       --num_speculative_tokens 5 \
       --gpu_memory_utilization 0.8 """

VLLM_NGRAM = """vllm serve meta-llama/Meta-Llama-3.1-8B-Instruct --tensor-parallel-size 1 \
--speculative-config '{"method": "ngram", "num_speculative_tokens": 5, "prompt_lookup_max": 4}'"""

VLLM_EAGLE = """vllm serve meta-llama/Meta-Llama-3.1-8B-Instruct --tensor-parallel-size 4 \
--distributed-executor-backend mp --enforce-eager --async-scheduling --speculative-config \
'{"method": "eagle", "model": "yuhuili/EAGLE-LLaMA3.1-Instruct-8B", \
"draft_tensor_parallel_size": 1, "num_speculative_tokens": 2}'"""

VLLM_SUFFIX = """vllm serve meta-llama/Meta-Llama-3.1-8B-Instruct --tensor-parallel-size 1 \
--enforce-eager --speculative-config '{"method": "suffix", "num_speculative_tokens": 15}'"""

OLD_NGRAM = """vllm serve facebook/opt-6.7b --tensor-parallel-size 1 --speculative_model "[ngram]" \
--num_speculative_tokens 5 --ngram_prompt_lookup_max 4"""

OLD_MLP = """vllm serve meta-llama/Meta-Llama-3.1-70B-Instruct --tensor_parallel_size 4 \
--speculative_model ibm-fms/llama3-70b-accelerator --speculative_draft_tensor_parallel_size 1"""

REFERENCE = """python predictor.py --model_name_or_path meta-llama/Llama-2-7b-chat \
--inference_model --dtype float16 --speculate_method inference_with_reference \
--speculate_max_draft_token_num 5 --speculate_max_ngram_size 2"""

RTP_VANILLA = """python3 -m rtp_llm.start_server --checkpoint_path a/Qwen2.5-7B \
--model_type qwen_2 --sp_type vanilla --sp_checkpoint_path a/Qwen2.5-0.5B \
--sp_model_type qwen --gen_num_per_cycle 5"""

RTP_DETERMINISTIC = """python3 -m rtp_llm.start_server --checkpoint_path a/b \
--sp_type deterministic --gen_num_per_cycle 128 --sp_min_token_match 2 --sp_max_token_match 2"""

RTP_MTP = """python3 -m rtp_llm.start_server --checkpoint_path a/b --sp_type mtp \
--sp_checkpoint_path a/b-mtp --sp_model_type qwen_2_mtp --gen_num_per_cycle 5"""

RTP_EAGLE3 = """python3 -m rtp_llm.start_server --checkpoint_path a/b --sp_type eagle3 \
--sp_checkpoint_path a/b-eagle3 --sp_model_type qwen_3_moe_eagle3 --gen_num_per_cycle 5"""

SGLANG = """python -m sglang.launch_server --model-path a/b --speculative-algorithm EAGLE3 \
--speculative-draft-model-path a/head --speculative-num-steps 3 --speculative-eagle-topk 4 \
--speculative-num-draft-tokens 16 --mem-fraction-static 0.75 --tp 1"""

TAKEN = {
    EAGLE3: "MODEL --port 24545 --draft-model yuhuili/EAGLE3-LLaMA3.1-Instruct-8B --method eagle3 "
    "--num-speculative-tokens 3 --max-num-seqs 128",
    LMDEPLOY_MTP: "MODEL --port 24545 --tensor-parallel-size 16 --method deepseek_mtp "
    "--num-speculative-tokens 3 --max-num-seqs 128",
    OPT: "--host 0.0.0.0 --port 8000 --model facebook/opt-6.7b --seed 42 --tensor-parallel-size 1 "
    "--draft-model facebook/opt-125m --num-speculative-tokens 5 --gpu-memory-utilization 0.8",
    VLLM_NGRAM: "MODEL --tensor-parallel-size 1 --method ngram --num-speculative-tokens 5 "
    "--prompt-lookup-max 4",
    VLLM_EAGLE: "MODEL --tensor-parallel-size 4 --method eagle --draft-model "
    "yuhuili/EAGLE-LLaMA3.1-Instruct-8B --num-speculative-tokens 2",
    VLLM_SUFFIX: "MODEL --tensor-parallel-size 1 --method suffix --num-speculative-tokens 15",
    OLD_NGRAM: "MODEL --tensor-parallel-size 1 --method=ngram --num-speculative-tokens 5 "
    "--prompt-lookup-max 4",
    OLD_MLP: "MODEL --tensor-parallel-size 4 --draft-model ibm-fms/llama3-70b-accelerator",
    REFERENCE: "--model meta-llama/Llama-2-7b-chat --dtype float16 --method "
    "inference_with_reference --num-speculative-tokens 5 --prompt-lookup-max 2 "
    "--prompt-lookup-min=1",
    RTP_VANILLA: "--model a/Qwen2.5-7B --method draft_model --draft-model a/Qwen2.5-0.5B "
    "--num-speculative-tokens 5",
    RTP_DETERMINISTIC: "--model a/b --method deterministic --num-speculative-tokens 128",
    RTP_MTP: "--model a/b --method mtp --draft-model a/b-mtp --num-speculative-tokens 5",
    RTP_EAGLE3: "--model a/b --method eagle3 --draft-model a/b-eagle3 --num-speculative-tokens 5",
    SGLANG: "--model a/b --method eagle3 --draft-model a/head --tree-width 4 "
    "--num-speculative-tokens 16 --gpu-memory-utilization 0.75 --tensor-parallel-size 1",
}

MTP_PIPELINE = """python3 -m lmdeploy.mtp.pipeline \
    --model-path /path/to/DeepSeek-R1 \
    --mtp-path /path/to/MTP \
    --tp 8 \
    --session-len 4096 \
    --max-batch-size 16 \
    --quantization a8w8_fp8_wint4 \
    --mtp-quant a8w8_fp8 \
    --cache-max-entry-count 0.5 \
    --num-tokens 8"""

PADDLE_MTP = """python -m paddle.distributed.launch {ips} --gpus 0,1,2,3,4,5,6,7 \
  predictor.py \
  --model_name_or_path deepseek-ai/DeepSeek-R1 \
  --dtype bfloat16 \
  --mode {mode} \
  --inference_model 1 \
  --append_attn 1 \
  --total_max_length 8192 \
  --quant_type {quant} \
  --max_length 2048 \
  --speculate_method mtp \
  --draft_model_name_or_path deepseek-ai/DeepSeek-R1-MTP \
  --draft_model_quant_type {draft_quant} \
  --speculate_max_draft_token_num 1 \
  --return_full_hidden_states 1 \
  --mla_use_matrix_absorption 1"""
TWO_NODES = '--ips "192.168.0.1,192.168.0.2"'

PADDLE_EXPORT = """python -m paddle.distributed.launch --ips "192.168.0.1,192.168.0.2" \
  --gpus 0,1,2,3,4,5,6,7 \
  export_model.py \
  --model_name_or_path deepseek-ai/DeepSeek-R1 \
  --output_path /path/to/exported_model \
  --dtype bfloat16 \
  --inference_model 1 \
  --append_attn 1 \
  --block_attn 1 \
  --total_max_length 8192 \
  --quant_type weight_only_int8 \
  --speculate_method inference_with_reference \
  --return_full_hidden_states 1 \
  --mla_use_matrix_absorption 1"""

VLLM_MTP = """vllm serve /deepseek-ai/DeepSeek-V3.2-Exp-W8A8 \
    --port 20004 \
    --data-parallel-size 1 \
    --tensor-parallel-size 16 \
    --enable-expert-parallel \
    --seed 1024 \
    --served-model-name dsv3 \
    --max-model-len 36768 \
    --max-num-batched-tokens 5000 \
    --max-num-seqs 10 \
    --quantization ascend \
    --trust-remote-code \
    --gpu-memory-utilization 0.9 \
    --compilation-config '{"cudagraph_mode": "FULL_DECODE_ONLY"}' \
    --speculative-config '{"num_speculative_tokens": 2, "method":"deepseek_mtp", \
"disable_padded_drafter_batch": "False"}'"""


def paddle(ips: str, mode: str, quant: str, draft_quant: str) -> str:
    return PADDLE_MTP.format(ips=ips, mode=mode, quant=quant, draft_quant=draft_quant)


INT4, INT8, FP8 = "weight_only_int4", "weight_only_int8", "a8w8_fp8"
REFUSED = {
    MTP_PIPELINE: (
        "--quantization a8w8_fp8_wint4: write --quantization int8 or fp8",
        "--cache-max-entry-count 0.5: write --gpu-memory-utilization",
    ),
    paddle(TWO_NODES, "dynamic", INT8, INT8): ("--ips",),
    paddle(TWO_NODES, "dynamic", FP8, FP8): ("--ips",),
    paddle("", "dynamic", "weight_only_int4", INT8): ("--quant_type weight_only_int4: write",),
    paddle(TWO_NODES, "static", INT8, INT8): ("--mode static: leave it out", "--ips"),
    paddle(TWO_NODES, "static", FP8, FP8): ("--mode static: leave it out", "--ips"),
    PADDLE_EXPORT: ("--output_path /path/to/exported_model: leave it out", "--ips"),
    VLLM_MTP: ("--quantization ascend: write",),
    RTP_VANILLA + " --sp_quantization INT4": (
        "--sp_quantization INT4: write --draft-quantization",
    ),
    "vllm serve a/b --api-key x": ("--api-key: write the key into a file: --api-key-file",),
    "vllm serve a/b --speculative-config '{\"lookahead\": 1}'": ("lookahead is unknown; method,",),
    "vllm serve a/b --speculative-config ngram": ("takes a JSON object",),
    "vllm serve a/b --speculative-model": ("--speculative-model lacks its value",),
}


def after_serve(command: str) -> list[str]:
    """The words that a user writes after `outrider serve`: theirs, less the program."""
    (program,) = [each for each in PROGRAMS if command.startswith(f"{each} ")][:1]
    return shlex.split(command.removeprefix(program))


def shortened(command: str) -> str:
    return " ".join(command.split()[:4])


@pytest.mark.parametrize("command", TAKEN, ids=shortened)
def test_command_of_other_engine_means_the_same_here(
    command: str, capsys: pytest.CaptureFixture[str]
) -> None:
    words = after_serve(command)
    (model,) = re.findall(r"\S+/\S+", command)[:1]
    assert translate(words, {})[0] == shlex.split(TAKEN[command].replace("MODEL", model))
    assert main(["serve", *words, "--dry-run"]) == 0
    said = capsys.readouterr()
    assert "in Outrider's own words: outrider serve" in said.err
    assert model in next(line for line in said.out.splitlines() if line.startswith("scorer: "))


@pytest.mark.parametrize("command", REFUSED, ids=shortened)
def test_command_that_cannot_be_taken_names_what_to_write(
    command: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["serve", *after_serve(command), "--dry-run"]) == 2
    said = capsys.readouterr()
    assert said.out == ""
    for reason in REFUSED[command]:
        assert reason in said.err


def test_paddlenlp_command_without_quantisation_is_taken() -> None:
    words = after_serve(paddle("", "dynamic", "None", INT8))
    ours, notes = translate(words, {})
    assert shlex.join(ours) == (
        "--tensor-parallel-size 8 --model deepseek-ai/DeepSeek-R1 --dtype bfloat16 "
        "--max-model-len 8192 --quantization none --default-max-tokens 2048 --method mtp "
        "--draft-model deepseek-ai/DeepSeek-R1-MTP --draft-quantization int8 "
        "--num-speculative-tokens 1"
    )
    assert any(note.startswith("--append_attn 1 is not needed") for note in notes)


@pytest.mark.parametrize("theirs", ["FP8", "FP8_PER_BLOCK", "INT8"])
def test_8_bits_of_a_draft_are_int8_by_any_name(theirs: str) -> None:
    ours, _ = translate(["m", "--sp_quantization", theirs], {})
    assert ours == ["m", "--draft-quantization", "int8"]


def test_float8_caches_of_four_exponent_bits_are_taken_and_others_refused() -> None:
    ours, _ = translate(["m", "--kv-cache-dtype", "fp8_e4m3"], {})
    assert ours == ["m", "--kv-cache-dtype", "fp8"]
    with pytest.raises(ConfigError, match=r"--kv-cache-dtype fp8_e5m2: write fp8, .*--engine vllm"):
        translate(["m", "--kv-cache-dtype", "fp8_e5m2"], {})


def test_synthetic_acceptance_of_vllm_is_ours() -> None:
    config = (
        '{"num_speculative_tokens": 2, "rejection_sample_method": "synthetic", '
        '"synthetic_acceptance_rates": [0.9, 0.5]}'
    )
    ours, _ = translate(["m", "--speculative-config", config], {})
    rates = ["--synthetic-acceptance-rates", "[0.9, 0.5]"]
    assert ours == ["m", "--num-speculative-tokens", "2", *rates]


def test_synthetic_acceptance_of_vllm_without_rates_is_refused() -> None:
    name = "--speculative-config.rejection_sample_method"
    with pytest.raises(ConfigError, match=r"needs .*_rates or synthetic_acceptance_length"):
        translate(["m", name, "synthetic"], {})
    with pytest.raises(ConfigError, match="synthetic needs synthetic_acceptance_rates"):
        translate(["m", "--speculative-config", '{"rejection_sample_method": "synthetic"}'], {})
    rates = ["--speculative-config.synthetic_acceptance_rates", "0.9,0.5"]
    ours, _ = translate(["m", name, "synthetic", *rates], {})
    assert ours == ["m", "--synthetic-acceptance-rates", "0.9,0.5"]
    length = ["--speculative-config.synthetic_acceptance_length", "2.6"]
    ours, _ = translate(["m", name, "synthetic", *length], {})
    assert ours == ["m", "--synthetic-acceptance-length", "2.6"]


def test_pipeline_of_eight_tokens_drafts_seven() -> None:
    ours, _ = translate(["m", "--mtp-path", "d", "--num-tokens", "8"], {})
    assert ours == ["m", "--draft-model", "d", "--method=mtp", "--num-speculative-tokens", "7"]


PADDLE_CONTAINER = {
    **{"CUDA_VISIBLE_DEVICES": "0,1,2,3,4,5,6,7", "MP_NUM": "8", "SPECULATE_METHOD": "mtp"},
    **{"SPECULATE_MODEL_PATH": "/models-mtp", "SPECULATE_MAX_DRAFT_TOKEN_NUM": "1"},
    **{"BLOCK_BS": "32", "BLOCK_RATIO": "0.25", "BATCH_SIZE": "128"},
}


def test_variables_of_paddlenlp_container_count_like_flags() -> None:
    ours, _ = translate(["start_server", "/models"], PADDLE_CONTAINER)
    assert shlex.join(ours) == (
        "--method mtp --draft-model /models-mtp --num-speculative-tokens 1 "
        "--tensor-parallel-size 8 --max-num-seqs 128 --page-size 32 /models"
    )
    two_nodes = PADDLE_CONTAINER | {"MP_NUM": "16", "MP_NNODE": "2"}
    with pytest.raises(ConfigError, match="MP_NNODE 2: write --nnodes N --master-addr"):
        translate(["/models"], two_nodes)
    with pytest.raises(ConfigError, match="SPECULATE_MODEL_QUANT_TYPE weight_only_int4"):
        translate(["/models"], PADDLE_CONTAINER | {"SPECULATE_MODEL_QUANT_TYPE": INT4})


def test_variables_of_rtp_llm_count_like_flags_and_less_than_them() -> None:
    variables = {"SP_TYPE": "vanilla", "SP_CHECKPOINT_PATH": "d", "GEN_NUM_PER_CIRCLE": "5"}
    ours, notes = translate(["m", "--gen_num_per_cycle", "3"], variables)
    assert shlex.join(ours) == (
        "--method draft_model --draft-model d --num-speculative-tokens 5 m "
        "--num-speculative-tokens 3"
    )
    assert any("in Outrider's own words" in note for note in notes)


def test_variables_without_their_leading_one_mean_nothing() -> None:
    assert translate(["m"], {"MP_NUM": "8", "BATCH_SIZE": "1", "TP_SIZE": "2"}) == (["m"], [])


def test_own_command_line_is_left_alone() -> None:
    words = ["m", "--served-model-name", "api_server", "--max_num_seqs=4", "--seed", "-1"]
    ours, notes = translate(words, {})
    assert ours == ["m", "--served-model-name", "api_server", "--max-num-seqs=4", "--seed", "-1"]
    assert notes == []


def test_dotted_keys_of_vllm_are_read_like_json() -> None:
    ours, _ = translate(["m", "--speculative-config.method", "ngram"], {})
    assert ours == ["m", "--method", "ngram"]
    assert translate(["m", "--speculative-config.prompt_lookup_max=3"], {})[0] == [
        "m",
        "--prompt-lookup-max",
        "3",
    ]


def test_flags_of_two_dialects_mean_the_same_in_both() -> None:
    rules: dict[str, object] = {}
    for dialect in DIALECTS.values():
        for flag, rule in dialect.flags.items():
            assert rules.setdefault(flag, rule) == rule, flag
        assert set(dialect.variables.values()) <= {*rules, "--port", "--tensor-parallel-size"}


def test_flags_of_ours_in_the_tables_exist() -> None:
    from outrider.cli.command_line import build_parser

    serve = build_parser().parse_args(["serve", "m"]).parser
    known = set(serve._option_string_actions)
    for dialect in DIALECTS.values():
        for rule in dialect.flags.values():
            for each in (rule, *(rule.keys or {}).values()):
                own = (each.ours, *each.also, *each.values.values())
                words = [word for word in own if word and word.startswith("--")]
                assert {word.partition("=")[0] for word in words} <= known
